"""Loaders that are watched once and replayed: the module holds what its load_weights gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from support.fused import SHAPES, Fused, Pairs, bytes_of, changed, differing, draw, held
from support.workers import ThreadEngine

import wsync
from wsync._core import Layout, LayoutBuilder, Memory
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=2048, ring_nbytes=8192)


def update(engine: ThreadEngine, *seeds: int) -> wsync.Report:
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        for seed in seeds:
            report = sync.update(draw(seed))
    return report


def loaded(module: Fused, seed: int) -> dict[str, torch.Tensor]:
    """What the module holds after its own load_weights."""
    module.load_weights(list(draw(seed).items()))
    return held(module)


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(("tp", "ep"), [(1, False), (2, False), (2, True)])
def test_every_byte_is_what_load_weights_gives(tp: int, ep: bool, needed: bool) -> None:
    modules = [Fused(tp, rank, ep=ep) for rank in range(tp)]
    loaders = [RecordedLoader(module, needed=needed) for module in modules]
    update(ThreadEngine(loaders), 1, 2)
    for rank, (module, loader) in enumerate(zip(modules, loaders, strict=True)):
        assert loader.reason == ""
        assert differing(held(module), loaded(Fused(tp, rank, ep=ep), 2)) == []
        assert loader.learnt is not None
        assert loader.computed() == {}
        assert loader.facts()["unwritten"] == [["rotary", 28]]
        skipped = loader.facts()["skipped"]
        assert len(skipped) == (6 if ep else 0)
        assert all(name.startswith("experts.") for name in skipped)


def test_workers_are_sent_what_they_keep_and_nothing_twice() -> None:
    modules = [Fused(2, rank, ep=True) for rank in range(2)]
    full = update(ThreadEngine([RecordedLoader(m, needed=False) for m in modules]), 1)
    needed = update(ThreadEngine([RecordedLoader(m) for m in modules]), 1)
    assert full.delivered_nbytes == 2 * full.model_nbytes
    assert needed.redundancy == 1.0
    assert needed.delivered_nbytes < 0.7 * full.delivered_nbytes


def test_parameters_may_move_and_what_else_changes_is_learnt_anew() -> None:
    module = Fused()
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.qkv = torch.nn.Parameter(torch.empty_like(module.qkv), requires_grad=False)
        module.o.data = module.o.data.clone()
        module.w_kc = module.w_kc.clone()
        sync.update(draw(2))
        assert differing(held(module), loaded(Fused(), 2)) == []
        module.norm.data = module.norm.data.float()
        sync.update(draw(4))  # learns anew in a second attempt
    other = Fused()
    other.norm.data = other.norm.data.float()
    assert differing(held(module), loaded(other, 4)) == []


def test_a_parameter_without_memory_is_named() -> None:
    module = Fused()
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update()
        module.o.untyped_storage().resize_(0)
        with pytest.raises(wsync.WsyncError, match=r"o \(P.*\): its 1024 bytes have no memory"):
            sync.update()


def scaled(module: Fused, pairs: Pairs) -> None:
    for name, tensor in pairs:
        if name == "norm":
            module.norm.data.copy_(tensor * 2 + 1)
        else:
            Fused.load_weights(module, [(name, tensor)])


def paired_scaled(module: Fused, pairs: Pairs) -> None:
    Fused.load_weights(module, [pair for pair in pairs if pair[0] != "norm"])
    scaled(module, [pair for pair in pairs if pair[0] == "norm"])


def computed_attribute(module: Fused, pairs: Pairs) -> None:
    Fused.load_weights(module, pairs)
    if any(name == "kv_b" for name, _ in pairs):
        module.w_kc.mul_(2)


@pytest.mark.parametrize(
    ("load", "names", "reason"),
    [
        (paired_scaled, {"norm"}, "norm is not a copy of it"),
        (computed_attribute, {"kv_b"}, "w_kc is not a copy of it"),
    ],
)
def test_what_is_no_copy_goes_through_load_weights(
    load: Callable[[Fused, Pairs], None], names: set[str], reason: str
) -> None:
    module = changed(load)
    loader = RecordedLoader(module)
    update(ThreadEngine([loader]), 1, 2)
    assert loader.reason == ""
    assert loader.learnt is not None
    assert loader.computed().keys() == names
    assert reason in loader.computed()[names.pop()]
    assert differing(held(module), loaded(changed(load), 2)) == []


def raising(module: Fused, pairs: Pairs) -> None:
    pairs = list(pairs)
    Fused.load_weights(module, pairs[:3])
    if len(pairs) == len(SHAPES):
        raise ValueError("half way")
    Fused.load_weights(module, pairs[3:])


def test_a_model_of_other_tensors_is_learnt_anew_or_refused() -> None:
    module = Fused()
    loader = RecordedLoader(module, ignore=["norm"])
    engine = ThreadEngine([loader])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(1))
    first, norm = loader.learnt, bytes_of(module.norm)
    fewer = {name: tensor for name, tensor in draw(2).items() if name != "norm"}
    with wsync.connect(fewer, engines=[engine], options=OPTIONS) as sync:
        sync.update()
    assert loader.learnt is not None
    assert loader.learnt is not first
    assert ("norm", len(norm)) in map(tuple, loader.facts()["unwritten"])
    assert bytes_of(module.wide) == bytes_of(fewer["wide"].bfloat16())
    narrower = {**draw(3), "wide": draw(3)["wide"][:, :8].contiguous()}
    with wsync.connect(narrower, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match="must match"):
            sync.update()
    assert "copies cannot replace the load_weights of Fused" in loader.reason
    assert not engine.receivers[0].state.consistent
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(draw(4))
    assert differing(held(module), loaded(Fused(), 4)) == []
    assert engine.receivers[0].state.consistent


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("wide", lambda t: t[:, :8].contiguous(), r"wide: source shape \[5, 8\] != destination"),
        ("o", lambda t: t.half(), "o: no conversion from float16 to bfloat16"),
        ("norm", lambda _: None, "norm: the source has no such tensor"),
    ],
)
def test_a_ring_of_another_model_is_refused_before_anything_is_written(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None], text: str
) -> None:
    module = Fused()
    loader = RecordedLoader(module)
    loader.learn(ring_of(draw(0))[1])
    before = held(module)
    other = {**draw(1), name: change(draw(1)[name])}
    with pytest.raises(wsync.WsyncError, match=text):
        loader.attach(*ring_of({n: t for n, t in other.items() if t is not None}))
        loader.begin(1)
    assert differing(held(module), before) == []


def ring_of(tensors: dict[str, torch.Tensor]) -> tuple[Memory, Layout]:
    """A ring with room for all tensors in one round, and its manifest."""
    builder, offset = LayoutBuilder(), 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        zeros, shape = [0] * tensor.dim(), list(tensor.shape)
        builder.add_shard(name, dtype, shape, zeros, shape, 0, offset, strides)
        offset += -(-tensor.nbytes // 64) * 64
    return Memory(offset), builder.build()


def test_a_loader_that_raises_is_told_and_survived() -> None:
    broken = [True]

    def load(module: Fused, pairs: Pairs) -> None:
        (raising if broken[0] else Fused.load_weights)(module, pairs)

    module = changed(load)
    loader = RecordedLoader(module)
    engine = ThreadEngine([loader])
    options = wsync.Options(deadline=60, progress=False)
    with wsync.connect(draw(0), engines=[engine], options=options) as sync:
        with pytest.raises(wsync.RemoteError, match="half way"):
            sync.update(draw(1))
        assert "it raised ValueError: half way" in loader.reason
        assert not engine.receivers[0].state.consistent
        broken[0] = False
        sync.update(draw(2))
    assert loader.reason == ""
    assert engine.receivers[0].state.consistent
    assert differing(held(module), loaded(Fused(), 2)) == []


def test_a_tensor_that_is_skipped_is_listed(caplog: pytest.LogCaptureFixture) -> None:
    def load(module: Fused, pairs: Pairs) -> None:
        Fused.load_weights(module, [pair for pair in pairs if pair[0] != "o"])

    module = changed(load)
    before = held(module)["o"]
    loader = RecordedLoader(module, ignore=["o"])
    update(ThreadEngine([loader]), 1)
    assert loader.learnt is not None
    assert loader.facts()["skipped"] == ["o"]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "wsync: no engine uses o: these tensors are not delivered",
    ]
    assert ("o", before.nbytes) in map(tuple, loader.facts()["unwritten"])
    assert bytes_of(module.o) == bytes_of(before)


def test_a_loader_that_makes_its_tensors_is_learnt_when_it_has_run() -> None:
    def load(module: Fused, pairs: Pairs) -> None:
        if not hasattr(module, "made"):
            module.made = torch.zeros(HIDDEN := SHAPES["norm"][0], dtype=torch.bfloat16)
            assert HIDDEN
        module.made.copy_(dict(pairs)["norm"])
        Fused.load_weights(module, pairs)

    module = changed(load)
    loader = RecordedLoader(module)
    update(ThreadEngine([loader]), 3)
    assert loader.reason == ""
    assert bytes_of(module.made) == bytes_of(draw(3)["norm"])


def test_something_may_be_done_after_each_update() -> None:
    seen: list[bytes] = []
    module = Fused()
    loader = RecordedLoader(module, after=lambda m: seen.append(bytes_of(m.norm)))
    update(ThreadEngine([loader]), 1, 2)
    assert seen == [bytes_of(draw(seed)["norm"]) for seed in (1, 2)]
    # CUDA graphs would go on with the old tensor
    loader = RecordedLoader(module, after=lambda m: m.double())
    with pytest.raises(wsync.WsyncError, match=r"becomes torch\.float64"):
        update(ThreadEngine([loader]), 3)


class Whole(torch.nn.Module):
    """Fuses q, k and v where one call brings all three; computes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(24, 8), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(5, 8, 8), requires_grad=False)
        self.calls: list[list[str]] = []

    def load_weights(self, pairs: Pairs) -> None:
        given = dict(pairs)
        self.calls.append(list(given))
        for number in range(5):
            if f"o{number}" in given:
                self.o[number] = given[f"o{number}"] * 2 + 1
        self.fuse(given)

    def fuse(self, given: dict[str, torch.Tensor]) -> None:
        if {"q", "k", "v"} <= given.keys():
            self.qkv.copy_(torch.cat([given["q"], given["k"], given["v"]]))


class Complaining(Whole):
    def fuse(self, given: dict[str, torch.Tensor]) -> None:
        self.qkv.copy_(torch.cat([given["q"], given["k"], given["v"]]))


@pytest.mark.parametrize("kind", [Whole, Complaining])
def test_what_cannot_be_learnt_gets_all_tensors_in_one_call(kind: type[Whole]) -> None:
    """A round brings one tensor here."""
    names = ["q", "o0", "o1", "k", "o2", "v", "o3", "o4"]
    tensors = {name: torch.randn(8, 8) for name in names} | {"none": torch.empty(0, 8)}
    module, other = kind(), kind()
    loader = RecordedLoader(module)
    options = wsync.Options(deadline=60, progress=False, round_nbytes=256, ring_nbytes=8192)
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=options) as sync:
        for _ in range(2):
            for tensor in tensors.values():
                tensor.normal_()
            before = len(module.calls)
            sync.update()
            other.load_weights(list(tensors.items()))
            assert torch.equal(module.qkv, other.qkv) and torch.equal(module.o, other.o)
    assert "copies cannot replace" in loader.reason
    assert module.calls[before:] == [list(tensors)]


def test_a_loader_that_nobody_has_any_more_goes_at_once() -> None:
    """With the module that it keeps, whose weights may fill a GPU."""
    loader = RecordedLoader(Fused())
    loader.learn(ring_of(draw(0))[1])
    assert loader.learnt is not None
    gone = weakref.ref(loader)
    gc.collect()
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()
