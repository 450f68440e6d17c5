"""Flags and caches that serving sets, and that load_weights looks at before it resets them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.two_weights import Pairs, TwoWeights, draw
from support.workers import ThreadEngine

import wsync
from wsync._core import WsyncError
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)


class Served(TwoWeights):
    """Two parameters, and what serving derives from them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[float]] = []

    def copy(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            getattr(self, name).data.copy_(tensor)

    def derive(self) -> list[list[float]]:
        found: list[list[float]] = (self.a + self.b).tolist()
        return found

    def answer(self) -> Any:
        raise NotImplementedError


class Flag(Served):
    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        if self.ready:
            self.ready = False

    def answer(self) -> Any:
        if not self.ready:
            self.kept, self.ready = self.derive(), True
        return self.kept


class Word(Served):
    def __init__(self) -> None:
        super().__init__()
        self.mode = "fresh"

    def load_weights(self, pairs: Pairs) -> None:
        assert self.mode in ("fresh", "serving")
        self.copy(pairs)
        self.mode = "fresh"

    def answer(self) -> Any:
        if self.mode == "fresh":
            self.kept, self.mode = self.derive(), "serving"
        return self.kept


class Count(Served):
    """How often it was asked; how often it was loaded, which it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.loads = 0

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.loads += 1
        if self.asked > 0:
            self.asked = 0

    def answer(self) -> Any:
        if self.asked == 0:
            self.kept = self.derive()
        self.asked += 1
        return self.kept


class Deleted(Served):
    fused: torch.Tensor

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        if hasattr(self, "fused"):
            del self.fused

    def answer(self) -> Any:
        if not hasattr(self, "fused"):
            self.fused = self.a + self.b
        return self.fused.tolist()


class Popped(Served):
    @functools.cached_property
    def fused(self) -> torch.Tensor:
        return self.a + self.b

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.__dict__.pop("fused", None)

    def answer(self) -> Any:
        return self.fused.tolist()


class Dropped(Served):
    def __init__(self) -> None:
        super().__init__()
        self.fused: torch.Tensor | None = None

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        if self.fused is not None:
            self.fused = None

    def answer(self) -> Any:
        if self.fused is None:
            self.fused = self.a + self.b
        return self.fused.tolist()


class Emptied(Served):
    """Another one has its dict, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}
        self.other = torch.nn.Module()
        self.other.cache = self.cache  # type: ignore[assignment]

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        self.cache.clear()

    def answer(self) -> Any:
        if "fused" not in self.cache:
            self.cache["fused"] = self.a + self.b
        cache: Any = self.other.cache
        return cache["fused"].tolist()


class OfParameter(Served):
    def __init__(self) -> None:
        super().__init__()
        self.a.dirty = True  # type: ignore[attr-defined]

    def load_weights(self, pairs: Pairs) -> None:
        self.copy(pairs)
        if not self.a.dirty:  # type: ignore[attr-defined]
            self.a.dirty = True  # type: ignore[attr-defined]

    def answer(self) -> Any:
        if self.a.dirty:  # type: ignore[attr-defined]
            self.kept = self.derive()
            self.a.dirty = False  # type: ignore[attr-defined]
        return self.kept


class Computing(Flag):
    """One of its tensors goes through its own load_weights."""

    def copy(self, pairs: Pairs) -> None:
        super().copy([(name, tensor.sin() if name == "b" else tensor) for name, tensor in pairs])


class Unlearnt(Flag):
    """Most of its tensors do."""

    def copy(self, pairs: Pairs) -> None:
        super().copy([(name, tensor.sin()) for name, tensor in pairs])


KINDS: list[Any] = [Flag, Word, Count, Deleted, Popped, Dropped, Emptied, OfParameter]


@pytest.mark.parametrize("asked", ["always", "sometimes"])
@pytest.mark.parametrize("kind", [*KINDS, Computing, Unlearnt])
def test_what_load_weights_resets_may_be_looked_at_before(kind: Any, asked: str) -> None:
    module, plain = kind(), kind()
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in range(1, 7):
            sync.update(draw(seed))
            plain.load_weights(list(draw(seed).items()))
            if asked == "always" or seed % 3:
                assert module.answer() == plain.answer()
            assert torch.equal(module.a, plain.a) and torch.equal(module.b, plain.b)
    assert bool(loader.reason) == (kind is Unlearnt)
    assert module.answer() == plain.answer()


def test_what_was_served_by_is_known_to_the_next_trainer() -> None:
    module = Flag()
    loader = RecordedLoader(module)
    engine = ThreadEngine([loader])
    recordings = []
    for _ in range(2):
        with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
            for seed in range(3):
                sync.update(draw(seed))
                module.answer()
        recordings.append(loader.recording)
    assert recordings[0] is recordings[1]
    assert module.answer() == module.derive()


# --- what is reset after load_weights has gone by it ------------------------------------------


def turn_all(module: Served, pairs: Pairs) -> None:
    module.copy([(name, tensor.flip(0)) for name, tensor in pairs])


def clear_behind(module: Served, pairs: Pairs) -> None:
    """Of a buffer, which is otherwise not loaded, and unseen by torch."""
    module.copy(pairs)
    module.kept_buffer.numpy()[:] = 0  # type: ignore[operator]


def skip_one(module: Served, pairs: Pairs) -> None:
    module.copy([pair for pair in pairs if pair[0] == "a"])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("other", [turn_all, clear_behind, skip_one])
def test_what_load_weights_goes_by_before_it_resets_it_is_noticed(
    other: Callable[[Any, Pairs], None], cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name, empty = ("fused", None) if cached else ("ready", False)

    class Going(Dropped if cached else Flag):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept_buffer", torch.ones(8))

        def load_weights(self, pairs: Pairs) -> None:
            served = getattr(self, name) is not empty
            (other if served else Served.copy)(self, pairs)
            if served:
                setattr(self, name, empty)

    module, plain = Going(), Going()
    failed = []
    with wsync.connect(
        draw(0), engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for seed in range(1, 6):
            try:
                sync.update(draw(seed))
            except WsyncError as error:
                failed.append(str(error))
                sync.update(draw(seed))
            plain.load_weights(list(draw(seed).items()))
            for one, two in zip(
                module.state_dict().values(), plain.state_dict().values(), strict=True
            ):
                assert torch.equal(one, two)
            module.answer()
            plain.answer()
    assert len(failed) == 1 and name in failed[0]
    assert f"{name}, which load_weights goes by" in caplog.text or f"{name} is new" in caplog.text
    assert "whole tensors go through its load_weights" in caplog.text


def test_a_third_value_is_not_taken_for_one_that_was_tried() -> None:
    class Third(Word):
        def load_weights(self, pairs: Pairs) -> None:
            (turn_all if self.mode == "odd" else Served.copy)(self, pairs)
            self.mode = "fresh"

    module, plain = Third(), Third()
    with wsync.connect(
        draw(0), engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for seed in range(1, 4):
            sync.update(draw(seed))
            module.answer()
        module.mode = plain.mode = "odd"
        with pytest.raises(WsyncError, match="mode, which load_weights goes by, was 'fresh' and"):
            sync.update(draw(4))
        sync.update(draw(5))
    plain.load_weights(list(draw(5).items()))
    assert torch.equal(module.a, plain.a) and torch.equal(module.b, plain.b)


def test_two_flags_that_count_together_are_tried_together() -> None:
    class Both(Served):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = False

        def load_weights(self, pairs: Pairs) -> None:
            (turn_all if self.one and self.two else Served.copy)(self, pairs)
            self.one = self.two = False

    module, plain = Both(), Both()
    with wsync.connect(
        draw(0), engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for seed, (one, two) in enumerate([(False, False), (True, False), (False, True)]):
            module.one, module.two = one, two
            sync.update(draw(seed))
            assert torch.equal(module.a, draw(seed)["a"])
        module.one = module.two = plain.one = plain.two = True
        with pytest.raises(WsyncError, match="which load_weights goes by, was False and is True"):
            sync.update(draw(4))
        sync.update(draw(5))
    plain.load_weights(list(draw(5).items()))
    assert torch.equal(module.a, plain.a) and torch.equal(module.b, plain.b)


def test_a_try_that_fails_leaves_no_weights_that_pass_for_whole() -> None:
    class Going(Flag):
        def load_weights(self, pairs: Pairs) -> None:
            (turn_all if self.ready else Served.copy)(self, pairs)
            self.ready = False

    module = Going()
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.answer()
        assert engine.receivers[0].consistent
        with pytest.raises(WsyncError, match=r"ready, which .* \(.*\); its weights are lost; "):
            sync.update(draw(2))
        assert module.ready and "update 2" in engine.receivers[0].trouble
        sync.update(draw(2))
        assert engine.receivers[0].consistent


OUTSIDE = torch.zeros(3)


@pytest.mark.parametrize("inside", [False, True])
def test_values_that_load_weights_looks_at_in_one_state_alone_are_noticed(inside: bool) -> None:
    """It goes by them, and nobody compares them in the state that was recorded."""

    class Stale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(3))
            self.stale = False
            self.w = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

        def load_weights(self, pairs: Any) -> None:
            flip = False
            if self.stale:
                self.stale = False
                flip = bool((self.mask if inside else OUTSIDE)[0] > 0)
            for _, tensor in pairs:
                self.w.data.copy_(tensor.flip(0) if flip else tensor)

    module, plain = Stale(), Stale()
    weights = {"w": torch.randn(4, 4)}
    OUTSIDE.zero_()
    with wsync.connect(
        weights, engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        for step in range(4):
            if step == 2:
                for mask in (module.mask, plain.mask, OUTSIDE):
                    mask[0] = 1
            try:
                sync.update()
            except wsync.WsyncError:
                module.stale = plain.stale  # which a failing update leaves
                sync.update()
            plain.load_weights(list(weights.items()))
            assert torch.equal(module.w, plain.w)
            module.stale = plain.stale = True
            weights["w"].normal_()
