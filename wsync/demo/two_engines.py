"""The demo's two engines, and how what they hold is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests
import torch

from wsync.demo.engines.serve import serve_in_process
from wsync.demo.engines.tensor_parallel_engine import TensorParallelEngine
from wsync.demo.engines.transformers import checksum
from wsync.disk import newest
from wsync.handles.base import EngineHandle, handle
from wsync.module_tensors import same_bytes

_SECONDS = 60.0


class Engines:
    """A transformers engine over HTTP and a tensor-parallel engine of tp processes.

    facts: for each engine its name, and what was seen of it.  processes: what runs in each process,
    by its id.
    """

    def __init__(self, config: Any, tp: int) -> None:
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(serve_in_process(config, dtype="float32"))
            self._sharded = stack.enter_context(TensorParallelEngine(config, tp=tp))
            self._http = stack.enter_context(requests.Session())
            self._http.trust_env = False
            self.handles: list[EngineHandle] = [handle(self._server.url), self._sharded]
            self.close = stack.pop_all().close
        names = (f"HTTP engine at {self._server.url}", f"tensor-parallel engine, {tp} processes")
        self.facts: list[dict[str, Any]] = [{"name": name, "checked": ""} for name in names]
        self.processes = {str(self._server.pid): "HTTP engine"}
        for rank, pid in enumerate(self._sharded.pids):
            self.processes[str(pid)] = f"tensor-parallel worker {rank}"

    def note(self, moment: str, prompt: list[int], count: int) -> None:
        """Keeps what each engine generates now: so many tokens."""
        sampling = {"max_new_tokens": count, "temperature": 0.0}
        answer = self._post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        generated = self._sharded.generate(prompt, max_new_tokens=count)
        for fact, ids in zip(self.facts, (answer["output_ids"], generated), strict=True):
            fact[moment] = _text(prompt + ids)
        self.facts[0][f"weight_version_{moment}"] = answer["meta_info"]["weight_version"]

    def check(
        self,
        expected: Mapping[str, torch.Tensor],
        version: str,
        *,
        ids: list[int],
        logits: torch.Tensor,
        tolerance: float,
    ) -> list[str]:
        """Compares versions, bytes and logits; returns what is wrong."""
        problems = self._compare_sums("HTTP engine", self._server.url, expected)
        held = self._sharded.weights()
        problems += _compare(
            "tensor-parallel engine", held, expected, lambda n: same_bytes(held[n], expected[n])
        )
        over_http = torch.tensor(
            self._post("/wsync/logits", {"input_ids": ids})["logits"], device="cpu"
        )
        pairs = (over_http, self._sharded.logits(ids))
        versions = [engine.model_info(_SECONDS)["weight_version"] for engine in self.handles]
        for fact, found, has in zip(self.facts, pairs, versions, strict=True):
            worst = float((found - logits.float()).abs().max())
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

    def join_late(
        self, folder: Path, expected: Mapping[str, torch.Tensor], version: str
    ) -> list[str]:
        """Starts one more engine from the newest checkpoint; returns what is wrong with it."""
        path = newest(folder)
        name = f"late engine, started from {path.name}"
        with serve_in_process(path, dtype="float32") as server:
            problems = self._compare_sums(name, server.url, expected)
            has = handle(server.url).model_info(_SECONDS)["weight_version"]
        if has != version:
            problems.append(f"{name}: version {has!r} instead of {version!r}")
        checked = f"{len(expected)} tensors compared; version {has}"
        self.facts.append({"name": name, "checked": checked})
        return problems

    def _compare_sums(self, who: str, url: str, expected: Mapping[str, torch.Tensor]) -> list[str]:
        answer = self._post("/weights_checker", {"action": "checksum"}, url)
        sums = answer["ranks"][0]["checksums"]
        return _compare(who, sums, expected, lambda n: sums[n] == checksum(expected[n]))

    def _post(self, path: str, body: dict[str, Any], url: str | None = None) -> Any:
        answer = self._http.post((url or self._server.url) + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()


def _compare(
    who: str,
    found: Mapping[str, object],
    expected: Mapping[str, object],
    same: Callable[[str], bool],
) -> list[str]:
    problems = [
        f"{who}: {name} is on one side only" for name in sorted(found.keys() ^ expected.keys())
    ]
    both = sorted(found.keys() & expected.keys())
    return problems + [f"{who}: {name} has other bytes" for name in both if not same(name)]


def _text(ids: list[int]) -> str:
    """The model's tokens are bytes; an untrained one says any."""
    return "".join(chr(token) if 32 <= token < 127 else "?" for token in ids)
