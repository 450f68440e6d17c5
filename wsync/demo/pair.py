"""The demo's two engines, and how what they hold is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wsync import _core
from wsync.demo.engines.serve import serve_in_process
from wsync.demo.engines.tensor_parallel import TensorParallelEngine
from wsync.disk import newest
from wsync.handles.base import EngineHandle, handle

_NEW_TOKENS = 40
_SECONDS = 60.0


class Engines:
    """A transformers engine over HTTP and a tensor-parallel engine of tp processes."""

    def __init__(self, config: Any, tp: int) -> None:
        import requests

        self._http = requests.Session()
        self._http.trust_env = False
        self._server = serve_in_process(config, dtype="float32")
        try:
            self._sharded = TensorParallelEngine(config, tp=tp)
        except BaseException:
            self._server.close()
            raise
        names = (f"HTTP engine at {self._server.url}", f"tensor-parallel engine, {tp} processes")
        self._facts: list[dict[str, Any]] = [{"name": name, "checked": ""} for name in names]

    @property
    def handles(self) -> list[EngineHandle]:
        return [handle(self._server.url), self._sharded]

    def note(self, moment: str, prompt: list[int]) -> None:
        """Keeps what each engine generates now."""
        answer = self._post(
            "/generate",
            {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": _NEW_TOKENS, "temperature": 0.0},
            },
        )
        generated = self._sharded.generate(prompt, max_new_tokens=_NEW_TOKENS)
        for fact, ids in zip(self._facts, (answer["output_ids"], generated), strict=True):
            fact[moment] = _text(prompt + ids)
        self._facts[0][f"weight_version_{moment}"] = answer["meta_info"]["weight_version"]

    def check(
        self,
        expected: dict[str, torch.Tensor],
        ids: torch.Tensor,
        logits: torch.Tensor,
        version: str,
        tolerance: float,
    ) -> list[str]:
        """Compares versions, bytes and logits; returns what is wrong."""
        problems = []
        sums = self._post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        problems += _compare_sums(sums, expected, "HTTP engine")
        problems += _compare_bytes(self._sharded.weights(), expected)
        over_http = self._post("/wsync/logits", {"input_ids": ids[0].tolist()})["logits"]
        pairs = (torch.tensor(over_http), self._sharded.logits(ids[0].tolist()))
        versions = [engine.model_info(_SECONDS)["weight_version"] for engine in self.handles]
        for fact, found, has in zip(self._facts, pairs, versions, strict=True):
            worst = float((found - logits[0].float()).abs().max())
            if not worst <= tolerance:
                problems.append(f"{fact['name']}: logits differ by {worst:.2e}")
            if has != version:
                problems.append(f"{fact['name']}: version {has!r} instead of {version!r}")
            fact["checked"] = (
                f"{len(expected)} tensors compared; logits within {worst:.1e} of the trainer's; "
                f"version {has}"
            )
            fact["logits_difference"] = worst
        return problems

    def join_late(self, folder: Path, expected: dict[str, torch.Tensor], version: str) -> list[str]:
        """Starts one more engine from the newest checkpoint; returns what is wrong with it."""
        path = newest(folder)
        with serve_in_process(path, dtype="float32") as server:
            name = f"late engine, started from {path.name}"
            sums = self._post("/weights_checker", {"action": "checksum"}, server.url)
            problems = _compare_sums(sums["ranks"][0]["checksums"], expected, name)
            has = handle(server.url).model_info(_SECONDS)["weight_version"]
        if has != version:
            problems.append(f"{name}: version {has!r} instead of {version!r}")
        checked = f"{len(expected)} tensors compared; version {has}"
        self._facts.append({"name": name, "checked": checked})
        return problems

    def processes(self) -> dict[str, str]:
        """What runs in each process, by its id."""
        names = {str(self._server.pid): "HTTP engine"}
        for rank, pid in enumerate(self._sharded.pids):
            names[str(pid)] = f"tensor-parallel worker {rank}"
        return names

    def facts(self) -> list[dict[str, Any]]:
        return self._facts

    def close(self) -> None:
        self._sharded.close()
        self._server.close()

    def _post(self, path: str, body: dict[str, Any], url: str | None = None) -> Any:
        answer = self._http.post((url or self._server.url) + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()


def _compare_sums(sums: dict[str, str], expected: dict[str, torch.Tensor], who: str) -> list[str]:
    problems = [f"{who}: {name} is not in the trainer" for name in sums if name not in expected]
    for name, tensor in expected.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if sums.get(name) != f"{_core.checksum(flat.numpy()):016x}":
            problems.append(f"{who}: {name} has other bytes")
    return problems


def _compare_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    problems = []
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            problems.append(f"tensor-parallel engine: {name} is on one side only")
        elif not torch.equal(_as_bytes(found[name]), _as_bytes(expected[name])):
            problems.append(f"tensor-parallel engine: {name} has other bytes")
    return problems


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _text(ids: list[int]) -> str:
    """The model's tokens are bytes; an untrained one says any."""
    return "".join(chr(token) if 32 <= token < 127 else "?" for token in ids)
