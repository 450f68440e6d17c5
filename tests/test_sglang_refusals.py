"""SGLang keeps to itself what a loader answers: the trainer is told why an update fails."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.engines import NEWEST, engine_tree
from support.workers import ThreadEngine

import wsync
from wsync import sglang
from wsync._core import WsyncError

OPTIONS = wsync.Options(deadline=20, progress=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 8), requires_grad=False)
        self.visual = torch.nn.Linear(4, 4)

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            parameters[name].data.copy_(tensor)


class Deaf(ThreadEngine):
    """Hears nothing of what its worker says, as SGLang."""

    def __init__(self, model: Model) -> None:
        super().__init__([])
        self.workers = 1
        self.model = model
        self.paused = False

    def pause(self, mode: str, timeout: float) -> None:
        self.paused = True

    def resume(self, timeout: float) -> None:
        self.paused = False

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        sglang.load_weights(self.model, pickle.loads(payloads[0]))
        if weight_version is not None:
            self.version = weight_version


def test_the_trainer_is_told_what_fails_before_its_session_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WSYNC_KEEP", "visual.*")
    engine = Deaf(Model())

    def failing(*_: Any) -> Any:
        raise MemoryError("the device is full")

    with wsync.connect({"weight": torch.ones(16, 8)}, engines=[engine], options=OPTIONS) as sync:
        with monkeypatch.context() as patch:
            patch.setattr(sglang, "SglangLoader", failing)
            with pytest.raises(WsyncError, match="MemoryError: the device is full"):
                sync.update(version=2)
        sync.update(version=3)
    assert engine.version == "3"
    assert engine.model.weight.all()


def test_a_model_without_its_vision_tower_is_refused_unless_that_is_to_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {"weight": torch.ones(16, 8)}
    engine = Deaf(Model())
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match=r"visual\.bias .* visual\.weight"):
            sync.update(version=1)
    assert engine.version is None
    monkeypatch.setenv("WSYNC_KEEP", "visual.*")
    engine = Deaf(Model())
    before = engine.model.visual.weight.clone()
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update(version=2)
    assert engine.version == "2"
    assert torch.equal(engine.model.visual.weight, before)


class Staged(Deaf):
    """SGLang gives a request to the second pipeline stage after the first has answered it."""

    def __init__(self) -> None:
        super().__init__(Model())
        self.stages = [self.model, Model()]
        self.started = {"pp_size": 2}

    def server_info(self, timeout: float) -> dict[str, int]:
        return self.started

    def update_weights(self, payloads: Sequence[bytes], **request: Any) -> None:
        for number, model in enumerate(self.stages):
            self.model, place = model, sglang.WorkerPlace(number, 2, number)
            with mock.patch.object(sglang.WorkerPlace, "find", return_value=place):
                super().update_weights(payloads, **request)


def test_pipeline_stages_take_part_in_an_update_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_KEEP", "visual.*")
    engine, weights = Staged(), {"weight": torch.ones(16, 8)}
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        for number in (1, 2):
            sync.update({"weight": torch.full((16, 8), float(number))}, version=number)
            assert all((model.weight == number).all() for model in engine.stages)
    engine.started = {}
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="pp_size 2: the trainer has sent 1 messages"):
            sync.update()


@pytest.mark.parametrize(("version", "module"), [("0.5.17", "mm_utils"), (NEWEST, "mm_schedule")])
def test_what_an_old_vision_tower_has_made_of_images_is_dropped(
    version: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their hashes; SGLang's /flush_cache leaves it."""
    name = f"sglang.srt.managers.{module}"
    source = engine_tree("sglang", version).joinpath(*name.split(".")).with_suffix(".py")
    assert "\nembedding_cache: Optional[MultiModalStaticCache] = None\n" in source.read_text()
    cache = {"cat": torch.ones(1)}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(embedding_cache=cache))
    other = f"sglang.srt.managers.{'mm_utils' if module == 'mm_schedule' else 'mm_schedule'}"
    monkeypatch.setitem(sys.modules, other, SimpleNamespace(embedding_cache=None))
    weights = {name: torch.ones_like(p) for name, p in Model().named_parameters()}
    with wsync.connect(weights, engines=[Deaf(Model())], options=OPTIONS) as sync:
        sync.update(version=1)
    assert not cache


def test_a_version_is_not_given_where_a_worker_refuses_after_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WSYNC_KEEP", "visual.*")
    engine = Deaf(Model())

    def refuse(_: Any) -> None:
        raise wsync.StateError("the module has changed")

    with wsync.connect({"weight": torch.ones(16, 8)}, engines=[engine], options=OPTIONS) as sync:
        sync.update(version=1)
        with monkeypatch.context() as patch:
            patch.setattr(sglang.SglangLoader, "confirm", refuse)
            with pytest.raises(WsyncError, match="the module has changed"):
                sync.update(version=2)
        assert str(engine.version).startswith("updating-") and engine.paused
        sync.update(version=3)
    assert (engine.version, engine.paused) == ("3", False)


def test_the_trainer_is_told_what_a_worker_says_to_the_closing_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang takes the version all the same."""
    monkeypatch.setenv("WSYNC_KEEP", "visual.*")
    engine = Deaf(Model())
    with wsync.connect({"weight": torch.ones(16, 8)}, engines=[engine], options=OPTIONS) as sync:
        sync.update(version=1)
        state = engine.model._wsync_receiver.state

        def replace_first(session: str, number: int, version: str | None) -> None:
            state.commit("another trainer's", number)
            type(state).close(state, session, number, version)

        with monkeypatch.context() as patch:
            patch.setattr(state, "close", replace_first)
            with pytest.raises(WsyncError, match="or other weights have replaced it since"):
                sync.update(version=2)
        assert engine.paused
        sync.update(version=3)
    assert (engine.version, engine.paused) == ("3", False)
