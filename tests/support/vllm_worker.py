"""Run as a script: one worker process of a vLLM engine, with vLLM's own worker base and models.

    python vllm_worker.py TREE PACKAGES TP RANK

vLLM's WorkerWrapperBase makes the worker and mixes wsync's extension into it.  A line in is a JSON
list [method, arguments...] of that worker, a line out {"answer": ...} or {"error": text}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import tiny_models, vllm_host

EXTENSION = "wsync.vllm.WorkerExtension"


def make_worker_class() -> type:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.v1.worker.worker_base import WorkerBase

    pack = cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
    # a compiled kernel
    cpu_moe.cpu_prepack_moe_weight = lambda weight, _: weight.flip(-1).contiguous()

    class Worker(WorkerBase):  # type: ignore[misc]
        """What of vLLM's Worker concerns weights."""

        def init_device(self) -> None:
            self.device = torch.device("cpu")

        def prepare(self, family: str, shuffled: str, packs: bool) -> dict[str, Any]:
            """Makes the model of the engine; the tensors of its checkpoint.

            shuffled: a layer whose weight is turned over after loading, as if for a kernel.
            packs: experts are packed after loading as vLLM does on CPUs, instead of being left as
            they are.
            """
            cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = pack
            if not packs:
                del cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
            self.family = family
            self.shuffled = shuffled
            self.config = tiny_models.config(family)
            self.vllm_config.model_config = vllm_host.configure(self.config).model_config
            self.model_config = self.vllm_config.model_config
            self.checkpoint = tiny_models.checkpoint(family, self.config)
            self.model = self.make()
            self.model_runner = types.SimpleNamespace(get_model=lambda: self.model)
            self.fault = 0
            load = self.model.load_weights

            def faulty(pairs: Any) -> Any:
                pairs = list(pairs)
                if self.fault and len(pairs) > self.fault:
                    load(pairs[: self.fault])
                    raise KeyError("half way")
                return load(pairs)

            self.model.load_weights = faulty
            self.load(self.model, 0)
            return {
                name: [list(shape), str(dtype).removeprefix("torch.")]
                for name, (shape, dtype) in self.checkpoint.items()
            }

        def make(self) -> Any:
            # layers register themselves there by name
            self.vllm_config.compilation_config.static_forward_context.clear()
            model = vllm_host.build(self.family, self.config, self.vllm_config)
            record_metadata_for_reloading(model)
            if self.shuffled:
                method = model.get_submodule(self.shuffled).quant_method
                method.process_weights_after_loading = turn_over
            return model

        def load(self, model: Any, seed: int) -> None:
            """As vLLM does when it starts."""
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                model.load_weights(list(tiny_models.tensors(self.checkpoint, seed).items()))
                process_weights_after_loading(model, self.model_config, self.device)

        def expected(self, seed: int) -> dict[str, str]:
            """What the model has to hold after an update with these tensors."""
            model = self.make()
            self.load(model, seed)
            return digests(model)

        def found(self) -> dict[str, str]:
            return digests(self.model)

        def places(self) -> dict[str, int]:
            """Where everything lies."""
            from wsync.engine.held import Held

            held = Held(self.model)
            pairs = zip(held.facts, held.tensors, strict=True)
            return {fact[0]: tensor.data_ptr() for fact, tensor in pairs}

        def set_fault(self, count: int) -> None:
            """Has load_weights raise after so many tensors; 0: no more."""
            self.fault = count

        def reasons(self) -> list[str]:
            loader = self.__dict__["_wsync"].loader
            return [loader.reason, loader.recorded.reason]

    return Worker


def turn_over(layer: torch.nn.Module) -> None:
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def digests(model: torch.nn.Module) -> dict[str, str]:
    from wsync.engine.held import Held

    held = Held(model)
    return {
        fact[0]: hashlib.sha256(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for fact, tensor in zip(held.facts, held.tensors, strict=True)
    }


def main() -> None:
    tree, tp, rank = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    vllm_host.load(tree)
    vllm_host.host(tp=tp, ep=1, rank=rank)
    from vllm.v1.worker import worker_base

    worker_base.worker_receiver_cache_from_config = lambda *_: None
    sys.modules["support.vllm_worker_class"] = place = types.ModuleType("vllm_worker_class")
    place.Worker = make_worker_class()  # type: ignore[attr-defined]
    config = vllm_host.configure(tiny_models.config("qwen3"))
    config.parallel_config.worker_cls = "support.vllm_worker_class.Worker"
    config.parallel_config.worker_extension_cls = EXTENSION
    wrapper = worker_base.WorkerWrapperBase(rpc_rank=rank)
    arguments = {
        "vllm_config": config,
        "local_rank": rank,
        "rank": rank,
        "distributed_init_method": "",
    }
    wrapper.init_worker([arguments] * tp)
    wrapper.init_device()
    for line in sys.stdin:
        method, *given = json.loads(line)
        try:
            result = {"answer": getattr(wrapper, method)(*given)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
