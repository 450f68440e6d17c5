"""The demo's two engines, and how what they hold is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
import torch

from wsync.demo.engines.serve import serve_in_process
from wsync.demo.engines.transformers import checksum
from wsync.disk import newest
from wsync.handles.base import EngineHandle, handle

_SECONDS = 60.0


class Engines:
    """Two transformers engines over HTTP.

    facts: for each engine its name, and what was seen of it.  processes: what runs in each process,
    by its id.
    """

    def __init__(self, config: Any) -> None:
        with contextlib.ExitStack() as stack:
            self._http = stack.enter_context(requests.Session())
            self._http.trust_env = False
            servers = [
                stack.enter_context(serve_in_process(config, dtype="float32", seed=number))
                for number in (1, 2)
            ]
            self.handles = [handle(server.url) for server in servers]
            self.close = stack.pop_all().close
        self.facts: list[dict[str, Any]] = [
            {"name": f"engine {number} at {server.url}", "checked": ""}
            for number, server in enumerate(servers, 1)
        ]
        self.processes = {
            str(server.pid): f"engine {number}" for number, server in enumerate(servers, 1)
        }

    def note(self, moment: str, prompt: list[int], count: int) -> None:
        """Keeps what each engine generates now: so many tokens."""
        sampling = {"max_new_tokens": count, "temperature": 0.0}
        for fact, engine in zip(self.facts, self.handles, strict=True):
            body = {"input_ids": prompt, "sampling_params": sampling}
            answer = self._post(engine.name, "/generate", body)
            fact[moment] = _text(prompt + answer["output_ids"])
            fact[f"weight_version_{moment}"] = answer["meta_info"]["weight_version"]

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
        problems = []
        for fact, engine in zip(self.facts, self.handles, strict=True):
            problems += self._compare(fact["name"], engine, expected, version)
            answer = self._post(engine.name, "/wsync/logits", {"input_ids": ids})
            found = torch.tensor(answer["logits"], device="cpu")
            worst = float((found - logits.float()).abs().max())
            if not worst <= tolerance:
                problems.append(f"{fact['name']}: logits differ by {worst:.2e}")
            fact["checked"] = (
                f"{len(expected)} tensors compared; logits within {worst:.1e} of the trainer's; "
                f"version {version}"
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
            problems = self._compare(name, handle(server.url), expected, version)
        checked = f"{len(expected)} tensors compared; version {version}"
        self.facts.append({"name": name, "checked": checked})
        return problems

    def _compare(
        self, who: str, engine: EngineHandle, expected: Mapping[str, torch.Tensor], version: str
    ) -> list[str]:
        """What is wrong with an engine's version and bytes."""
        has = engine.model_info(_SECONDS)["weight_version"]
        problems = [] if has == version else [f"{who}: version {has!r} instead of {version!r}"]
        answer = self._post(engine.name, "/weights_checker", {"action": "checksum"})
        sums = answer["ranks"][0]["checksums"]
        sides = sorted(sums.keys() ^ expected.keys())
        problems += [f"{who}: {name} is on one side only" for name in sides]
        both = sorted(sums.keys() & expected.keys())
        wrong = [name for name in both if sums[name] != checksum(expected[name])]
        return problems + [f"{who}: {name} has other bytes" for name in wrong]

    def _post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(url + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()


def _text(ids: list[int]) -> str:
    """The model's tokens are bytes; an untrained one says any."""
    return "".join(chr(token) if 32 <= token < 127 else "?" for token in ids)
