"""An SGLang engine as a trainer sees it, of real worker processes; see sglang_updater.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from support import tiny_models
from support.engines import engine_packages, engine_tree, worker_environment

from wsync.messages.control import LOAD_FORMAT

SCRIPT = Path(__file__).with_name("sglang_updater.py")


class SglangProcesses:
    """slime's engine methods over worker processes; success is all that SGLang answers."""

    workers = 2
    load_formats = (LOAD_FORMAT,)

    def __init__(self, version: str) -> None:
        tree, packages = engine_tree("sglang", version), engine_packages()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the workers live)
        self._pool = ThreadPoolExecutor(self.workers)
        places = [str(SCRIPT), str(tree), str(packages), str(self.workers)]
        self._command = [sys.executable, "-P", *places]
        self.processes = [self._start(rank) for rank in range(self.workers)]
        self.started: dict[str, Any] = {}  # the arguments that it reports
        self.version: str | None = None
        self.paused = False
        self.checkpoint: tiny_models.Shapes = {}

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=worker_environment(rank),
        )

    def prepare(
        self,
        family: str,
        *,
        ep: int = 1,
        changes: dict[str, Any] | None = None,
        method: Sequence[Any] = (),
        alone: bool = False,
        drafts: int = 0,
    ) -> None:
        """Starts with another model.

        ep: among how many workers its experts are divided.  changes: of the config.  method, alone,
        drafts: as the worker has them.
        """
        self.version, self.paused, self.started = None, False, {}
        shapes = self.ask("prepare", family, ep, changes or {}, method, alone, drafts)[0]
        self.checkpoint = {
            name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()
        }

    def ask(self, method: str, *given: Any, each: list[Any] | None = None) -> list[Any]:
        """What every worker answers; each: what each is told for itself, before what all are."""

        def ask(rank: int) -> Any:
            own = () if each is None else (each[rank],)
            return self.ask_one(rank, method, *own, *given)

        return list(self._pool.map(ask, range(self.workers)))

    def ask_one(self, rank: int, method: str, *given: Any) -> Any:
        process = self.processes[rank]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([method, *given]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-3000:]
            raise ConnectionError(f"worker {rank} has ended: {said}")
        return json.loads(line)

    def server_info(self) -> dict[str, Any]:
        return self.started

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
        answers = self.ask("update", load_format, each=serialized_named_tensors)
        assert answers == [[True, "Success"]] * self.workers
        if weight_version is not None:
            self.version = weight_version
        return {"success": True, "message": "Success"}

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return tiny_models.tensors(self.checkpoint, seed)

    def is_loaded(self, seed: int) -> bool:
        return self.differing(seed) == [[], []]

    def differing(self, given: int | str) -> list[list[str]]:
        """What each worker holds that SGLang's own loading would have made otherwise, of the
        weights of a seed or of a file."""
        return [
            [path for path in one.keys() | other if one.get(path) != other.get(path)]
            for one, other in zip(self.ask("expected", given), self.ask("found"), strict=True)
        ]

    def close(self) -> None:
        for process in self.processes:
            self._end(process)
        self._pool.shutdown()
        self._log.close()

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
