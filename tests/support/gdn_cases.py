"""What a rank does in the tests of delta nets; runs in the processes of support.procs."""

import copy
import os
from unittest import mock

import torch
from support import gdn_families as families
from support import megatron_cpu
from support.gqa_cases import merged
from support.gqa_families import VisionLanguage
from support.megatron_cases import check_everything, padded_rows, place

import wsync.megatron
from wsync import _core


class ZeroCenteredNorm(torch.nn.Module):
    """An RMS norm whose weight counts from zero, which Megatron-Core has with
    TransformerEngine alone."""

    def __init__(self, config, hidden_size, eps=1e-6, **options):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


def computing_spec(config, engine, vp_stage):
    """Layers of Megatron-Core's own modules, delta nets among them, which compute on a CPU."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    pieces = GatedDeltaNetSubmodules(ColumnParallelLinear, ZeroCenteredNorm, RowParallelLinear)
    block.layer_specs = [copy.deepcopy(spec) for spec in block.layer_specs]  # layers share them
    for spec, net in zip(block.layer_specs, config.linear_attention_freq, strict=True):
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredNorm
        if net:
            parts.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=pieces)
        else:
            heads = parts.self_attention.submodules
            heads.q_layernorm = heads.k_layernorm = ZeroCenteredNorm
    block.layer_norm = ZeroCenteredNorm
    return block


def logits(changes, parallel, ids):
    """Of a trainer that holds the checkpoint, whose layout is compared too."""
    from megatron.core.transformer import attention

    parallel = megatron_cpu.Parallel(**parallel)
    torch_splits = mock.patch.object(attention, "SplitAlongDim", None)  # not the stand-in's
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    spec = mock.patch.object(megatron_cpu, "_layer_spec", computing_spec)
    options = {"deterministic_mode": True, "layernorm_zero_centered_gamma": False}
    environment = mock.patch.dict(os.environ, environment)
    with megatron_cpu.groups(parallel), spec, torch_splits, environment:
        hf = families.config("qwen3_next", **changes)
        trainer, state = trained(hf, parallel, True, False, options)
        layout, buffers = merged(wsync.megatron.layout(trainer.chunks, hf))
        check_everything(layout, buffers, state)
        return trainer.logits(torch.tensor(ids)).tolist()


def trained(hf, parallel, native, swapped, options):
    """(trainer, checkpoint): a trainer that holds a known checkpoint."""
    from megatron.core.tensor_parallel.layers import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )

    text = families.text_of(hf)
    options = families.options(text, native) | options
    wide = options.pop("wide", ())  # parameters that stay float32
    trainer = megatron_cpu.build(text, parallel, **options)
    # as trainers have it; Megatron's own norms, which stand for theirs, cannot be made with it
    trainer.config.layernorm_zero_centered_gamma = True
    if not native:
        families.attach(trainer.chunks, text, hf.model_type != "qwen3_next", trainer.dtype)
    state = families.checkpoint(hf)
    for name in state:
        if not name.endswith(wide):
            state[name] = state[name].to(trainer.dtype)
    plain = families.plain(state, hf)
    rows = padded_rows(text, parallel.tp)
    with torch.no_grad():
        for name, tensor in megatron_cpu.named_weights(
            trainer.chunks, getattr(text, "num_experts", 0)
        ):
            value = families.share(name, plain, text, place(), rows, swapped)
            assert value.shape == tensor.shape, f"{name}: {value.shape} {tensor.shape}"
            tensor.data = value.clone()
            set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    return trainer, state


def shards_match(family, changes, parallel, native, options=None, loaded_by="megatron"):
    """Compares every shard with the checkpoint; (shards, tensors, names, dtypes)."""
    options = dict(options or {})
    tower = options.pop("tower", False)
    options |= {k: getattr(torch, v) for k, v in options.items() if k == "dtype"}
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family, **changes)
        # slime exchanges the halves of Qwen3-Next's eh_proj alone
        swapped = (family, loaded_by) == ("qwen3_next", "slime")
        trainer, state = trained(hf, parallel, native, swapped, options)
        model = trainer.chunks
        if tower:  # beside the language model on the first stage, as the checkpoint has it
            vision = torch.nn.Linear(3, 2)
            vision_state = {f"model.visual.{n}": t for n, t in vision.state_dict().items()}
            for name, tensor in vision_state.items():
                generator = torch.Generator().manual_seed(len(name))
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            state |= vision_state
            model = [
                VisionLanguage(chunk, vision if chunk.pre_process else None, "vision_model")
                for chunk in model
            ]
        mine = wsync.megatron.layout(model, hf, loaded_by=loaded_by)
        layout, buffers = merged(mine)
        shards = check_everything(layout, buffers, state) if mine.rank == 0 else 0
        dtypes = {name: layout.tensor(i).dtype for i, name in enumerate(layout.names())}
        return shards, len(state), list(mine.names), dtypes


def delivered(family, parallel, options):
    """The checkpoint as copies make it of a trainer of one tensor-parallel rank, in the dtypes of
    the trainer, and in those that the engine asks for; names that differ."""
    options = dict(options) | {"dtype": torch.bfloat16}
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family)
        trainer, state = trained(hf, parallel, True, False, options)
        mine = wsync.megatron.layout(trainer.chunks, hf)
        sources = _core.BufferTable.of(mine.bind(), mine.tensors())
        wrong = []
        for wanted in (lambda name, t: t.dtype, lambda name, t: engine_dtype(name, t)):
            found = {name: torch.zeros(t.shape, dtype=wanted(name, t)) for name, t in state.items()}
            tensors = list(found.values())
            table = _core.describe(tensors, list(found))
            builder = _core.LayoutBuilder()
            builder.add_tensors(list(found), table)
            route = _core.Route(mine.layout, builder.build())
            stream = _core.Stream()
            for buffer in range(route.buffer_count):
                stream.copy(route, buffer, 0, sources, _core.BufferTable.of(table, tensors))
            stream.synchronize(60.0)
            stream.close()
            for name, tensor in state.items():
                if not torch.equal(found[name], tensor.to(found[name].dtype)):
                    wrong.append(name)
        return wrong, len(state)


def engine_dtype(name, tensor):
    """As SGLang has them: A_log in float32, all else in the model's dtype."""
    return torch.float32 if name.endswith("A_log") else torch.bfloat16
