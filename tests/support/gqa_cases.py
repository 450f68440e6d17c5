"""What a rank does in the tests of families with query groups; runs in support.procs."""

import torch
import torch.distributed as dist
from support import gqa_families as families
from support import megatron_cpu, own_family
from support.megatron_cases import check_everything, host_bytes, padded_rows, place

import wsync.megatron
from wsync import _core


def _trainer(hf, parallel, form, options):
    """A trainer with the attributes that Megatron's own set-up gives to parameters."""
    from megatron.core.tensor_parallel.layers import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )

    options = families.options(hf) | options
    trainer = megatron_cpu.build(hf, parallel, **options)
    families.attach(trainer.chunks, hf, parallel, form)
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.to(trainer.dtype)
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return trainer


@torch.no_grad()
def _fill(trainer, state):
    hf = trainer.hf
    plain = families.plain(state, hf)
    rows = padded_rows(hf, trainer.parallel.tp)
    for name, tensor in megatron_cpu.named_weights(trainer.chunks, families.experts(hf)):
        value = families.share(name, plain, hf, place(), rows)
        assert value.shape == tensor.shape, f"{name}: {value.shape} {tensor.shape}"
        tensor.copy_(value)


def merged(mine):
    """(layout of all ranks, bytes of all ranks' tensors)."""
    mine.bind()
    everyone = [None] * mine.ranks
    buffers = [host_bytes(tensor) for tensor in mine.tensors()]
    dist.all_gather_object(everyone, (mine.layout.to_bytes(), buffers))
    layouts = [_core.Layout.from_bytes(data) for data, _ in everyone]
    return _core.Layout.merge(layouts), [buffers for _, buffers in everyone]


def add_own_family():
    own_family.add()


def logits_match(family, parallel):
    """The largest difference of a trainer's logits from those of transformers' model that has the
    checkpoint which the trainer's shares were cut from."""
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family)
        trainer = _trainer(getattr(hf, "text_config", hf), parallel, "", {})
        state = families.checkpoint(hf)
        _fill(trainer, state)
        model = families.hf_model(hf)
        model.load_state_dict(state)
        ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            return float((trainer.logits(ids) - model(ids).logits).abs().max())


def bridge_exports(family, changes, parallel, options):
    """mbridge's own export of a trainer, compared with the checkpoint; (tensors compared, names of
    those that differ)."""
    from mbridge import AutoBridge

    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family, **changes)
        trainer = _trainer(hf, parallel, "", options)
        state = families.checkpoint(hf)
        _fill(trainer, state)
        bridge = AutoBridge.from_config(hf, dtype=torch.float32, make_vocab_size_divisible_by=16)
        bridge.config = trainer.config  # what its get_model would have set
        bridge.vocab_size = hf.vocab_size
        bridge.padded_vocab_size = padded_rows(hf, parallel.tp)
        found = {name: t.clone() for name, t in bridge.export_weights(trainer.chunks)}
        return len(found), [n for n, t in found.items() if not torch.equal(t, state[n])]


def vision_matches(family, changes, parallel, options, place):
    """As shards_match, of a vision-language model; (shards, tensors, names)."""
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family, **changes)
        state = families.checkpoint(hf)
        trainer = _trainer(hf.text_config, parallel, "", options)
        _fill(trainer, state)
        model = list(trainer.chunks)
        if place:
            model = [
                families.VisionLanguage(
                    chunk, families.tower_of(hf, state) if chunk.pre_process else None, place
                )
                for chunk in trainer.chunks
            ]
        else:
            state = {name: t for name, t in state.items() if not name.startswith("model.visual.")}
        mine = wsync.megatron.layout(model, hf)
        layout, buffers = merged(mine)
        shards = check_everything(layout, buffers, state) if mine.rank == 0 else 0
        return shards, len(state), list(mine.names)


def vision_refused(family, parallel, damage):
    """What is said of a vision tower that Megatron's layers make up, or that ranks share."""
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family)
        trainer = _trainer(hf.text_config, parallel, "", {})
        tower = torch.nn.Module()
        place = tower.decoder = torch.nn.Module()
        if damage == "cut":
            place = tower
        place.weight = torch.nn.Parameter(torch.zeros(4, 4))
        place.weight.tensor_model_parallel = True
        model = families.VisionLanguage(trainer.chunks[0], tower, "vision_model")
        try:
            wsync.megatron.layout(model, hf)
        except _core.LayoutError as error:
            return str(error)
        return ""


def norm_refused(size):
    """What is said of a norm over all heads that has another size."""
    parallel = megatron_cpu.Parallel(tp=2)
    with megatron_cpu.groups(parallel):
        hf = families.config("minimax_m2")
        trainer = _trainer(hf, parallel, "slime", {})
        for layer in trainer.chunks[0].decoder.layers:
            layer.self_attention.q_norm.weight = torch.nn.Parameter(torch.ones(size))
        try:
            wsync.megatron.layout(trainer.chunks, hf)
        except _core.LayoutError as error:
            return str(error)
        return ""


def shards_match(family, changes, parallel, options, form=""):
    """Compares every shard with the checkpoint; returns (shards, tensors, names of parameters)."""
    options = {k: getattr(torch, v) if k == "dtype" else v for k, v in options.items()}
    parallel = megatron_cpu.Parallel(**parallel)
    with megatron_cpu.groups(parallel):
        hf = families.config(family, **changes)
        trainer = _trainer(hf, parallel, form, options)
        state = families.checkpoint(hf)
        for name, tensor in state.items():  # the bias that balances experts stays as it is
            if not name.endswith("e_score_correction_bias"):
                state[name] = tensor.to(trainer.dtype)
        _fill(trainer, state)
        mine = wsync.megatron.layout(trainer.chunks, hf)
        layout, buffers = merged(mine)
        shards = check_everything(layout, buffers, state) if mine.rank == 0 else 0
        return shards, len(state), list(mine.names)
