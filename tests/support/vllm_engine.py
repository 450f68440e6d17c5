"""A vLLM engine as a trainer sees it, an `LLM`, of real worker processes; see vllm_worker.py."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support import tiny_models
from support.engines import engine_packages, engine_tree, worker_environment

SCRIPT = Path(__file__).with_name("vllm_worker.py")


class VllmEngine:
    """The methods of `vllm.LLM` that concern weights.

    amx: its processor says that it has AMX.
    calls: what it was asked besides collective_rpc, in order.
    """

    def __init__(self, *, tp: int = 2, amx: bool = False) -> None:
        tree, packages = engine_tree("vllm", "0.33.0"), engine_packages()
        self.calls: list[tuple[Any, ...]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (for as long as the workers live)
        places = [str(SCRIPT), str(tree), str(packages), str(tp)]
        if amx:
            places.insert(0, str(SCRIPT.with_name("amx.py")))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", *places, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=worker_environment(rank),
            )
            for rank in range(tp)
        ]
        self.checkpoint: tiny_models.Shapes = {}

    def prepare(self, family: str, **how: Any) -> None:
        """Starts with another model; how: as the worker's `prepare` has it."""
        self.calls.clear()
        checkpoints = self.collective_rpc("prepare", args=(family, how))
        self.checkpoint = {
            name: (tuple(shape), getattr(torch, dtype))
            for name, (shape, dtype) in checkpoints[0].items()
        }

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return tiny_models.tensors(self.checkpoint, seed)

    def differing(self, given: int | str) -> list[list[str]]:
        """What each worker holds that vLLM's own loading would have made otherwise, of the
        weights of a seed or of a file."""
        wanted = self.collective_rpc("expected", args=(given,))
        found = self.collective_rpc("found")
        return [
            [path for path in one.keys() | other if one.get(path) != other.get(path)]
            for one, other in zip(wanted, found, strict=True)
        ]

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """As vLLM's executors: one worker's exception is everybody's."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([method, *args]) + "\n")
            process.stdin.flush()
        answers = [self._read(process) for process in self.processes]
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(f"Worker failed with error '{answer['error']}'")
        return [answer["answer"] for answer in answers]

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"a worker ended with status {process.wait(10)}: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level, mode))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", tags))
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return True

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._log.close()
