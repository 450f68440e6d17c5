"""SGLang's own WeightUpdater hands wsync's loader what a trainer sends, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.engines import SGLANG_VERSIONS, engine_packages, engine_tree

import wsync
from wsync import inspection
from wsync.control import LOAD_FORMAT

SCRIPT = Path(__file__).parent / "support" / "sglang_updater.py"
OPTIONS = wsync.Options(deadline=30, progress=False, round_nbytes=1 << 15, ring_nbytes=1 << 16)


class Engine:
    """slime's engine methods over worker processes; success is all that SGLang answers."""

    workers = 2
    load_formats = (LOAD_FORMAT,)

    def __init__(self, version: str) -> None:
        tree, packages = engine_tree("sglang", version), engine_packages()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the workers live)
        self._pool = ThreadPoolExecutor(self.workers)
        command = [sys.executable, "-P", str(SCRIPT), str(tree), str(packages), "qwen3", "2"]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            )
            for rank in range(self.workers)
        ]
        self.draft = False
        self.version: str | None = None
        self.paused = False
        self.checkpoint = {
            name: (tuple(shape), getattr(torch, dtype))
            for name, (shape, dtype) in self.ask("shapes")[0].items()
        }

    def ask(self, method: str, *given: Any, each: list[Any] | None = None) -> list[Any]:
        def ask(rank: int) -> Any:
            process = self.processes[rank]
            assert process.stdin is not None and process.stdout is not None
            own = () if each is None else (each[rank],)
            process.stdin.write(json.dumps([method, *own, *given]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                self._log.seek(0)
                raise ConnectionError(self._log.read().decode(errors="replace")[-3000:])
            return json.loads(line)

        return list(self._pool.map(ask, range(self.workers)))

    def pause_generation(self) -> None:
        self.paused = True

    def flush_cache(self) -> None: ...

    def continue_generation(self) -> None:
        self.paused = False

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> dict[str, Any]:
        answers = self.ask("update", load_format, self.draft, each=serialized_named_tensors)
        assert answers == [[True, "Success"]] * self.workers
        if weight_version is not None:
            self.version = weight_version
        return {"success": True, "message": "Success"}

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return tiny_models.tensors(self.checkpoint, seed)

    def is_loaded(self, seed: int) -> bool:
        return self.ask("found") == self.ask("expected", seed)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._pool.shutdown()
        self._log.close()


@pytest.fixture(scope="module", params=SGLANG_VERSIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param)
    yield made
    made.close()


def test_a_loader_fault_leaves_the_server_alive(engine: Engine) -> None:
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        engine.ask("set_fault", 3)
        with pytest.raises(wsync.RemoteError, match=r"worker [01]: .*KeyError: 'half way'"):
            sync.update(engine.weights(1), version=1)
        assert [process.poll() for process in engine.processes] == [None, None]
        assert (engine.version, engine.paused) == (None, True)
        engine.ask("set_fault", 0)
        for seed in (2, 3):
            assert sync.update(engine.weights(seed), version=seed).redundancy == 1.0
            assert engine.is_loaded(seed)
    assert (engine.version, engine.paused) == ("3", False)


def test_what_is_no_update_is_survived(engine: Engine) -> None:
    nothing = b"\x80\x04]."  # an empty list, pickled
    wsync.handle(engine).update_weights(
        [nothing] * 2, load_format=LOAD_FORMAT, weight_version=None, timeout=30
    )
    assert [process.poll() for process in engine.processes] == [None, None]


def test_a_draft_model_does_not_take_the_models_place(engine: Engine) -> None:
    engine.draft = True
    try:
        with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
            sync.update(engine.weights(5))
    finally:
        engine.draft = False
    assert engine.is_loaded(5)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("model.layers.0.mlp.down_proj:replaced", "UnquantizedLinearMethod has replaced it"),
        ("model.layers.0.mlp.down_proj:use_intel_amx_backend", "packed for AMX"),
        ("model.layers.1.mlp.down_proj:ue8m0", "packed as UE8M0"),
    ],
)
def test_weights_that_sglang_has_rewritten_are_refused(
    engine: Engine, how: str, reason: str
) -> None:
    engine.ask("rewrite", how)
    before = engine.ask("found")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=reason):
            sync.update(engine.weights(1))
    assert engine.ask("found") == before
    assert [worker.consistent for worker in inspection.inspect(engine)] == [True, True]
    engine.ask("start")
    assert [process.poll() for process in engine.processes] == [None, None]
