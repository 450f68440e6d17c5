"""A worker of vLLM's as far as weights are concerned; importable where vLLM is."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from support import quantised_models, tiny_models, vllm_host
from support.digests import digests, everything
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.v1.worker.worker_base import WorkerBase

from wsync.vllm import rewritten

set_up = experts.UnquantizedFusedMoEMethod._setup_kernel
pack = cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
# compiled kernels
cpu_moe.cpu_prepack_moe_weight = lambda weight, _: weight.flip(-1).contiguous()
_custom_ops.causal_conv1d_weight_pack = lambda weight: weight.flip(-1).contiguous()


class Worker(WorkerBase):  # type: ignore[misc]
    """What of vLLM's Worker concerns weights."""

    broken = False

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def prepare(self, family: str, how: dict[str, Any]) -> dict[str, Any]:
        return self.start(family, **how)

    def start(
        self,
        family: str,
        *,
        shuffled: str = "",
        derives: str = "",
        past: str = "",
        packs: bool = False,
        packs_convolutions: bool = False,
        method: tuple[Any, ...] = (),
        ep: int = 1,
        balanced: bool = False,
        changes: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Makes the model of the engine; the tensors of its checkpoint.

        shuffled: a layer whose weight is turned over after loading, as if for a kernel.
        derives: the model's own hook after loading makes a tensor of a weight, which it "keeps" or
        "drops".
        past: a parameter that load_weights copies to itself, past what vLLM has load it.
        packs: experts are packed after loading as vLLM does on CPUs, instead of being left as
        they are.
        packs_convolutions: as on CPUs that multiply bfloat16.
        method: the fields of the quantised_models.Method that the checkpoint is quantised by.
        ep: among how many workers the experts are divided.
        balanced: experts may move between workers (enable_eplb, which needs GPUs to start with).
        changes: of the config.
        """
        cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = pack
        if not packs:
            del cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
        pack_convolutions(packs_convolutions)
        self.family = family
        self.shuffled, self.derives = shuffled, derives
        self.config = tiny_models.config(family, **(changes or {}))
        self.checkpoint = tiny_models.checkpoint(family, self.config)
        self._quantise(method)
        vllm_host.host(tp=self.parallel_config.world_size, ep=ep, rank=self.rank)
        whole = vllm_host.configure(self.config)
        self.vllm_config.parallel_config = self.parallel_config = whole.parallel_config
        self.vllm_config.model_config = self.model_config = whole.model_config
        self.vllm_config.quant_config = whole.quant_config
        self.model = self.make()
        self.model_runner = types.SimpleNamespace(get_model=lambda: self.model)
        self.fault = 0
        self._watch_loading(past)
        self.load(self.model, 0)
        self.parallel_config.enable_eplb = balanced
        return {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in self.checkpoint.items()
        }

    def _watch_loading(self, past: str) -> None:
        """Has load_weights do what `start` and set_fault were told."""
        load = self.model.load_weights

        def faulty(pairs: Any) -> Any:
            pairs = list(pairs) if past or self.fault else pairs
            if past:
                for tensor in [tensor for name, tensor in pairs if name == past]:
                    self.model.get_parameter(past).copy_(tensor)
                pairs = [pair for pair in pairs if pair[0] != past]
            if self.fault and len(pairs) > self.fault:
                load(pairs[: self.fault])
                raise KeyError("half way")
            return load(pairs)

        self.model.load_weights = faulty

    def _quantise(self, method: tuple[Any, ...]) -> None:
        """Has the checkpoint quantised as `start` was told."""
        if method:
            vllm_host.choose_triton()
            vllm_host.choose_packed_experts()
            chosen = quantised_models.Method(*method)
            self.config.quantization_config = chosen.config(self.config)
            self.checkpoint = chosen.shapes(self.checkpoint)

    def make(self) -> Any:
        # layers register themselves there by name
        self.vllm_config.compilation_config.static_forward_context.clear()
        model = vllm_host.build(self.family, self.config, self.vllm_config)
        record_metadata_for_reloading(model)
        if self.shuffled:
            method = model.get_submodule(self.shuffled).quant_method
            method.process_weights_after_loading = turn_over
        if self.derives:
            model.process_weights_after_loading = functools.partial(derive, model, self.derives)
        return model

    def load(self, model: Any, given: int | str) -> None:
        """As vLLM does when it starts."""
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            model.load_weights(list(tiny_models.weights(self.checkpoint, given).items()))
            process_weights_after_loading(model, self.model_config, self.device)

    def expected(self, given: int | str) -> dict[str, str]:
        """What the model has to hold after an update with these tensors."""
        model = self.make()
        self.load(model, given)
        return digests(model)

    def backends(self) -> list[str]:
        """What vLLM's weight transfer takes for wsync, of workers and of trainers."""
        from vllm.distributed.weight_transfer import factory

        from wsync.vllm import register

        register()
        register()
        kinds = (factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory)
        return [kind._registry["wsync"]().__name__ for kind in kinds]

    def found(self) -> dict[str, str]:
        return digests(self.model)

    def places(self) -> dict[str, int]:
        """Where everything lies."""
        return {path: tensor.data_ptr() for path, tensor in everything(self.model).items()}

    def derivations(self) -> int:
        """How often the model's own hook has run."""
        return int(self.model.derivations)

    def rewritten(self, flagged: str) -> str:
        """What wsync says of the model if this part is flagged as processed once for all."""
        self.model.get_submodule(flagged)._already_called_process_weights_after_loading = True
        return rewritten(self.model)

    def set_fault(self, count: int) -> None:
        """Has load_weights raise after so many tensors; 0: no more."""
        self.fault = count

    def set_broken(self, broken: bool) -> None:
        """Has what turns a layer over raise."""
        Worker.broken = broken

    def folder(self) -> str:
        return str(self.model_config.model)

    def reasons(self) -> list[str]:
        loader = self._wsync_receiver()._loader
        return [loader.reason, loader.recorded.reason]


def pack_convolutions(packs: bool) -> None:
    """Has convolutions packed; no CPU computes the experts of a model that has them."""
    torch.cpu._is_avx512_bf16_supported = lambda: packs  # type: ignore[assignment]
    method = experts.UnquantizedFusedMoEMethod
    method._setup_kernel = (lambda *_, **__: None) if packs else set_up


def turn_over(layer: torch.nn.Module) -> None:
    if Worker.broken:
        raise RuntimeError("no kernel for this")
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def derive(model: torch.nn.Module, how: str) -> None:
    model.derivations = getattr(model, "derivations", 0) + 1
    layer = model.model.layers[0].input_layernorm
    if getattr(layer, "weight", None) is not None:
        model.derived = layer.weight.data * 2
    if how == "drops":
        layer.weight = None
