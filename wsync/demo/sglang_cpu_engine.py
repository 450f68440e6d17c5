"""An engine of SGLang's own model classes, in worker processes without its server or a GPU.

Each worker keeps weights as SGLang does, fused and sharded, and takes updates with the loader that
`--custom-weight-loader wsync.sglang.load_weights` gives an SGLang worker: what it keeps is learnt
from the model's own load_weights.  It does not generate: that needs SGLang's kernels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wsync._core import UnsupportedError
from wsync.demo import sglang_cpu
from wsync.demo.engines.model_worker import ModelWorker
from wsync.demo.engines.worker_processes import WorkersEngine
from wsync.demo.sglang_requirements import how_to_get
from wsync.engine.learn.module_memory import ModuleMemory
from wsync.handles.base import EngineHandle
from wsync.module_tensors import flat_bytes
from wsync.sglang import SglangLoader

_SECONDS = 120.0
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


class SglangEngine(WorkersEngine):
    """tp workers with a model of `config` each, as the demo's engine; close it, or use `with`.

    path: folders in which the workers find SGLang and what it imports, before all others.

    Raises RemoteError if a worker cannot make its model; the text says what it lacks.
    """

    def __init__(self, config: Any, *, tp: int, ep: int = 1, path: Sequence[str] = ()) -> None:
        facts = {**config.to_dict(), "architectures": None}
        settings = [{"config": facts, "rank": rank, "tp": tp, "ep": ep} for rank in range(tp)]
        super().__init__(_Worker, settings, name="SGLang", timeout=_SECONDS, path=path)
        self.handles: list[EngineHandle] = [self]
        self.processes = {str(pid): f"SGLang worker {rank}" for rank, pid in enumerate(self.pids)}
        parallel = f"TP{tp}" + (f", EP{ep}" if ep > 1 else "")
        name = f"SGLang's model classes, {parallel}, {tp} processes"
        self.facts: list[dict[str, Any]] = [{"name": name, "checked": ""}]

    def note(self, moment: str, prompt: list[int], count: int) -> None:
        """Nothing: these engines do not generate."""

    def check(
        self, expected: Mapping[str, torch.Tensor], version: str, **generation: object
    ) -> list[str]:
        """Compares every worker's bytes with SGLang's own loading of the same weights; returns what
        is wrong."""
        data = io.BytesIO()
        torch.save(dict(expected), data)
        weights = {"weights": data.getvalue()}
        differing = self._call("compare", [weights] * self.workers, _SECONDS)
        problems = [
            f"SGLang: worker {rank}: {name} has other bytes"
            for rank, names in enumerate(differing)
            for name in names
        ]
        if self.weight_version != version:
            problems.append(f"SGLang: version {self.weight_version!r} instead of {version!r}")
        self.facts[0]["checked"] = (
            f"all that its workers keep of {len(expected)} tensors is what SGLang's own "
            f"load_weights makes of them; version {self.weight_version}"
        )
        return problems


class _Worker(ModelWorker):
    """Learns from the model's own load_weights, as wsync.sglang does it in SGLang."""

    def __init__(self, *, config: dict[str, Any], rank: int, tp: int, ep: int) -> None:
        try:
            sglang_cpu.load()
            sglang_cpu.host(tp=tp, ep=ep, rank=rank)
            self._config = _config(config)
            self._model = self._build()
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"SGLang's model classes cannot be imported: {error}.  These do:\n{how_to_get()}"
            ) from error
        super().__init__(SglangLoader(self._model), rank=rank)

    def compare(self, weights: bytes) -> list[str]:
        """The names of what SGLang's own load_weights would make otherwise of these weights."""
        own = self._build()
        own.load_weights(list(torch.load(io.BytesIO(weights)).items()))
        wanted, found = _held(own), _held(self._model)
        names = sorted(wanted.keys() | found.keys())
        return [name for name in names if wanted.get(name) != found.get(name)]

    def _build(self) -> Any:
        kind = self._config.model_type
        return sglang_cpu.build(kind, _CLASSES[kind], self._config, dtype=torch.float32)


def _config(facts: dict[str, Any]) -> Any:
    """The configuration as the transformers that SGLang finds has it."""
    from transformers import AutoConfig

    known = {key: value for key, value in facts.items() if key != "model_type"}
    config = AutoConfig.for_model(facts["model_type"], **known)
    # attributes of transformers 4 that SGLang goes on reading
    for name, value in (("rope_theta", 10000.0), ("rope_scaling", None)):
        if not hasattr(config, name):
            setattr(config, name, facts.get(name, value))
    return config


def _held(model: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of everything that a model holds, plain attributes too."""
    held = ModuleMemory(model)
    return {
        fact[0]: flat_bytes(tensor).numpy().tobytes()
        for fact, tensor in zip(held.facts, held.tensors, strict=True)
    }
