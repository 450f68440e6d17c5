"""Real Megatron-Core trainers on CPU over gloo.

Megatron-Core asks for CUDA in a few places that do not need it.  `on_cpu` answers those on the CPU;
`groups` sets Megatron's parallel groups up on an initialised gloo process group; `build` makes a
small trainer from a Hugging Face configuration:

    with on_cpu(), groups(Parallel(tp=2, pp=2)) as parallel:
        trainer = build(Qwen3Config(...), parallel)
        trainer.step(ids)
        logits = trainer.logits(ids)

Limits: attention on a CPU computes whole sequences, so context-parallel ranks are replicas here;
experts use the all-gather dispatcher; there is no dropout and no sequence parallelism.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

__all__ = ["CpuTrainer", "Parallel", "build", "groups", "named_weights", "on_cpu"]


def _same(tensor: Any, *args: object, **options: object) -> Any:
    del args, options
    return tensor


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Makes Megatron-Core build and run its models on the CPU, for the whole process."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    stream = mock.MagicMock()  # work on a CPU is done when the call returns
    answers: list[tuple[Any, str, object]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "Stream", mock.MagicMock),
        (torch.cuda, "current_stream", lambda *args, **options: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda *args: None),
        (torch.Tensor, "cuda", _same),
        (torch.nn.Module, "cuda", _same),
        # 0.16.1 names this function even where TransformerEngine is missing.
        (moe_utils, "te_general_gemm", None),
    ]
    with contextlib.ExitStack() as stack:
        for home, name, value in answers:
            stack.enter_context(mock.patch.object(home, name, value, create=True))
        megatron_random.initialize_rng_tracker()
        tracker = type(megatron_random.get_cuda_rng_tracker())
        fork = mock.patch.object(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
        stack.enter_context(fork)
        yield


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
    trainer = CpuTrainer(chunks, config, hf, parallel, dtype)
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


class _Hop(torch.autograd.Function):
    """Hands hidden states of one pipeline stage to the others, and their gradients back to it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: ProcessGroup, holder: int) -> Tensor:
        ctx.group, ctx.holder = group, holder
        passed = hidden.detach().clone()
        dist.broadcast(passed, dist.get_global_rank(group, holder), group=group)
        return passed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.contiguous().clone()  # of all but the next stage it is zero
        dist.all_reduce(total, group=ctx.group)
        mine = ctx.holder == ctx.group.rank()
        return total if mine else torch.zeros_like(total), None, None


@dataclass
class CpuTrainer:
    """One rank of a trainer."""

    chunks: list[Module]
    config: Any
    hf: Any
    parallel: Parallel
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)

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

    def _run(self, ids: Tensor, **options: Any) -> Tensor:
        """Runs all chunks in model order.  The last stage gets the output; the others get what
        `backward` of it needs to pass gradients on between stages.  options: of the last chunk."""
        from megatron.core import parallel_state as state

        group = state.get_pipeline_model_parallel_group()
        batch, length = ids.shape
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device="cpu"), 1)[None, None]
        positions = torch.arange(length, device="cpu")[None].expand(batch, length)
        shape = (length, batch, self.hf.hidden_size)
        hidden = torch.zeros(shape, dtype=self.dtype, requires_grad=True, device="cpu")
        hop: Any = _Hop.apply
        for number in range(len(self.chunks) * group.size()):
            virtual, holder = divmod(number, group.size())
            if number:
                hidden = hop(hidden, group, (holder - 1) % group.size())
            if holder == group.rank():
                chunk: Any = self.chunks[virtual]
                if not chunk.pre_process:
                    chunk.set_input_tensor(hidden)
                hidden = chunk(
                    input_ids=ids,
                    position_ids=positions,
                    attention_mask=mask,
                    **(options if chunk.post_process else {}),
                )
        return hidden

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits (batch, length, vocab_size) of token ids (batch, length), on every rank."""
        from megatron.core import parallel_state as state

        output = self._run(ids)
        pipeline = state.get_pipeline_model_parallel_group()
        tensor = state.get_tensor_model_parallel_group()
        full = torch.empty((*ids.shape, self.hf.vocab_size), dtype=self.dtype, device="cpu")
        if state.is_pipeline_last_stage(ignore_virtual=True):
            parts = [torch.empty_like(output) for _ in range(tensor.size())]
            dist.all_gather(parts, output.contiguous(), group=tensor)
            full = torch.cat(parts, -1)[..., : self.hf.vocab_size].contiguous()
        last = dist.get_global_rank(pipeline, pipeline.size() - 1)
        dist.broadcast(full, last, group=pipeline)
        return full

    def step(self, ids: Tensor) -> float | None:
        """One AdamW step on predicting the next token; the loss on the last stage, else None."""
        from megatron.core import parallel_state as state

        if self.optimizer is None:
            parameters = [p for chunk in self.chunks for p in chunk.parameters()]
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.optimizer.zero_grad()
        output = self._run(ids, labels=torch.roll(ids, -1, 1))
        last = state.is_pipeline_last_stage(ignore_virtual=True)
        loss = output.float().mean() if last else 0.0 * output.sum()
        torch.autograd.backward(loss)
        self._reduce_gradients()
        self.optimizer.step()
        return loss.item() if last else None

    def _reduce_gradients(self) -> None:
        """Keeps replicas equal: sums over shared parts, averages over data-parallel ranks."""
        from megatron.core import parallel_state as state

        weights = [item for chunk in self.chunks for item in chunk.named_parameters()]
        for _, weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        whole = [item for item in weights if not getattr(item[1], "tensor_model_parallel", False)]
        ends = ("embedding.word_embeddings.weight", "output_layer.weight")
        tensor = state.get_tensor_model_parallel_group()
        data = state.get_data_parallel_group(with_context_parallel=True)
        heads = re.compile(r"\.[qk]_layernorm\.")
        _all_reduce([w for name, w in whole if heads.search(name)], tensor, average=False)
        _all_reduce([w for name, w in whole if not heads.search(name)], tensor, average=True)
        if self.hf.tie_word_embeddings and self.parallel.pp > 1:
            tied = state.get_embedding_group(check_initialized=False)
            _all_reduce([w for name, w in weights if name in ends], tied, average=False)
        experts = state.get_expert_data_parallel_group()
        _all_reduce([w for name, w in weights if ".experts." in name], experts, average=True)
        _all_reduce([w for name, w in weights if ".experts." not in name], data, average=True)


def _all_reduce(weights: Sequence[Tensor], group: ProcessGroup, *, average: bool) -> None:
    """Reduces the gradients of some parameters as one tensor."""
    if group.size() == 1 or not weights:
        return
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    if average:
        flat /= group.size()
    counts = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, torch.split(flat, counts), strict=True):
        gradient.copy_(part.view_as(gradient))
