"""Run as a script: SGLang's own WeightUpdater takes what wsync broadcasts.

    python sglang_distributed.py TREE PACKAGES BROADCASTS FAMILY...

TREE: an unpacked wheel; PACKAGES: a folder of what it imports; BROADCASTS: "bucket,tensor".
For each family SGLang's model gets two updates over a group that the updater joins, and is compared
with one whose own load_weights got the same tensors.  Prints what was found as JSON: for each
broadcast a list.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import unittest.mock
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[2])
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import sglang_host, tiny_models

import wsync
from wsync.engine.learn.module_memory import ModuleMemory


def held(model: torch.nn.Module) -> dict[str, bytes]:
    found = ModuleMemory(model)
    return {
        fact[0]: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for fact, tensor in zip(found.facts, found.tensors, strict=True)
    }


class Engine:
    """slime's engine methods around SGLang's updater, in the place of server and scheduler."""

    workers = 1

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        runner = types.SimpleNamespace(
            server_args=types.SimpleNamespace(weight_cache_mode="off"), model=model
        )
        given = {
            "tp_rank": 0,
            "device": "cpu",
            "get_model": lambda: model,
            "get_model_runner": lambda: runner,
        }
        names = [field.name for field in dataclasses.fields(WeightUpdater) if field.init]
        names.remove("_model_update_group")
        self._updater = WeightUpdater(**{name: given.get(name) for name in names})
        self.version = "default"
        self.formats: list[str | None] = []

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...
    def update_weights_from_tensor(self, **_: Any) -> None: ...

    def init_weights_update_group(self, **group: Any) -> tuple[bool, str]:
        result: tuple[bool, str] = self._updater.init_weights_update_group(**group)
        return result

    def destroy_weights_update_group(self, group_name: str) -> tuple[bool, str]:
        result: tuple[bool, str] = self._updater.destroy_weights_update_group(group_name)
        return result

    def update_weights_from_distributed(
        self, *, weight_version: str | None = None, **what: Any
    ) -> tuple[bool, str]:
        self.formats.append(what.get("load_format"))
        if hasattr(self._updater, "receive_weights_from_distributed"):  # 0.5.23
            tensors = self._updater.receive_weights_from_distributed(**what)
            result = self._updater.load_weights_from_distributed(tensors)
        else:
            result = self._updater.update_weights_from_distributed(**what)
        if result[0] and weight_version is not None:
            self.version = weight_version
        return bool(result[0]), str(result[1])


def run(family: str, broadcast: str) -> dict[str, Any]:
    sglang_host.host(tp=1, ep=1, rank=0)
    config = tiny_models.config(family)
    shapes = tiny_models.checkpoint(family, config)
    own, model = sglang_host.build(family, config), sglang_host.build(family, config)
    for seed in (1, 2):
        own.load_weights(list(tiny_models.tensors(shapes, seed).items()))
    engine = Engine(model)
    options = wsync.Options(
        deadline=60,
        progress=False,
        delivery="distributed",
        backend="gloo",
        broadcast=broadcast,
        bucket_nbytes=1 << 15,
    )
    # the process group is the engine's: the trainer has one rank and none
    with unittest.mock.patch("torch.distributed.is_initialized", return_value=False):
        sync = wsync.connect(tiny_models.tensors(shapes, 0), engines=[engine], options=options)
    with sync:
        for seed in (1, 2):
            report = sync.update(tiny_models.tensors(shapes, seed))
    wanted, found = held(own), held(model)
    return {
        "family": family,
        "held": len(wanted),
        "differing": [n for n in wanted.keys() | found if wanted.get(n) != found.get(n)],
        "version": engine.version,
        "formats": sorted({str(form) for form in engine.formats}),
        "buckets": len(engine.formats),
        "rounds": report.rounds,
        "groups": len(engine._updater._model_update_group),
    }


def main() -> None:
    sglang_host.load(Path(sys.argv[1]))
    found = {
        broadcast: [run(family, broadcast) for family in sys.argv[4:]]
        for broadcast in sys.argv[3].split(",")
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
