"""What a rank does in tests/test_fsdp.py; runs in the processes of support.procs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from support.errors import error_of
from support.megatron_cases import check_everything, host_bytes
from support.tensor_parallel_engine import TensorParallelEngine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import wsync
from wsync import _core

State = dict[str, torch.Tensor]
CPU = torch.device("cpu")

OPTIONS: dict[str, Any] = {
    "deadline": 60.0,
    "progress": False,
    "round_nbytes": 1 << 15,
    "ring_nbytes": 1 << 16,
}
# which dimension tensor-parallel ranks cut, by the module's name
CUTS = {
    "embed_tokens": 0,
    "lm_head": 0,
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "o_proj": 1,
    "down_proj": 1,
}


def config(kind: str, **changes: Any) -> Any:
    """Rows that no number of ranks divides: a vocabulary of 101, 90 channels, 5 experts."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    if kind == "dense":
        return transformers.Qwen3Config(**sizes | changes)
    sizes |= {
        "moe_intermediate_size": 36,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }
    return transformers.Qwen3MoeConfig(**sizes | changes)


class FusedExperts(torch.nn.Module):
    """The experts of one layer as transformers 5 holds them: (E, 2 F, H) and (E, H, F)."""

    def __init__(self, experts: Sequence[Any]) -> None:
        super().__init__()
        first = [torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in experts]
        self.gate_up_proj = torch.nn.Parameter(torch.stack(first).detach())
        self.down_proj = torch.nn.Parameter(
            torch.stack([e.down_proj.weight for e in experts]).detach()
        )


def build(kind: str, **changes: Any) -> tuple[Any, State]:
    """(model, checkpoint), equal on all ranks."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(kind, **changes)).float()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if kind == "fused":
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = FusedExperts(layer.mlp.experts)
    return model, state


def tensor_parallel(model: Any, mesh: Any) -> None:
    for module in model.modules():
        for key, child in module.named_children():
            if key in CUTS and isinstance(child, torch.nn.Linear | torch.nn.Embedding):
                cut = distribute_tensor(child.weight.detach(), mesh, [Shard(CUTS[key])])
                child.weight = torch.nn.Parameter(cut)


def shard(model: Any, how: str) -> Any:
    """The model as a trainer of this kind has it."""
    count = dist.get_world_size()
    if how.startswith("fsdp1"):
        return fsdp1(model, how)
    if how == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (count,)))
        return model
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (count,))
    else:
        both = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("outer", "inner"))
        mesh = both["outer"] if how == "fsdp-tp" else both
        if how == "fsdp-tp":
            tensor_parallel(model, both["inner"])
    if how == "fsdp2-dim1":
        mesh = init_device_mesh("cpu", (count,))
    place = (
        (lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % count == 0 else Shard(0))
        if (how == "fsdp2-dim1")
        else None
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def fsdp1(model: Any, how: str) -> Any:
    """FSDP1, a unit for each layer.  It takes the CPU only where it is named as the device."""
    options: dict[str, Any] = {
        "device_id": CPU,
        "use_orig_params": "orig" in how,
    }
    if "mesh" in how:
        options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    if "whole" in how:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    if "hybrid" in how:
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    wrap = functools.partial(FullyShardedDataParallel, **options)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = wrap(layer)
    return wrap(model)


def gathered(layout: Any) -> tuple[_core.Layout, list[list[bytes]]]:
    """All ranks' layouts as one, and the bytes of all ranks' buffers."""
    everyone: list[Any] = [None] * layout.ranks
    layout.bind()
    mine = (layout.layout.to_bytes(), [host_bytes(tensor) for tensor in layout.tensors()])
    dist.all_gather_object(everyone, mine)
    merged = _core.Layout.merge([_core.Layout.from_bytes(data) for data, _ in everyone])
    return merged, [buffers for _, buffers in everyone]


@torch.no_grad()
def change(model: Any, state: State, step: int) -> None:
    """The same arithmetic on every element, here and in the checkpoint."""
    for tensor in model.parameters():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        local.mul_(0.5).add_(step)
    for tensor in state.values():
        tensor.mul_(0.5).add_(step)


def full(model: Any) -> State:
    """Torch's own full tensors under checkpoint names; experts are taken apart."""
    found: State = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found[f"{stem}.{number}.gate_proj.weight"] = gate
                found[f"{stem}.{number}.up_proj.weight"] = up
        elif leaf == "down_proj":
            for number, expert in enumerate(tensor):
                found[f"{stem}.{number}.down_proj.weight"] = expert
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            found[name] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def layout_matches(kind: str, how: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Layouts of a model before and after its weights changed, against torch's full tensors."""
    model, state = build(kind, **changes)
    model = shard(model, how)
    layout = wsync.fsdp.layout(model)
    shards = [check_everything(*gathered(layout), state)]
    change(model, state, 3)
    shards.append(check_everything(*gathered(layout), state))
    if not how.startswith("fsdp1"):
        assert equal(full(model), state)
    local = {t.data_ptr() for t in layout.tensors() if t.numel()}
    own = {
        (p._local_tensor if isinstance(p, DTensor) else p).data_ptr() for p in model.parameters()
    }
    return {
        "shards": shards,
        "tensors": len(state),
        "borrowed": how.startswith("fsdp1") or local <= own,
        "empty": sum(t.numel() == 0 for t in layout.tensors()),
        "mine": sum(len(layout.layout.shards(i)) for i in range(layout.layout.tensor_count)),
    }


@torch.no_grad()
def assigned_matches(how: str) -> list[int]:
    """Parameters that are given other memory, or are others, between updates."""
    model, state = build("dense")
    model = shard(model, how)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    if "trained" in how:  # from its first forward pass on it keeps its shards elsewhere
        with torch.enable_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    layout = wsync.fsdp.layout(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5 + 3
    for tensor in state.values():
        tensor.add_(1).mul_(0.5).add_(3)
    shards = [check_everything(*gathered(layout), state)]
    if "orig" not in how:
        return shards
    for owner in model.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and name != "_flat_param":
                setattr(owner, name, torch.nn.Parameter(parameter * 2))
    for tensor in state.values():
        tensor.mul_(2)
    return [*shards, check_everything(*gathered(layout), state)]


class Valued(torch.nn.Module):
    """A language model with a head for values, as RL trainers have it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.value = torch.nn.Linear(model.config.vocab_size, 1)

    def forward(self) -> torch.Tensor:
        ids = torch.zeros(1, 4, dtype=torch.int64)
        found: torch.Tensor = self.value(self.pretrained_model(input_ids=ids).logits)
        return found


def parts_of_a_flat_unit(how: str) -> list[str]:
    """What layouts say of what lies in the unit that has flattened it."""
    unit = FullyShardedDataParallel(
        Valued(build("dense")[0]), device_id=CPU, use_orig_params="orig" in how
    )
    model = unit.module.pretrained_model
    parts = (unit.module, model, model.model)
    return [error_of(lambda part=part: wsync.fsdp.layout(part)) for part in parts]


@torch.no_grad()
def part_of_a_unit() -> int:
    """The layout of a module of which FSDP2 has embedding, norm and head in a unit around it."""
    model, state = build("dense")
    for layer in model.model.layers:
        fully_shard(layer)
    whole = fully_shard(Valued(model))
    layout = wsync.fsdp.layout(model)
    whole()  # which leaves them gathered
    return check_everything(*gathered(layout), state)


def trained_matches(kind: str, how: str) -> dict[str, Any]:
    """A training step; forward passes may leave parameters unsharded."""
    model, state = build(kind)
    model = shard(model, how)
    layout = wsync.fsdp.layout(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(input_ids=ids)
    merged, buffers = gathered(layout)
    if how.startswith("fsdp1"):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            now = {
                wsync.fsdp.plain_name(name): p.detach().clone()
                for name, p in model.named_parameters()
                if "_flat_param" not in name
            }
            if not now:
                now = named_views(model)
    else:
        now = full(model)
    changed = sum(not torch.equal(now[name], state[name]) for name in state)
    return {"shards": check_everything(merged, buffers, now), "changed": changed}


def named_views(model: Any) -> State:
    """With use_orig_params=False the full parameters are plain attributes of the modules."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[wsync.fsdp.plain_name(f"{path}.{key}")] = value.detach().clone()
    return found


def state_dict_matches(how: str, tied: bool) -> dict[str, Any]:
    """Layouts of FSDP1's sharded state dicts; each update has a new one."""
    model, state = build("dense", tie_word_embeddings=tied)
    model = shard(model, how)
    layout, kinds = None, set()
    for step in (1, 2):
        change(model, state, step)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = model.state_dict()
        kinds |= {type(tensor).__name__ for tensor in sharded.values()}
        if layout is None:
            layout = wsync.fsdp.layout(sharded, model.config)
        layout.bind(sharded)
        everyone: list[Any] = [None] * layout.ranks
        buffers = [host_bytes(tensor) for tensor in layout.pick(sharded)]
        dist.all_gather_object(everyone, (layout.layout.to_bytes(), buffers))
        merged = _core.Layout.merge([_core.Layout.from_bytes(data) for data, _ in everyone])
        shards = check_everything(merged, [b for _, b in everyone], state)
    return {"kinds": sorted(kinds), "shards": shards}


@contextlib.contextmanager
def engine_on_rank_0(settings: Any, **options: Any) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        engines = []
        if dist.get_rank() == 0:
            engines = [stack.enter_context(TensorParallelEngine(settings, **options))]
        dist.barrier()  # starting takes longer than the ranks wait for each other
        yield engines


def wrong(engines: list[Any], expected: State) -> list[str]:
    """Names whose bytes differ in the engine."""
    if not engines:
        return []
    found = engines[0].weights()
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]


def update(kind: str, how: str, changes: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an engine process from a sharded trainer."""
    model, state = build(kind, **changes)
    model = shard(model, how)
    different: list[str] = []
    with engine_on_rank_0(model.config, tp=2, **engine) as engines:
        options = wsync.Options(**OPTIONS)
        layout = wsync.fsdp.layout(model)
        with wsync.connect(layout, engines, options=options) as sync:
            for step in (1, 2):
                change(model, state, step)
                report = sync.update()
                different += wrong(engines, state)
    if not how.startswith("fsdp1"):
        assert equal(full(model), state)
    return {"wrong": different, **report.facts()}


def update_as_slime_does() -> dict[str, Any]:
    """slime's updater with an FSDP layout in the model's place."""
    model, state = build("fused")
    model = shard(model, "fsdp2")
    with engine_on_rank_0(model.config, tp=2) as engines:
        updater = wsync.UpdateWeightFromTensor(
            None,
            wsync.fsdp.layout(model),
            None,
            model_name="qwen3_moe",
            options=wsync.Options(**OPTIONS),
        )
        updater.connect_rollout_engines(engines)
        change(model, state, 1)
        updater.update_weights()
        updater.disconnect_rollout_engines()
        return {"wrong": wrong(engines, state), "version": updater.weight_version}


def partial_error(local: bool) -> str:
    """What a layout says of sums that nobody has added up."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    placements = [Replicate(), Partial()] if local else [Partial(), Shard(0)]
    tensor = DTensor.from_local(torch.ones(4, 3), mesh, placements)
    return error_of(lambda: wsync.fsdp.layout({"model.norm.weight": tensor}))


def two_dimensional_error(how: str) -> str:
    """What a layout says of FSDP1 units whose parameters tensor parallelism has cut before."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    model[0].weight = torch.nn.Parameter(
        distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)])
    )
    unit = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], device_id=CPU, use_orig_params="orig" in how
    )
    return error_of(lambda: wsync.fsdp.layout(unit))


def cast_buffers(original: bool) -> list[list[str]]:
    """Dtypes and values of what is sent before and after FSDP1 has cast buffers, and by a layout
    that is made then."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    inner = FullyShardedDataParallel(
        model, use_orig_params=original, device_id=CPU, mixed_precision=policy
    )
    outer = torch.nn.Sequential(inner)
    layout = wsync.fsdp.layout(outer)

    def sent(layout: Any) -> list[str]:
        layout.bind()
        index = layout.names.index("0.1.running_mean")
        return [str(tensor.dtype) for tensor in layout.tensors()[index : index + 3]]

    found = [sent(layout)]
    inner(torch.randn(3, 4)).sum().backward()
    assert model[1].running_mean.dtype == torch.bfloat16
    found += [sent(layout), sent(wsync.fsdp.layout(outer))]
    mean = layout.tensors()[layout.names.index("0.1.running_mean")]
    assert torch.equal(mean, model[1].running_mean.float())
    return found


def resharded_error() -> str:
    """What an update says of a tensor that is cut in another way than the layout's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(64.0).reshape(8, 8)
    layout = wsync.fsdp.layout({"w": distribute_tensor(whole, mesh, [Shard(0)])})
    moved = {"w": distribute_tensor(whole, mesh, [Shard(0)]).clone()}
    layout.bind(moved)
    return error_of(lambda: layout.bind({"w": distribute_tensor(whole, mesh, [Shard(1)])}))


def uneven_rows(counts: Sequence[int]) -> list[bool]:
    """Whether all ranks' layouts have embeddings of so many rows, which tensor parallelism has cut
    before FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    right = []
    for rows in counts:
        model = torch.nn.Module()
        model.embed_tokens = torch.nn.Embedding(rows, 3)
        known = torch.arange(3.0 * rows).view(rows, 3)
        model.embed_tokens.weight = torch.nn.Parameter(known.clone())
        tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        merged, held = gathered(wsync.fsdp.layout(model))
        seen = torch.zeros_like(known)
        for rank, buffer, offset, start, extent, _, _ in merged.shards(0):
            data = torch.frombuffer(bytearray(held[rank][buffer]), dtype=torch.float32)
            box = data[offset // 4 :][: math.prod(extent)].view(extent)
            seen[start[0] : start[0] + extent[0]] = box
        right.append(torch.equal(seen, known))
    return right


def megatron_fsdp_rows() -> list[float]:
    """The first elements of the rows that all ranks' layouts have of a column-parallel weight."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        make_fsdp_dtensor,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    column = torch.arange(16.0).reshape(16, 1).expand(16, 4).chunk(2)[tp]
    weight = torch.nn.Parameter(column.clone())
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    tensor = make_fsdp_dtensor(
        column.chunk(2)[dp].clone(),
        weight,
        FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp"),
        update_uneven_dtensor_chunk_meta=True,
    )
    model, held = gathered(wsync.fsdp.layout({"w": tensor}))
    rows = [-1.0] * 16
    for rank, _, offset, start, extent, _, _ in model.shards(0):
        data = torch.frombuffer(bytearray(held[rank][0]), dtype=torch.float32)
        part = data[offset // 4 :].view(-1, 4)[: extent[0], 0]
        rows[start[0] : start[0] + extent[0]] = part.tolist()
    return rows


def megatron_fsdp_uneven_rows(counts: Sequence[int], said: bool) -> tuple[list[float], str]:
    """The rows that all ranks' layouts have of two tensors that are cut unevenly, as by
    Megatron-FSDP, with its metadata or without; and what is said of them."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    rank, rows, mesh = dist.get_rank(), sum(counts), init_device_mesh("cpu", (len(counts),))
    tensors = {}
    for name, order in (("a", counts), ("b", counts[::-1])):
        start = sum(order[:rank])
        local = torch.arange(start, start + order[rank]).float().view(-1, 1).repeat(1, 3)
        tensors[name] = DTensor.from_local(
            local, mesh, [Shard(0)], shape=torch.Size([rows, 3]), stride=(3, 1)
        )
        if said:
            uneven_dtensor.update_uneven_dtensor_chunk_metadata(tensors[name])
    texts: list[Any] = [""] * len(counts)
    dist.all_gather_object(texts, error_of(lambda: wsync.fsdp.layout(tensors)))
    if any(texts):
        return [], texts[rank]
    model, held = gathered(wsync.fsdp.layout(tensors))
    found = [-1.0] * 2 * rows
    for index in range(model.tensor_count):
        for rank, buffer, offset, start, extent, _, _ in model.shards(index):
            data = torch.frombuffer(bytearray(held[rank][buffer]), dtype=torch.float32)
            part = data[offset // 4 :].view(-1, 3)[: extent[0], 0]
            at = index * rows + start[0]
            found[at : at + extent[0]] = part.tolist()
    return found, ""


def tied_names(first: bool, use_orig: bool) -> list[str]:
    """The names of a layout of an FSDP1 unit with a tied head, registered first or last."""
    model = torch.nn.Module()
    head, embedding = torch.nn.Linear(4, 8, bias=False), torch.nn.Embedding(8, 4)
    head.weight = embedding.weight
    if first:
        model.lm_head = head
    model.model = torch.nn.ModuleDict({"embed_tokens": embedding})
    if not first:
        model.lm_head = head
    unit = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=use_orig)
    return gathered(wsync.fsdp.layout(unit, config("dense", tie_word_embeddings=True)))[0].names()


def shared_by_units() -> str:
    """What a layout says of a tensor that two FSDP1 units have."""
    linears = {name: torch.nn.Linear(4, 4, bias=False) for name in "abc"}
    linears["b"].weight = linears["a"].weight
    model: Any = torch.nn.Sequential(OrderedDict(linears))
    unit = functools.partial(FullyShardedDataParallel, device_id=CPU, use_orig_params=True)
    model.a = unit(model.a)
    model = unit(model)
    return error_of(lambda: wsync.fsdp.layout(model))
