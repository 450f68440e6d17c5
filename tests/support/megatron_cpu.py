"""Real Megatron-Core trainers on CPU over gloo, of all families and shapes that tests want.

`groups` sets Megatron's parallel groups up on an initialised gloo process group; `build` makes a
small trainer from a Hugging Face configuration:

    with on_cpu(), groups(Parallel(tp=2, pp=2)) as parallel:
        trainer = build(Qwen3Config(...), parallel)
        logits = trainer.logits(ids)

Limits: those of the demo's trainer (wsync.demo.megatron_cpu), and context-parallel ranks are
replicas here.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from wsync.demo import megatron_cpu
from wsync.demo.megatron_cpu import on_cpu

__all__ = ["CpuTrainer", "Parallel", "build", "groups", "named_weights", "on_cpu"]


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel groups; what is left of the ranks is data-parallel.

    vpp: model chunks per pipeline stage, or None.  etp: None is Megatron's default (tp).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1


@contextlib.contextmanager
def groups(parallel: Parallel) -> Iterator[Parallel]:
    """Megatron's groups on the default process group; collective."""
    from megatron.core import parallel_state as state

    state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,  # the default group is gloo
    )
    try:
        if parallel.vpp is not None:
            state.set_virtual_pipeline_model_parallel_rank(0)
        yield parallel
    finally:
        # Megatron only forgets its groups, and a gloo group that nobody uses still polls.
        _destroy(list(vars(state).values()))
        state.destroy_model_parallel()


def _destroy(values: Sequence[object]) -> None:
    for value in values:
        if isinstance(value, list):
            _destroy(value)
        elif isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD:
            with contextlib.suppress(ValueError, AssertionError):  # listed twice
                dist.destroy_process_group(value)


def _moe_options(hf: Any) -> dict[str, Any]:
    experts = getattr(hf, "num_experts", None)
    if not experts:
        return {}
    dense = set(getattr(hf, "mlp_only_layers", None) or ())
    every = getattr(hf, "decoder_sparse_step", 1)
    options: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_layer_freq": [
            int(layer not in dense and (layer + 1) % every == 0)
            for layer in range(hf.num_hidden_layers)
        ],
    }
    shared = getattr(hf, "shared_expert_intermediate_size", None)
    if shared:
        options |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    return options


def transformer_config(hf: Any, parallel: Parallel, dtype: torch.dtype, **overrides: Any) -> Any:
    """Megatron's TransformerConfig for a llama, qwen2, qwen3, qwen2_moe or qwen3_moe config."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind = hf.model_type
    options: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": kind.startswith("qwen2"),
        "qk_layernorm": kind.startswith("qwen3"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bf16": dtype is torch.bfloat16,
    }
    return TransformerConfig(**(options | _moe_options(hf) | overrides))


def build(
    hf: Any,
    parallel: Parallel,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    engine: bool = False,
    config: Any = None,
    **overrides: Any,
) -> CpuTrainer:
    """A trainer of the shape of a Hugging Face config, with random weights of its own.

    The weights depend on the seed and the parallel sizes; replicas are equal.  `engine` uses
    TransformerEngine's modules, where some stand-in or the real one is installed.  The vocabulary
    is padded to a multiple of 16 * tp.  `overrides` go to TransformerConfig; `config` is one that
    was made otherwise.
    """
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt.gpt_model import GPTModel

    if config is None:
        config = transformer_config(hf, parallel, dtype, **overrides)
    unit = 16 * parallel.tp
    chunks: list[Module] = []
    for stage in range(parallel.vpp or 1):
        vp_stage = stage if parallel.vpp else None
        ends = {"ignore_virtual": parallel.vpp is None, "vp_stage": vp_stage}
        spec = _layer_spec(config, engine, vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=-(-hf.vocab_size // unit) * unit,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=state.is_pipeline_first_stage(**ends),
            post_process=state.is_pipeline_last_stage(**ends),
            position_embedding_type="rope",
            rotary_base=_rope_theta(hf),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            vp_stage=vp_stage,
            mtp_block_spec=_mtp_spec(config, spec, engine, vp_stage),
        )
        for parameter in chunk.parameters():  # torch's norms ignore params_dtype
            parameter.data = parameter.data.to(dtype)
        if not config.multi_latent_attention:
            chunk.rotary_pos_emb.cp_group = None  # every rank computes the whole sequence
        chunks.append(chunk.eval())  # without dropout, training needs no other mode
    trainer = CpuTrainer(chunks, hf, dtype, config=config, parallel=parallel)
    trainer.randomize(seed)
    return trainer


def _layer_spec(config: Any, engine: bool, vp_stage: int | None) -> Any:
    """Of the layers of a chunk; Megatron's variants of attention exist with `engine` only."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs

    if config.experimental_attention_variant is not None:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage
        )
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )


def _mtp_spec(config: Any, spec: Any, engine: bool, vp_stage: int | None) -> Any:
    """Of the MTP layers that the last stage holds, where the configuration has any."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if not config.mtp_num_layers:
        return None
    return get_gpt_mtp_block_spec(config, spec, engine, vp_stage=vp_stage)


def _rope_theta(hf: Any) -> float:
    theta = getattr(hf, "rope_theta", None)
    return float(theta if theta is not None else hf.rope_parameters["rope_theta"])


def named_weights(chunks: Sequence[Module], experts: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name in the unsharded model, local tensor) of all parameters and expert biases."""
    from megatron.core import parallel_state as state

    share = experts // state.get_expert_model_parallel_world_size()
    first = share * state.get_expert_model_parallel_rank()
    for chunk in chunks:
        model: Any = chunk
        while not hasattr(model, "decoder"):  # a wrapper
            model = model.module
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        buffers = [item for item in model.named_buffers() if item[0].endswith("expert_bias")]
        for name, tensor in [*model.named_parameters(), *buffers]:
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                name = f"decoder.layers.{layers[int(local)]}.{rest}"
            name = re.sub(
                r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)",
                lambda match: f"{match[1]}{int(match[2]) + first}",
                name,
            )
            yield name, tensor


@dataclass
class CpuTrainer(megatron_cpu.CpuTrainer):
    """One rank of a trainer."""

    config: Any = None
    parallel: Parallel = Parallel()

    @torch.no_grad()
    def randomize(self, seed: int) -> None:
        """New random weights, equal on replicas: norms around 1, all else around 0."""
        from megatron.core import parallel_state as state

        for name, tensor in named_weights(self.chunks, getattr(self.hf, "num_experts", 0) or 0):
            if name == "output_layer.weight" and self.hf.tie_word_embeddings:
                name = "embedding.word_embeddings.weight"
            shard = 0
            if getattr(tensor, "tensor_model_parallel", False):
                shard = state.get_tensor_model_parallel_rank()
            if ".experts." in name:
                shard = state.get_expert_tensor_parallel_rank()
                if re.search(r"\.weight[12]$", name) and "linear_fc" not in name:
                    shard += 1000 * state.get_expert_model_parallel_rank()
            text = f"{seed}/{shard}/{name}"
            generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
            values = torch.randn(tensor.shape, generator=generator, device="cpu") * 0.1
            tensor.copy_(values + 1.0 if "norm" in name else values)
