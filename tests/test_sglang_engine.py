"""An `sglang.Engine` in the trainer's own process, as verl has it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.engines import SGLANG_VERSIONS, engine_tree, results_of

import wsync
from wsync import UnsupportedError
from wsync._core import InvalidArgumentError
from wsync.handles.base import handle
from wsync.handles.sglang_engine import SglangHandle
from wsync.trainer.roster import RolloutEngine

SCRIPT = Path(__file__).parent / "support" / "sglang_engine.py"


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_every_worker_unpickles_its_own_tensors(version: str) -> None:
    found = results_of(SCRIPT, engine_tree("sglang", version), timeout=120)
    assert found == {
        "equal": [True] * 4,
        "forms": ["Tensor"],
        "handle": "SglangHandle",
        "version": "2",
        "open": False,
    }


class Manager:
    """A tokenizer manager that only notes what it is given."""

    async def update_weights_from_tensor(self, request: Any, _: None) -> tuple[bool, str]:
        self.seen = vars(request)
        return True, "Success"


class Engine:
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.tokenizer_manager = Manager()

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: Any = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        raise AssertionError("one list of tensors for all workers")


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    made.loop = asyncio.new_event_loop()
    yield made
    made.loop.close()


def with_forms(monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    """Gives this process an SGLang with this request for tensors."""
    requests = SimpleNamespace(UpdateWeightsFromTensorReqInput=form)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)


def test_stock_buckets_are_one_payload_per_worker(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_forms(monkeypatch, SimpleNamespace)
    found = handle(engine, workers=2)
    assert isinstance(found, SglangHandle)
    payloads = [b"\x80one", b"\x80two"]
    found.update_weights(payloads, load_format="flattened_bucket", weight_version=None, timeout=5)
    assert engine.tokenizer_manager.seen == {
        "serialized_named_tensors": payloads,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


@pytest.mark.parametrize(
    ("field", "value"), [("disable_draft_model", True), ("selector", "target")]
)
def test_buckets_are_for_the_model_where_its_draft_is_another_one(
    engine: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    """SGLang 0.5.20 and older, and newer ones, which begin a session for it, too."""
    names = ("serialized_named_tensors", "load_format", "flush_cache", field)
    with_forms(monkeypatch, make_dataclass("Form", [(name, Any) for name in names]))
    engine.server_args = SimpleNamespace(
        tp_size=1,
        model_path="/model",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="/head",
    )
    begun: list[str] = []
    if field == "selector":
        engine.begin_weight_update = lambda selector="all": begun.append(selector)
    found = handle(engine)
    found.update_weights([b"x"], load_format="flattened_bucket", weight_version=None, timeout=5)
    assert engine.tokenizer_manager.seen[field] == value
    assert begun == ["target"] * (field == "selector")


@pytest.mark.parametrize(
    ("arguments", "workers", "text"),
    [
        ({"tp_size": 1, "pp_size": 2}, None, "pp_size 2: SGLang answers for its first"),
        ({"tp_size": 2, "tokenizer_worker_num": 4}, 2, "tokenizer_worker_num 4"),
        ({"tp_size": 4}, 2, "has 4 workers, but workers=2"),
        ({"tp_size": 2, "dp_size": 2}, None, "dp_size 2: SGLang updates data-parallel replicas"),
    ],
)
def test_what_sglang_does_not_update_wholly_is_refused(
    arguments: dict[str, Any], workers: int | None, text: str
) -> None:
    engine: Any = Engine()
    engine.server_args = SimpleNamespace(**arguments)
    with pytest.raises((UnsupportedError, InvalidArgumentError), match=text):
        RolloutEngine.of(handle(engine, workers=workers), None, wsync.Options(), 1)
    engine.server_args = SimpleNamespace(tp_size=2, pp_size=1, custom_weight_loader=["a.b"])
    found = handle(engine)
    assert (found.workers, found.load_formats) == (2, ("a.b",))
