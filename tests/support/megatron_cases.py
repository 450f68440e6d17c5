"""What a rank does in the tests of wsync.megatron; runs in the processes of support.procs."""

import contextlib
import functools
import math
import operator
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from support import megatron_cpu
from support import megatron_reference as reference
from support.errors import error_of

import wsync.megatron
from wsync import _core

_cpu = megatron_cpu.on_cpu()


@functools.cache
def use_cpu():
    """In each process, before anything imports megatron."""
    _cpu.__enter__()
    return sys.version_info[:2]


def place():
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_rank(),
        ps.get_tensor_model_parallel_world_size(),
        ps.get_expert_tensor_parallel_rank(),
        ps.get_expert_tensor_parallel_world_size(),
        ps.get_expert_model_parallel_rank(),
        ps.get_expert_model_parallel_world_size(),
    )


def padded_rows(hf, tp, multiple=16):
    unit = multiple * tp
    return math.ceil(hf.vocab_size / unit) * unit


@torch.no_grad()
def fill(trainer, state):
    """Gives every local tensor what the reference says this rank holds; returns how many."""
    hf = trainer.hf
    rows = padded_rows(hf, trainer.parallel.tp)
    count = 0
    for name, tensor in megatron_cpu.named_weights(trainer.chunks, getattr(hf, "num_experts", 0)):
        if name.endswith("expert_bias"):
            tensor.copy_(
                state[
                    name.replace("decoder.", "model.").replace(
                        "router.expert_bias", "gate.e_score_correction_bias"
                    )
                ]
            )
        else:
            value = reference.share(name, state, hf, place(), rows)
            assert value.shape == tensor.shape, f"{name}: {value.shape} {tensor.shape}"
            tensor.copy_(value)
        count += 1
    return count


def make(family, changes, parallel, options):
    hf = reference.config(family, **changes)
    options = {k: getattr(torch, v) if k == "dtype" else v for k, v in options.items()}
    return megatron_cpu.build(hf, megatron_cpu.Parallel(**parallel), **options)


def host_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_shard(data, offset, extent, strides, dtype):
    """The elements of one shard, from the bytes of its buffer."""
    return np.ndarray(extent, dtype, buffer=data, offset=offset, strides=strides)


def computed(words, dtype, scale, offset):
    """What torch makes of elements: times scale, plus offset, rounded after each step."""
    values = torch.from_numpy(words.copy()).view(dtype)
    return (values * scale + offset).view(torch.from_numpy(words.copy()).dtype).numpy()


def check_everything(layout, buffers, state):
    """Every shard holds the bytes of its box of the checkpoint; all boxes together cover it."""
    assert sorted(layout.names()) == sorted(state)
    shards = 0
    for name, tensor in state.items():
        index = layout.names().index(name)
        assert layout.tensor(index)[:3] == (
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        word = np.dtype(f"i{tensor.itemsize}")
        want = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
        covered = np.zeros(want.shape, bool)
        for shard in layout.shards(index):
            rank, buffer, offset, start, extent, strides, origin = shard
            ends = zip(start, extent, shard.steps, strict=True)
            box = tuple(slice(a, a + n * step, step) for a, n, step in ends)
            found = read_shard(buffers[rank][buffer], offset, extent, strides, word)
            if shard.affine[0]:
                found = computed(found, tensor.dtype, *shard.affine)
            assert np.array_equal(found, want[box]), f"{name} {box} of rank {rank} from {origin}"
            covered[box] = True
            shards += 1
        assert covered.all(), f"{name}: {np.count_nonzero(~covered)} elements nowhere"
    return shards


@contextlib.contextmanager
def trained(family, changes, parallel, options):
    """(trainer, checkpoint): a trainer that holds a known checkpoint."""
    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer = make(family, changes, parallel, options)
        state = reference.hf_tensors(trainer.hf)
        state = {name: tensor.to(trainer.dtype) for name, tensor in state.items()}
        if options.get("moe_router_enable_expert_bias"):
            for layer in range(trainer.hf.num_hidden_layers):
                if f"model.layers.{layer}.mlp.gate.weight" in state:
                    bias = torch.linspace(-1.0, 1.0, trainer.hf.num_experts) + layer
                    state[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias
        assert fill(trainer, state) > 0
        yield trainer, state


def layout_matches(family, changes, parallel, options):
    """Builds and merges the layouts of all ranks; returns what the test looks at."""
    with trained(family, changes, parallel, options) as (trainer, state):
        mine = wsync.megatron.layout(trainer.chunks, trainer.hf)
        mine.bind()
        everyone = [None] * mine.ranks
        buffers = [host_bytes(tensor) for tensor in mine.tensors()]
        dist.all_gather_object(everyone, (mine.layout.to_bytes(), buffers, mine.names))
        merged = _core.Layout.merge([_core.Layout.from_bytes(data) for data, _, _ in everyone])
        facts = {
            "rank": mine.rank,
            "ranks": mine.ranks,
            "tensors": len(state),
            "names": list(mine.names),
            "nbytes": merged.nbytes == sum(t.numel() * t.element_size() for t in state.values()),
        }
        if mine.rank == 0:
            facts["shards"] = check_everything(merged, [b for _, b, _ in everyone], state)
        return facts


def backups_match(family, changes, parallel, options):
    """Backups under the names that slime gives them: those of experts that are modules of their
    own are local.  Whether each is found for its parameter."""
    with trained(family, changes, parallel, options) as (trainer, _):
        mine = wsync.megatron.layout(trainer.chunks, trainer.hf)
        names = dict(megatron_cpu.named_weights(trainer.chunks))  # experts by their local numbers
        backups = {f"module.module.{name}": t.detach().clone() for name, t in names.items()}
        by_tensor = {id(tensor): f"module.module.{name}" for name, tensor in names.items()}
        table = mine.bind(backups)
        return [
            table[i][0] == backups[by_tensor[id(tensor)]].data_ptr()
            for i, tensor in enumerate(mine.tensors())
        ]


def undescribed(family, changes, parallel, options):
    """(layout, layout) as bytes: with what Megatron says of cut parameters, and with what it says
    of all that nobody has described."""
    with trained(family, changes, parallel, options) as (trainer, _):
        before = wsync.megatron.layout(trainer.chunks, trainer.hf).layout.to_bytes()
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.tensor_model_parallel = False
                parameter.partition_dim, parameter.partition_stride = -1, 1
        return before, wsync.megatron.layout(trainer.chunks, trainer.hf).layout.to_bytes()


@contextlib.contextmanager
def _other_state(parallel):
    """Has parallel_state forget its groups, or know others of another order, but for a while."""
    from megatron.core import parallel_state as ps

    known = dict(vars(ps))
    ps.destroy_model_parallel()
    try:
        if parallel is None:
            yield
        else:
            order = functools.partial(ps.initialize_model_parallel, order="pp-dp-cp-ep-tp")
            stack = contextlib.ExitStack()
            with mock.patch.object(ps, "initialize_model_parallel", order):
                stack.enter_context(megatron_cpu.groups(megatron_cpu.Parallel(**parallel)))
            with stack:
                yield
    finally:
        vars(ps).update(known)


def own_groups(reordered, silent, family, changes, parallel, options):
    """Layouts (or what is said) while parallel_state has the groups that the model was built with,
    and while it has others, or none.  silent: modules say nothing of their groups."""
    with trained(family, changes, parallel, options) as (trainer, _):

        def made():
            layout = wsync.megatron.layout(trainer.chunks, trainer.hf)
            return layout.layout.to_bytes()

        before = made()
        for module in (module for chunk in trainer.chunks for module in chunk.modules()):
            for name in [name for name in vars(module) if "_group" in name or "pg_coll" in name]:
                if silent:
                    delattr(module, name)
        with _other_state(parallel if reordered else None):
            try:
                return before, made()
            except wsync.LayoutError as error:
                return before, str(error)


def gathered_late(family, changes, parallel, options):
    """What is said of parameters that Megatron gathers when the next forward pass begins."""
    with trained(family, changes, parallel, options) as (trainer, _):
        from megatron.core.distributed import DistributedDataParallel

        mine = wsync.megatron.layout(trainer.chunks, trainer.hf)
        backups = dict(zip(mine.names, mine.tensors(), strict=True))
        gathering = DistributedDataParallel._make_forward_pre_hook(None)
        parts = list(trainer.chunks[-1].modules())
        hooks = [part.register_forward_pre_hook(gathering) for part in parts]
        text = ""
        try:
            mine.bind()
        except wsync.StateError as error:
            text = str(error)
        mine.bind(backups)
        for hook in hooks:
            hook.remove()
        mine.bind()
        return text


def gathered_by_nobody(family, changes, parallel, options):
    """What is said of a model in Megatron's wrapper when a step leaves parameters to be gathered:
    before the first one, after it, while they are being gathered, and then; without
    overlap_param_gather; and what Megatron's own groups set."""
    with trained(family, changes, parallel, options) as (trainer, _):
        from megatron.core.distributed import param_and_grad_buffer

        class Wrapper(torch.nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module
                self.ddp_config = SimpleNamespace(overlap_param_gather=True)
                self.bucket_groups, self.expert_parallel_bucket_groups = [], [group]

        group = SimpleNamespace(is_first_batch=True, per_param_grad_ready_counts={})
        group.param_gather_handle, group.param_gather_dispatched = None, False
        chunks = [Wrapper(chunk) for chunk in trainer.chunks]
        mine = wsync.megatron.layout(chunks, trainer.hf)
        said = [error_of(mine.bind)]
        group.per_param_grad_ready_counts = {0: 1}
        said.append(error_of(mine.bind))
        group.param_gather_handle, group.param_gather_dispatched = object(), True
        said.append(error_of(mine.bind))
        group.param_gather_handle = None
        said.append(error_of(mine.bind))
        group.is_first_batch = group.param_gather_dispatched = False
        said.append(error_of(mine.bind))
        for chunk in chunks:
            chunk.ddp_config.overlap_param_gather = False
        said.append(error_of(mine.bind))
        own = param_and_grad_buffer._ParamAndGradBucketGroup
        names = {*own.finish_grad_sync.__code__.co_names, *own.reset.__code__.co_names}
        return said, sorted(vars(group).keys() - names - {*own.start_param_sync.__code__.co_names})


def logits_match(family, changes, parallel, options):
    """Largest difference between the trainer's and transformers' logits of one checkpoint."""
    with trained(family, changes, parallel, options) as (trainer, _):
        ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = reference.hf_model(trainer.hf)(ids).logits
        return float((trainer.logits(ids) - want).abs().max())


def step_keeps_replicas(family, changes, parallel, options):
    """Trains; returns how many replicas are equal, and how many tensors have changed, of how many.

    Raises AssertionError, by name, for holders of a box that differ.
    """
    with trained(family, changes, parallel, options) as (trainer, _):
        mine = wsync.megatron.layout(trainer.chunks, trainer.hf)
        before = [host_bytes(tensor) for tensor in mine.tensors()]
        ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            trainer.step(ids)
        after = [host_bytes(tensor) for tensor in mine.tensors()]
        everyone = [None] * mine.ranks
        dist.all_gather_object(everyone, (mine.layout.to_bytes(), after))
        layout = _core.Layout.merge([_core.Layout.from_bytes(data) for data, _ in everyone])
        replicas = 0
        for index in range(layout.tensor_count):
            seen = {}
            for rank, buffer, offset, start, extent, strides, _ in layout.shards(index):
                data = read_shard(everyone[rank][1][buffer], offset, extent, strides, np.uint32)
                replicas += (start, extent) in seen
                assert np.array_equal(seen.setdefault((start, extent), data), data), layout.tensor(
                    index
                )
        return replicas, sum(map(operator.ne, before, after)), len(before)


def bridge_exports(family, changes, parallel, options):
    """mbridge's own export of the trainer, compared with the checkpoint; tensors compared."""
    from mbridge import AutoBridge

    with trained(family, changes, parallel, options) as (trainer, state):
        bridge = AutoBridge.from_config(
            trainer.hf, dtype=torch.float32, make_vocab_size_divisible_by=16
        )
        bridge.config = trainer.config  # what its get_model would have set
        bridge.vocab_size = trainer.hf.vocab_size
        bridge.padded_vocab_size = padded_rows(trainer.hf, trainer.parallel.tp)
        count = 0
        for name, tensor in bridge.export_weights(trainer.chunks):
            assert torch.equal(tensor, state[name]), name
            count += 1
        return count


def rejected(mutate, family, changes, parallel, options):
    """The error that a layout raises after `mutate` has damaged its input, on every rank."""
    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer = make(family, changes, parallel, options)
        config = MUTATIONS[mutate](trainer) or trainer.hf
        try:
            wsync.megatron.layout(trainer.chunks, config)
        except Exception as error:
            return type(error).__name__, str(error)
        return None


def _unknown_name(trainer):
    trainer.chunks[0].decoder.layers[0].register_parameter(
        "surprise", torch.nn.Parameter(torch.zeros(3))
    )


def _other_hidden(trainer):
    hf = reference.config(trainer.hf.model_type, hidden_size=64)
    hf.num_attention_heads = 4
    return hf


def _other_experts(trainer):
    return reference.config(trainer.hf.model_type, num_experts=4)


def _other_vocabulary(trainer):
    return reference.config(trainer.hf.model_type, vocab_size=1000)


def _fewer_layers(trainer):
    return reference.config(trainer.hf.model_type, num_hidden_layers=2)


def _other_tie(trainer):
    return reference.config(trainer.hf.model_type, tie_word_embeddings=True)


def _other_family(trainer):
    trainer.hf.model_type = "mamba"


def _one_query_group(trainer):
    hf = reference.config(trainer.hf.model_type)
    hf.num_key_value_heads = 1
    return hf


def _zero_centered(trainer):
    trainer.config.layernorm_zero_centered_gamma = True


def _interleaved(trainer):
    trainer.config.rotary_interleaved = True


def _blocks_of_gates(trainer):
    trainer.config.moe_mlp_glu_interleave_size = 8


def _halved_heads(trainer):
    """Twice as many of half the size: every parameter has the same shape."""
    hf = reference.config(trainer.hf.model_type, num_attention_heads=8, num_key_value_heads=4)
    hf.head_dim = 8
    return hf


MUTATIONS = {
    function.__name__.removeprefix("_"): function
    for function in (
        _unknown_name,
        _other_hidden,
        _other_experts,
        _other_vocabulary,
        _fewer_layers,
        _one_query_group,
        _other_tie,
        _other_family,
        _zero_centered,
        _interleaved,
        _blocks_of_gates,
        _halved_heads,
    )
}


def shared_names(what):
    """Names of the checkpoint that a layout lacks of a model in which layers share weights."""
    with megatron_cpu.groups(megatron_cpu.Parallel()):
        hf = reference.config("qwen3", num_hidden_layers=3)
        trainer = megatron_cpu.build(hf, megatron_cpu.Parallel())
        layers = trainer.chunks[0].decoder.layers
        if what == "module":
            layers[1].mlp = layers[0].mlp
        else:
            layers[1].mlp.linear_fc1.weight = layers[0].mlp.linear_fc1.weight
        names = wsync.megatron.layout(trainer.chunks, hf).layout.names()
        return sorted(set(reference.hf_tensors(hf)) - set(names))
