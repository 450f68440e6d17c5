"""A real Megatron-Core trainer, made by mbridge, on CPUs over gloo.

Megatron-Core calls CUDA in a few places that do not need it.  Within `on_cpu`, these calls work on
the CPU.  After Megatron's parallel groups have been made:

    trainer = build(Qwen3Config(...))
    trainer.step(ids)
    logits = trainer.logits(ids)
    weights = exported(trainer)

Limits: experts use the all-gather dispatcher; there is no dropout and no sequence parallelism.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.utils import parameters_to_vector, vector_to_parameters

_CPU = {  # replaces what mbridge chooses for GPUs and TransformerEngine
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "init_method_std": 0.1,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "persist_layer_norm": False,
    "sequence_parallel": False,
    "use_cpu_initialization": True,
    "variable_seq_lengths": False,
}
_LAYER = "model.layers.{layer_number}."


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
        # Megatron-Core 0.16.1 uses this name even if TransformerEngine is missing.
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


def build(hf: Any) -> CpuTrainer:
    """This rank's part of a trainer in float32.  hf: a Hugging Face config, which gives the shapes.
    The weights are random, and equal on replicas."""
    from mbridge import AutoBridge
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    bridge = AutoBridge.from_config(hf, dtype=torch.float32)
    bridge.set_extra_args(**_CPU)
    bridge._get_transformer_layer_spec = lambda vp_stage=None: get_gpt_decoder_block_spec(
        bridge.config, use_transformer_engine=False, normalization="RMSNorm"
    )
    torch.manual_seed(0)
    ends = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
    chunk = bridge._model_provider([])(*ends)
    chunk.rotary_pos_emb.cp_group = None  # every rank computes the whole sequence
    return CpuTrainer([chunk.eval()], hf)  # without dropout, training needs no other mode


class _Chunk:
    """A part of a model.  Its experts have TransformerEngine's names, which mbridge expects."""

    def __init__(self, chunk: Any) -> None:
        self._chunk, self.decoder = chunk, chunk.decoder

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        local = re.compile(r"local_experts\.(\d+)\.(.*\.weight)$")
        for name, tensor in self._chunk.named_parameters():
            yield local.sub(r"\2\1", name), tensor

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


@torch.no_grad()
def exported(trainer: CpuTrainer) -> dict[str, Tensor]:
    """All weights under their Hugging Face names, converted by mbridge.  Every rank must call this.
    mbridge shares no code with wsync's rules and planner."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_config(trainer.hf, dtype=trainer.dtype)
    bridge._OTHER_MAPPING = {"input_layernorm": [f"{_LAYER}input_layernorm.weight"]}
    after = {"pre_mlp_layernorm": [f"{_LAYER}post_attention_layernorm.weight"]}
    bridge._MLP_MAPPING = bridge._MLP_MAPPING | after
    return dict(bridge.export_weights([_Chunk(chunk) for chunk in trainer.chunks]))


class _Hop(torch.autograd.Function):
    """Sends the hidden states of one pipeline stage to all others, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: ProcessGroup, holder: int) -> Tensor:
        ctx.group, ctx.holder = group, holder
        passed = hidden.detach().clone()
        dist.broadcast(passed, dist.get_global_rank(group, holder), group=group)
        return passed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.contiguous().clone()  # it is zero on all stages except the next
        dist.all_reduce(total, group=ctx.group)
        mine = ctx.holder == ctx.group.rank()
        return total if mine else torch.zeros_like(total), None, None


@dataclass
class CpuTrainer:
    """One rank of a trainer."""

    chunks: list[Module]
    hf: Any
    dtype: torch.dtype = torch.float32
    optimizer: torch.optim.Optimizer | None = None

    def _run(self, ids: Tensor, **options: Any) -> Tensor:
        """Runs all chunks in model order.  The last stage gets the output.  The other stages get a
        tensor whose `backward` passes gradients on.  options: arguments of the last chunk."""
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
        """Logits (batch, length, vocab_size) for token ids (batch, length), on every rank."""
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

    def step(self, ids: Tensor) -> None:
        """Takes one AdamW step on predicting the next token."""
        from megatron.core import parallel_state as state

        if self.optimizer is None:
            parameters = [p for chunk in self.chunks for p in chunk.parameters()]
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.optimizer.zero_grad()
        output = self._run(ids, labels=torch.roll(ids, -1, 1))
        last = state.is_pipeline_last_stage(ignore_virtual=True)
        loss = output.float().mean() if last else 0.0 * output.sum()
        torch.autograd.backward(loss)
        self._average_gradients()
        self.optimizer.step()

    def _average_gradients(self) -> None:
        """Keeps replicas equal.  If ranks hold parts of a sum, the average serves as well: AdamW's
        step does not depend on the scale of gradients."""
        from megatron.core import parallel_state as state

        weights = [item for chunk in self.chunks for item in chunk.named_parameters()]
        experts = [weight for name, weight in weights if ".experts." in name]
        others = [weight for name, weight in weights if ".experts." not in name]
        whole = [w for w in others if not getattr(w, "tensor_model_parallel", False)]
        _average(whole, state.get_tensor_model_parallel_group())
        _average(others, state.get_data_parallel_group(with_context_parallel=True))
        _average(experts, state.get_expert_data_parallel_group())


def _average(weights: Sequence[Tensor], group: ProcessGroup) -> None:
    """Averages the gradients of these parameters over the group, as one tensor."""
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if gradients and group.size() > 1:
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat, group=group)
        vector_to_parameters(flat / group.size(), gradients)
