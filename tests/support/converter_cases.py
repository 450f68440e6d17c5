"""What a rank does in the tests of wsync.megatron.layout(converter=...); runs in support.procs."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from support import (
    converters,
    gqa_cases,
    gqa_families,
    latent_cases,
    megatron_cpu,
    megatron_reference,
)
from support.megatron_cases import check_everything, padded_rows

import wsync.megatron
from wsync import _core


def arguments(hf):
    """What slime's arguments have of a model, and converters read."""
    return SimpleNamespace(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        num_experts=gqa_families.experts(hf) or None,
        untie_embeddings_and_output_weights=not hf.tie_word_embeddings,
    )


def _made(family, changes, parallel, options):
    """(trainer, checkpoint, converter)."""
    if family == "deepseek_v3":
        trainer, state = latent_cases.build(family, changes, parallel, options)
        return trainer, state, converters.latent
    known = gqa_families if family in gqa_families.KINDS else megatron_reference
    hf = known.config(family, **changes)
    options = {k: getattr(torch, v) if k == "dtype" else v for k, v in options.items()}
    trainer = gqa_cases._trainer(hf, megatron_cpu.Parallel(**parallel), "", options)
    state = {
        name: tensor if name.endswith("bias") and "gate" in name else tensor.to(trainer.dtype)
        for name, tensor in gqa_families.checkpoint(hf).items()
    }
    gqa_cases._fill(trainer, state)
    return trainer, state, converters.grouped


def shards_match(family, changes, parallel, options):
    """Compares every shard of the layouts of all ranks with the checkpoint.  (shards, tensors,
    calls of the converter, parameters), and whether each tensor of the layout is what the family's
    table makes of it."""
    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer, state, convert = _made(family, changes, parallel, options)
        calls = []

        def counted(args, name, parameter):
            calls.append(name)
            return convert(args, name, parameter)

        mine = wsync.megatron.layout(trainer.chunks, arguments(trainer.hf), converter=counted)
        table = wsync.megatron.layout(trainer.chunks, trainer.hf, model_name=family)
        assert mine.names == table.names
        made = len(calls)
        layout, buffers = gqa_cases.merged(mine)
        assert len(calls) == made
        shards = check_everything(layout, buffers, state) if mine.rank == 0 else 0
        return shards, len(state), made, len(mine.names), _same(mine.layout, table.layout)


def _same(one, other):
    """The first tensor of which two layouts say something else, or that lies elsewhere; else ""."""
    assert sorted(one.names()) == sorted(other.names())
    for name in one.names():
        places = one.names().index(name), other.names().index(name)
        mine, theirs = (at.tensor(place) for at, place in zip((one, other), places, strict=True))
        shards = [_elements(at, place) for at, place in zip((one, other), places, strict=True)]
        if tuple(mine) != tuple(theirs) or shards[0] != shards[1]:
            return name
    return ""


def _elements(layout, place):
    """Where each element lies: {(place in the tensor, buffer): bytes from the buffer's start}."""
    shape = layout.tensor(place).shape
    found = {}
    for shard in layout.shards(place):
        _, buffer, offset, start, extent, strides, _ = shard
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        ends = zip(start, extent, shard.steps, strict=True)
        box = numbers[tuple(slice(a, a + n * step, step) for a, n, step in ends)]
        lies = torch.full(extent, offset)
        for axis, (count, stride) in enumerate(zip(extent, strides, strict=True)):
            steps = torch.arange(count) * stride
            lies = lies + steps.reshape(-1, *(1 for _ in extent[axis + 1 :]))
        pairs = zip(box.reshape(-1).tolist(), lies.reshape(-1).tolist(), strict=True)
        found |= {(element, buffer): at for element, at in pairs}
    return found


def bridge_matches(parallel):
    """As shards_match, with mbridge's own conversion of one parameter."""
    from mbridge import AutoBridge

    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer, state, _ = _made(
            "qwen3_moe", {}, parallel, {"engine": True, "moe_grouped_gemm": True}
        )
        bridge = AutoBridge.from_config(
            trainer.hf, dtype=torch.float32, make_vocab_size_divisible_by=16
        )
        bridge.config = trainer.config
        bridge.vocab_size = trainer.hf.vocab_size
        bridge.padded_vocab_size = padded_rows(trainer.hf, trainer.parallel.tp)

        def convert(name, tensor):
            return zip(*bridge._weight_to_hf_format(name, tensor), strict=True)

        mine = wsync.megatron.layout(trainer.chunks, trainer.hf, converter=convert)
        layout, buffers = gqa_cases.merged(mine)
        shards = check_everything(layout, buffers, state) if mine.rank == 0 else 0
        return shards, len(state)


def damaged(damage):
    """What is said of a trainer over two ranks whose parameters are not as they are expected."""
    with megatron_cpu.groups(megatron_cpu.Parallel(tp=2)):
        trainer, _, convert = _made("qwen3", {}, {"tp": 2}, {})
        DAMAGES[damage](trainer.chunks[0], trainer.chunks[0].decoder.layers[0])
        try:
            wsync.megatron.layout(trainer.chunks, arguments(trainer.hf), converter=convert)
        except _core.LayoutError as error:
            dist.barrier()
            return str(error)
        return ""


def _without_a_place(chunk, layer):
    """A parameter of no parallel layer that says it is cut, and not where."""
    layer.input_layernorm.weight.tensor_model_parallel = True


def _of_several(chunk, layer):
    """A delta net's projection, in which a rank holds parts of six tensors."""
    layer.self_attention.__class__ = type("GatedDeltaNet", (type(layer.self_attention),), {})


def _over_others(chunk, layer):
    layer.self_attention.linear_proj.input_size *= 2


def _of_no_known_gate(chunk, layer):
    for module in chunk.modules():
        module.config = None


DAMAGES = {
    "without-a-place": _without_a_place,
    "of-several": _of_several,
    "over-others": _over_others,
    "of-no-known-gate": _of_no_known_gate,
}
