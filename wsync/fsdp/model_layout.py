"""Layouts of FSDP trainers: DTensors of any mesh, FSDP1's flat parameters and sharded state dicts.

What a rank holds of a parameter is a set of boxes, known from the placements of its DTensor, the
metadata of its ShardedTensor, or the interval of the flat parameter that it keeps; the local
tensor must agree.  Shards are read where they lie: nothing is communicated and nothing copied.

Names are those of the module tree without wrappers, which are Hugging Face's own; what transformers
fuses at run time goes through the rules of `wsync.families.registry.RUNTIME`.

Replicas (a `Replicate` placement, a plain tensor) are the same boxes on several ranks.  `Partial`
placements are sums that are not added up, and are refused.

Formats: `torch.distributed.tensor` and `torch.distributed.fsdp` of torch 2.6 to 2.13, and the
DTensors that Megatron-FSDP makes.

On all ranks:

>>> for part in (*model.model.layers, model):
...     _ = fully_shard(part)
>>> layout = wsync.fsdp.layout(model)
>>> with wsync.connect(layout, engines=["http://127.0.0.1:30000"]) as sync:
...     train_step(model)
...     report = sync.update(version=1)
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.registry import TOGETHER, Family, runtime_family
from wsync.families.rules import Expansion, ShardPlacement, regions_of
from wsync.layout import (
    TrainerLayout,
    by_plain_name,
    chosen,
    contiguous_strides,
    global_name,
    position,
)
from wsync.module_tensors import Slot, Slots, homes_of, same_bytes, two_tensors
from wsync.module_tensors.kept_together import group_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

__all__ = ["layout", "plain_name"]

WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
TIED = "lm_head.weight"
_FUSED = (".experts.gate_up_proj", ".experts.down_proj")

Shape = tuple[int, ...]
Regions = tuple[tuple[Shape, Shape, Shape], ...]  # of _core.Region
# (start, extent) of what a rank holds of one dimension, in the order in which it lies
Runs = tuple[tuple[int, int], ...]
Form = tuple[str, Shape, Regions, Shape | None]


@dataclass(frozen=True)
class _Part:
    """Boxes of a parameter that lie in one local tensor.

    `strides`: element strides of the boxes where they are not the local tensor's own.
    """

    name: str
    tensor: Tensor
    shape: Shape
    regions: Regions
    strides: Shape | None = None

    @property
    def form(self) -> Form:
        """All but the tensor."""
        return self.name, self.shape, self.regions, self.strides


def layout(
    model: Module | Mapping[str, Tensor],
    config: Any = None,
    *,
    group: ProcessGroup | None = None,
) -> TrainerLayout:
    """The layout of this rank of a model under FSDP2, FSDP1 or tensor-parallel DTensors.

    `model`: the module, or a sharded state dict (`StateDictType.SHARDED_STATE_DICT`); the tensors
    of a state dict are those of its making, so give `Sync.update` a new one each time.  `config`:
    the Hugging Face configuration (default: the model's own), which tells, with its text's, tied
    embeddings, and how experts are fused.  A tensor of several names has all of them, but for a
    head that is tied.  `group`: the ranks that take part in updates (default: all).  Not
    collective.  FSDP2 modules are resharded, as `state_dict()` does it, now and at each update.

    Raises UnsupportedError for a placement that is no weight (`Partial`) and for fused experts of a
    family without rules, LayoutError for a tensor that does not fit its placement, StateError where
    resharding has undone changes of what a pass had left gathered.
    """
    reader = _Reader()
    config = getattr(model, "config", None) if config is None else config
    tied = _says_tied(config)
    if isinstance(model, Mapping):
        read = reader.of_mapping(model, tied)
    else:
        read = reader.of_module(model, tied)
    parts = read()
    places: dict[object, int] = {}  # a flat parameter is one buffer, named after its first part
    keys = [
        (place,) if part.strides is None else id(part.tensor) for place, part in enumerate(parts)
    ]
    numbers = [places.setdefault(key, len(places)) for key in keys]
    firsts = [numbers.index(number) for number in range(len(places))]
    names = tuple(parts[first].name for first in firsts)
    table = _core.describe([parts[first].tensor for first in firsts], names, gpu=True)
    rank, count = position(group)
    builder = _core.LayoutBuilder(rank)
    names_of = _Names(config)
    for part, number in zip(parts, numbers, strict=True):
        _, dtype, _, strides, _ = table[number]
        maps = names_of.maps(part)
        if math.prod(part.shape) == 0:
            for each in maps:
                builder.add_tensor(each[0], dtype, each[2], each[7])
        elif part.regions:
            strides = strides if part.strides is None else part.strides
            builder.add_parameter(part.name, number, dtype, strides, part.regions, maps)
    forms = [part.form for part in parts]

    def current(weights: Mapping[str, Tensor] | None = None) -> Sequence[Tensor]:
        found = read() if weights is None else reader.of_mapping(weights, tied, forms)()
        _check_same(forms, found)
        for part, number in zip(found, numbers, strict=True):
            if part.tensor is not found[firsts[number]].tensor:
                raise _core.LayoutError(
                    f"{part.name}: no longer lies in one tensor with {names[number]}"
                )
        return [found[first].tensor for first in firsts]

    return TrainerLayout(builder.build(), names, current, table, rank, count, group, current)


def _says_tied(config: Any) -> bool:
    """Whether a configuration says that embeddings are tied, and that of its text, where it has
    one, does not say otherwise.

    transformers ties by that of the text before 5, and by the outer one from then on; the other one
    has the default of its class.  Without word of both, the tensors tell: a head that is the
    embedding has a name more, which engines may have.
    """
    find = getattr(config, "get_text_config", None)
    text = getattr(config, "text_config", None) if find is None else find(decoder=True)
    own = bool(getattr(config, "tie_word_embeddings", False))
    return own and bool(getattr(text, "tie_word_embeddings", True))


def plain_name(name: str) -> str:
    """A name without the path components of FSDP, activation checkpointing and torch.compile."""
    return global_name(".".join(part for part in name.split(".") if part not in WRAPPERS))


# --- where tensors are ------------------------------------------------------------------------


class _Reader:
    """Finds the parts of parameters; what repeats from tensor to tensor is kept."""

    def __init__(self) -> None:
        self._placed: dict[Any, Regions] = {}

    def of_mapping(
        self, tensors: Mapping[str, Tensor], tied: bool, wanted: Sequence[Form] | None = None
    ) -> Callable[[], list[_Part]]:
        """Reads tensors by name; `wanted` leaves out what has none of these names."""

        def read() -> list[_Part]:
            some = None if wanted is None else dict.fromkeys(form[0] for form in wanted)
            known = by_plain_name(tensors, plain_name, some)
            if tied and TIED in known:
                self._check_tied(known)
                del known[TIED]
            names = list(known if some is None else some)
            given = zip(names, chosen(known, names), strict=True)
            return [part for name, tensor in given for part in self._parts(name, tensor)]

        return read

    def of_module(self, module: Any, tied: bool) -> Callable[[], list[_Part]]:
        """Reads what a module's state dict would hold, and FSDP1's flat parameters."""
        flats: list[tuple[str, Any]] = []
        units: list[tuple[str, Any]] = []
        saved: dict[str, Any] = {}

        def find() -> Iterator[Slot]:
            flats[:] = _flat_handles(module)
            saved.clear()
            saved.update(_saved_dtypes(module))
            units[:] = [(path, part) for path, part in module.named_modules() if _is_fsdp2(part)]
            _reshard(units)
            for prefix, handle in flats:
                _check_modules(prefix, handle)
                _write_back(prefix, handle)
            return _slots(module, flats, tied)

        slots = Slots([module], find)
        _check_names(slots.names, flats)

        def read() -> list[_Part]:
            _reshard(units)
            held = zip(slots.names, slots.read(), strict=True)
            given = ((n, t.to(saved[n]) if n in saved else t) for n, t in held)
            parts = [part for name, tensor in given for part in self._parts(name, tensor)]
            for prefix, handle in flats:
                parts += _flat_parts(prefix, handle, tied)
            return parts

        return read

    def _check_tied(self, known: Mapping[str, Any]) -> None:
        """LayoutError where a tied head has other values than every tensor it may be tied to: it
        is not delivered under its own name."""
        head = known[TIED]
        same_shape = [n for n, t in known.items() if n != TIED and t.shape == head.shape]
        if not any(known[name] is head or self._same(known[name], head) for name in same_shape):
            raise _core.LayoutError(
                f"{TIED}: values of its own, but the configuration says tied embeddings"
            )

    def _same(self, one: Any, other: Any) -> bool:
        """Whether what this rank has of two tensors is equal to the bit."""
        first, second = list(self._parts(TIED, one)), list(self._parts(TIED, other))
        return [part.form for part in first] == [part.form for part in second] and all(
            same_bytes(a.tensor, b.tensor) for a, b in zip(first, second, strict=True)
        )

    def _parts(self, name: str, tensor: Any) -> Iterator[_Part]:
        if hasattr(tensor, "materialize"):  # torch's UninitializedTensorMixin
            raise _core.UnsupportedError(
                f"{name}: not initialised yet, as those of torch.nn's Lazy modules are until their "
                "first forward pass"
            )
        shape = tuple(tensor.shape)
        if hasattr(tensor, "placements"):
            yield _Part(name, tensor._local_tensor, shape, self._place(name, tensor, shape))
        elif hasattr(tensor, "local_shards"):
            for shard in tensor.local_shards():
                start = tuple(shard.metadata.shard_offsets)
                extent = tuple(shard.metadata.shard_sizes)
                _check_local(name, shard.tensor, extent)
                regions = ((start, extent, (0,) * len(shape)),) if math.prod(extent) else ()
                yield _Part(name, shard.tensor, shape, regions)
        else:
            zeros = (0,) * len(shape)
            yield _Part(name, tensor, shape, ((zeros, shape, zeros),))

    def _place(self, name: str, tensor: Any, shape: Shape) -> Regions:
        """The boxes of a DTensor's local tensor."""
        mesh = tensor.device_mesh
        local = tuple(tensor._local_tensor.shape)
        order = _cut_order(name, tensor)
        key = (shape, local, tuple(tensor.placements), mesh, order)
        regions = self._placed.get(key)
        if regions is None:
            coordinate = mesh.get_coordinate()
            if coordinate is None:  # the mesh belongs to other ranks
                regions = ()
            else:
                _check_ascending(name, tensor, coordinate)
                places = list(zip(tensor.placements, mesh.shape, coordinate, strict=True))
                for way in _ways_to_cut(tensor, order):
                    runs = _cut(name, shape, [(each, *places[each], way[each]) for each in way])
                    extents = tuple(sum(extent for _, extent in part) for part in runs)
                    if extents == local:
                        break
                _check_local(name, tensor._local_tensor, extents)
                regions = regions_of(runs)
            self._placed[key] = regions
        _check_chunks(name, tensor._local_tensor, regions)
        return regions


def _is_fsdp2(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _reshard(units: Iterable[tuple[str, Any]]) -> None:
    """Has FSDP2 modules hold their shards.

    Raises StateError where what a pass has left gathered differs from them.  All are resharded
    nevertheless: not every rank sees a difference, and modules that are sharded on some ranks only
    wait for each other in the next pass.
    """
    changed = ""
    for path, unit in units:
        changed = changed or _changed_part(path, unit)
        unit.reshard()
    if changed:
        raise _core.StateError(
            f"{changed}: differs from its shard, though FSDP2 had it gathered since a pass: it was "
            "changed while it was gathered, which resharding undoes (it has now been done), or its "
            "shard was. Call reshard() of FSDP2's modules before parameters are changed"
        )


def _changed_part(path: str, unit: Any) -> str:
    """The name of a parameter of a module that is not what its shard says, or ""."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several, in newer versions
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None or group.is_sharded else group.fsdp_params:
            if not _is_kept(parameter, group.is_unsharded):
                info = parameter._module_info
                inside = next((n for n, part in unit.named_modules() if part is info.module), "")
                return plain_name(_joined(path, inside, info.param_name))
    return ""


def _is_kept(parameter: Any, whole: bool) -> bool:
    """Whether a module has of a parameter what this rank's shard says, where they meet.  What is
    gathered is the whole one, or the part of a smaller mesh (fully_shard's reshard_after_forward).
    Of that most has its shards on other ranks: there, torch's own count of writes has to do.
    """
    info, dimension = parameter._module_info, parameter.fsdp_placement.dim
    held = info.module._parameters.get(info.param_name)
    shard = parameter.sharded_param._local_tensor
    if held is None or hasattr(shard, "fsdp_pre_all_gather"):
        return True  # made of the shards
    if held.shape != parameter.sharded_param.shape or (not whole and held._version):
        return False
    mine, kept = shard.detach(), getattr(held, "_local_tensor", held).detach()
    each = parameter.padded_sharded_param_size[dimension]
    first = each * getattr(parameter.mesh_info, "shard_mesh_rank", 0)
    start = 0  # of what is gathered
    if not whole:
        mesh, smaller = parameter.mesh_info, parameter.post_forward_mesh_info
        if dimension:  # torch keeps rows of it
            mine = mine.narrow(0, len(kept) * smaller.shard_mesh_rank, len(kept))
        else:
            start = each * mesh.shard_mesh_size // smaller.shard_mesh_size * smaller.shard_mesh_rank
    low = max(first, start)
    count = min(first + mine.shape[dimension], start + kept.shape[dimension]) - low
    if count <= 0:
        return True
    mine = mine.narrow(dimension, low - first, count)
    kept = kept.narrow(dimension, low - start, count)
    return same_bytes(kept, mine.to(kept.device, kept.dtype))


def _slots(module: Any, flats: Sequence[tuple[str, Any]], tied: bool) -> Iterator[Slot]:
    """Every parameter and persistent buffer that is not in a flat parameter."""
    buffers = {id(handle.flat_param) for _, handle in flats}
    delivered = {name for prefix, handle in flats for name, *_ in _flat_names(prefix, handle)}
    flat = {
        id(tensor)
        for _, handle in flats
        for tensor in (
            handle.flat_param,
            *(getattr(handle.flat_param, "_params", None) or ()),
            *(getattr(handle.flat_param, "_shared_params", None) or ()),
        )
    }
    parts: dict[str, int] = {}  # every name is one of its own, whatever tensor has it
    firsts: dict[int, int] = {}
    heads: list[Slot] = []
    for owner, home, key, full in homes_of(module, once=False):
        tensor, name = home[key], plain_name(full)
        if id(tensor) in flat:
            whole = id(tensor) in buffers or (tied and name == TIED)
            if not whole and name not in delivered:
                raise _core.LayoutError(
                    f"{name}: is a parameter of two FSDP1 units, of which one has it: wrap both "
                    "modules in one unit"
                )
            continue
        if home is owner._buffers and key in owner._non_persistent_buffers_set:
            continue
        if tied and name == TIED:
            heads.append(Slot(name, home, key, full))
            continue
        part = parts.setdefault(name, len(parts))
        firsts.setdefault(id(tensor), part)
        yield Slot(name, home, key, full, part)
    for head in heads:  # registered before the embedding or behind it
        first = firsts.get(id(head.home[head.key]))
        if first is None:
            raise _core.LayoutError(
                f"{TIED}: a parameter of its own, but the configuration says tied "
                "embeddings: wrap both in one FSDP unit"
            )
        yield head._replace(part=first)


def _check_names(names: Iterable[str], flats: Sequence[tuple[str, Any]]) -> None:
    """Refuses names that a flat parameter shares with another one or with a tensor of its own."""
    seen = set(names)
    for prefix, handle in flats:
        for name, path, _ in _flat_names(prefix, handle):
            if name in seen:
                raise two_tensors(path, "another parameter", name)
            seen.add(name)


# --- DTensor placements ---------------------------------------------------------------------


def _cut_order(name: str, tensor: Any) -> tuple[int, ...]:
    """The mesh dimensions of a DTensor in the order in which they cut it: Megatron-FSDP's meshes
    say it, or the specification of newer versions of torch does; else one after another."""
    plain = tuple(range(len(tensor.placements)))
    strided = any(hasattr(placement, "split_factor") for placement in tensor.placements)
    said = getattr(tensor.device_mesh, "_shard_order", None)
    if said is not None:
        order = tuple(said)
    else:
        entries = (not strided and getattr(tensor._spec, "shard_order", None)) or ()
        cutting = [number for entry in entries for number in entry.mesh_dims]
        order = (*cutting, *(number for number in plain if number not in cutting))
    if sorted(order) != list(plain) or (strided and order != plain):
        raise _core.UnsupportedError(
            f"{name}: mesh dims {order} are said to be the order in which {tensor.placements} cut "
            "it: each once, and not beside _StridedShard, which says it in another way"
        )
    return order


def _check_ascending(name: str, tensor: Any, coordinate: Sequence[int]) -> None:
    """LayoutError where a mesh dimension that cuts the tensor has its ranks in another order than
    their process group: torch cuts by the group, which sorts them, and writes checkpoints by the
    mesh."""
    mesh = tensor.device_mesh
    for number, placement in enumerate(tensor.placements):
        row: list[Any] = list(coordinate)
        row[number] = slice(None)
        ranks = mesh.mesh[tuple(row)].tolist()
        if not placement.is_replicate() and ranks != sorted(ranks):
            raise _core.LayoutError(
                f"{name}: dimension {number} of its mesh has ranks {ranks}, which do not ascend: "
                "which of them has which part is not certain; make the mesh with ascending ranks"
            )


def _check_chunks(name: str, local: Any, regions: Regions) -> None:
    """LayoutError where a local tensor's own metadata, as Megatron-FSDP has checkpoints written by
    it, says other boxes than its placements do."""
    make = getattr(local, "__create_chunk_list__", None)
    if make is None:
        return
    said = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in make()}
    said = {box for box in said if math.prod(box[1])}
    placed = {(start, extent) for start, extent, _ in regions}
    if said != placed:
        raise _core.LayoutError(
            f"{name}: its own metadata has (offsets, sizes) {sorted(said)}, its placements "
            f"{sorted(placed)}"
        )


def _ways_to_cut(tensor: Any, order: Iterable[int]) -> list[dict[int, int]]:
    """The split factors of a DTensor's mesh dimensions, in the order in which they cut it; the last
    way is that of its placements one after another.

    A _StridedShard says that inner mesh dimensions have cut before it.  Where rows do not divide,
    FSDP2 over tensor parallelism (and full_tensor()) has what that order gives,
    distribute_tensor(src_data_rank=None) what the placements' own does.
    """
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    factors = {number: int(getattr(placements[number], "split_factor", 1)) for number in order}
    inner_first: list[int] = []
    for number in reversed(factors):
        dim = getattr(placements[number], "dim", None)
        inner = [sizes[n] for n in inner_first if getattr(placements[n], "dim", None) == dim]
        if factors[number] == 1:
            inner_first.insert(0, number)
        elif factors[number] == math.prod(inner):
            inner_first.append(number)
        else:
            return [factors]
    return [dict.fromkeys(inner_first, 1), factors]


def _cut(name: str, shape: Shape, places: Iterable[tuple[int, Any, int, int, int]]) -> list[Runs]:
    """What a rank holds of every dimension.

    `places`: (mesh dimension, placement, ranks there, this rank's index, split factor) in the order
    in which they cut.  Each placement cuts what those before it have left, as torch.chunk does:
    equal parts but for the last ones, which may be smaller or empty.
    """
    runs: list[Runs] = [((0, size),) for size in shape]
    for number, placement, ranks, index, factor in places:
        if placement.is_replicate():
            continue
        if placement.is_partial() or not isinstance(getattr(placement, "dim", None), int):
            raise _core.UnsupportedError(
                f"{name}: mesh dim {number} has placement {placement!r}, which is no weight: "
                "Shard and Replicate are"
            )
        runs[placement.dim] = _share(runs[placement.dim], ranks, index, factor)
    return runs


def _share(runs: Runs, ranks: int, index: int, factor: int) -> Runs:
    """A rank's share of a dimension.

    `factor` is _StridedShard's: the dimension is first cut into so many parts, as an inner mesh
    dimension will cut it (tensor-parallel ranks inside FSDP), and each of them over the ranks.
    """
    count = sum(extent for _, extent in runs)
    found: list[tuple[int, int]] = []
    for piece in range(factor):
        start, extent = _chunk(count, factor, piece)
        offset, extent = _chunk(extent, ranks, index)
        found += _slice(runs, start + offset, extent)
    return tuple(found)


def _chunk(count: int, parts: int, index: int) -> tuple[int, int]:
    """(start, extent) of a part of torch.chunk; those that it does not return are empty."""
    size = -(-count // parts)
    start = min(size * index, count)
    return start, min(size, count - start)


def _slice(runs: Runs, start: int, extent: int) -> Iterator[tuple[int, int]]:
    """`extent` elements from the start-th on of what the runs hold one after another."""
    for first, count in runs:
        low, high = max(start, 0), min(start + extent, count)
        if low < high:
            yield first + low, high - low
        start -= count


def _check_local(name: str, tensor: Any, extents: Shape) -> None:
    if tuple(tensor.shape) != extents:
        raise _core.LayoutError(
            f"{name}: local shape {tuple(tensor.shape)} != {extents}, the share of this rank"
        )


# --- FSDP1's flat parameters ------------------------------------------------------------------


def _flat_handles(module: Any) -> Iterator[tuple[str, Any]]:
    """(name of the unit, handle) of every FSDP1 unit that has parameters; of one that the model has
    at several paths, each."""
    seen: set[tuple[str, int]] = set()  # a wrapper has the attributes of what it wraps
    for path, owner in module.named_modules(remove_duplicate=False):
        handle = getattr(owner, "_handle", None)
        key = plain_name(path), id(handle)
        if handle is not None and hasattr(handle, "flat_param") and key not in seen:
            seen.add(key)
            yield key[0], handle


def _saved_dtypes(module: Any) -> Iterator[tuple[str, Any]]:
    """(name, dtype) of the buffers that FSDP1 casts when its root first runs, with
    MixedPrecision(buffer_dtype=): those that its state dicts have."""
    for path, part in module.named_modules():
        policy = getattr(part, "mixed_precision", None)
        if getattr(policy, "buffer_dtype", None) is not None:
            for name, dtype in getattr(part, "_buffer_name_to_orig_dtype", {}).items():
                yield plain_name(_joined(path, name)), dtype


def _check_modules(prefix: str, handle: Any) -> None:
    """LayoutError where a module of a unit is not where it was when the unit was made: its
    parameters go on being called what they were called then."""
    paths = defaultdict[int, set[str]](set)
    for path, part in handle._fully_sharded_module.named_modules(remove_duplicate=False):
        paths[id(part)].add(plain_name(path))
    flat = handle.flat_param
    for info in (*flat._param_infos, *flat._shared_param_infos):
        if plain_name(info.module_name) not in paths[id(info.module)]:
            now = " or ".join(sorted(_joined(prefix, path) for path in paths[id(info.module)]))
            raise _core.LayoutError(
                f"{plain_name(_joined(prefix, info.module_name, info.param_name))}: was made part "
                f"of an FSDP1 unit under this name, but its module is {now or 'no longer there'}: "
                "wrap modules in FSDP where they are to stay"
            )


def _flat_names(prefix: str, handle: Any) -> Iterator[tuple[str, str, int]]:
    """(name, path, place in the flat parameter) of a unit's parameters: of the distinct ones, then
    of what else they are called."""
    flat = handle.flat_param
    places = {key: place for place, key in enumerate(flat._fqns)}
    paths = list(places.items())
    for info in flat._shared_param_infos:
        first = _joined(info.prim_module_name, info.prim_param_name)
        paths.append((_joined(info.module_name, info.param_name), places[first]))
    found: dict[tuple[str, int], str] = {}
    for key, place in paths:
        path = _joined(prefix, key)
        found.setdefault((plain_name(path), place), path)
    for (name, place), path in found.items():
        yield name, path, place


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _flat_parts(prefix: str, handle: Any, tied: bool) -> Iterator[_Part]:
    """The intervals that this rank keeps of a unit's parameters, flattened one after another."""
    flat = handle.flat_param
    _write_back(prefix, handle)
    # The parameter itself is the local shard, assigned or not, unless it is whole for a pass.
    tensor = getattr(flat, "_local_shard", flat) if _is_whole(handle) else flat
    _check_gathered(prefix, handle, tensor)
    known = list(_flat_names(prefix, handle))
    others = {place for name, _, place in known if name != TIED}
    for name, _, place in known:
        if flat._param_extensions[place] is not None:  # its shape is that of the local tensor
            raise _core.UnsupportedError(
                f"{name}: FSDP1 has flattened a DTensor, of which it knows this rank's part alone: "
                "tensor parallelism goes with FSDP2 (fully_shard)"
            )
        if tied and name == TIED:
            if place in others:
                continue
            raise _core.LayoutError(
                f"{name}: a parameter of its own in its FSDP unit, but the configuration says "
                "tied embeddings: wrap both in one unit"
            )
        yield _flat_part(name, tensor, flat, place)


def _flat_part(name: str, tensor: Tensor, flat: Any, place: int) -> _Part:
    """The interval of one parameter, in boxes."""
    info, shape = flat._shard_param_infos[place], tuple(flat._shapes[place])
    axes = _flat_order(name, flat, place)
    flattened = tuple(shape[axis] for axis in axes)

    def turned(values: Sequence[int]) -> Shape:
        return tuple(values[axes.index(axis)] for axis in range(len(shape)))

    regions: list[tuple[Shape, Shape, Shape]] = []
    if info.in_shard:
        first, last = info.intra_param_start_idx, info.intra_param_end_idx + 1
        for start, extent, at in _boxes(flattened, first, last):
            # the boxes' strides end in 1, so the last axis counts from the buffer's start
            local = (0,) * (len(shape) - 1) + (info.offset_in_shard + at - first,)
            regions.append((turned(start), turned(extent), turned(local)))
    return _Part(name, tensor, shape, tuple(regions), turned(contiguous_strides(flattened)))


def _flat_order(name: str, flat: Any, place: int) -> list[int]:
    """The axes of a parameter in the order in which torch has flattened it: that of its memory, as
    of convolutions in channels_last (since torch 2.3, which notes the strides).

    Raises UnsupportedError where its elements did not lie side by side: torch has lost some.
    """
    shape = flat._shapes[place]
    axes = list(range(len(shape)))
    if getattr(flat, "_contiguities", None) is None or flat._contiguities[place]:
        return axes
    steps = flat._strides[place]
    axes.sort(key=lambda axis: -steps[axis])
    dense = contiguous_strides([shape[axis] for axis in axes])
    if any(shape[a] > 1 and steps[a] != d for a, d in zip(axes, dense, strict=True)):
        raise _core.UnsupportedError(
            f"{name}: FSDP1 has flattened a parameter whose elements do not lie side by side "
            f"(strides {tuple(steps)} of {tuple(shape)}), and lost some: make it contiguous first"
        )
    return axes


def _is_whole(handle: Any) -> bool:
    """Whether a flat parameter has the elements of all ranks now."""
    flat = handle.flat_param
    if not handle.uses_sharded_strategy or flat.size() != flat._unpadded_unsharded_size:
        return False
    if flat.numel() > 1:
        return True
    # A shard of one element is as large: what is whole lies where elements are gathered.
    place = flat.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == place for tensor in _gathered(flat))


def _gathered(flat: Any) -> Iterator[Tensor]:
    """What a forward pass has gathered of a flat parameter, and torch keeps."""
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        tensor = getattr(flat, name, None)
        if tensor is not None and tensor.untyped_storage().size():
            yield tensor


def _check_gathered(prefix: str, handle: Any, shard: Tensor) -> None:
    """StateError where a unit keeps other elements than this rank's for its next forward pass."""
    if not handle.uses_sharded_strategy:
        return
    start = handle.rank * shard.numel()
    count = min(shard.numel(), handle.flat_param._unpadded_unsharded_size.numel() - start)
    for tensor in _gathered(handle.flat_param):
        kept = tensor.detach().reshape(-1)[start : start + max(count, 0)]
        mine = shard.detach().reshape(-1)[: max(count, 0)]
        if not same_bytes(kept, mine.to(kept.device, kept.dtype)):
            raise _core.StateError(
                f"FSDP unit {prefix!r}: its parameters have changed since a forward pass gathered "
                "them, or before that pass by assignment, and torch keeps both values: update "
                "before the pass, or after the next backward pass"
            )


def _write_back(prefix: str, handle: Any) -> None:
    """Has a unit take on parameters that were assigned, as its next forward pass would."""
    where = f"FSDP unit {prefix!r}"
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        raise _core.StateError(
            f"{where}: within summon_full_params, whose changes are written back at its end: "
            "update after it"
        )
    try:
        if handle._use_orig_params:
            handle._writeback_orig_params()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise _core.LayoutError(f"{where}: {error}") from error


def _boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape, int]]:
    """(start, extent, flat index) of the boxes that elements [first, last) consist of."""
    if len(shape) == 1:
        yield (first,), (last - first,), first
        return
    inner = math.prod(shape[1:])
    row = first // inner
    while first < last:
        base = row * inner
        if first == base and last - base >= inner:
            rows = (last - base) // inner
            yield (row,) + (0,) * (len(shape) - 1), (rows, *shape[1:]), first
            row += rows
        else:
            end = min(last, base + inner)
            for start, extent, at in _boxes(shape[1:], first - base, end - base):
                yield (row, *start), (1, *extent), base + at
            row += 1
        first = row * inner


# --- names ----------------------------------------------------------------------------------


class _Names:
    """Maps from run-time parameters to the tensors of checkpoints, which engines know."""

    def __init__(self, config: Any) -> None:
        self._family: Family | None
        self._family, self._sizes, self._kind = runtime_family(config)
        self._expansions: dict[int, Expansion] = {}

    def maps(self, part: _Part) -> list[_core.Map]:
        """Where a parameter's elements go; only those maps that its regions meet."""
        found = self._family.match(part.name) if self._family is not None else None
        if self._family is None or found is None:
            self._check_fused(part)
            zeros = (0,) * len(part.shape)
            axes = tuple(range(len(part.shape)))
            group = group_of(part.name, TOGETHER)
            return [(part.name, "", part.shape, zeros, zeros, part.shape, axes, group)]
        rule, numbers = found
        if id(rule) not in self._expansions:
            self._expansions[id(rule)] = self._family.expand(rule, part.name, self._sizes)
        expansion = self._expansions[id(rule)]
        if expansion.shape != part.shape:
            raise _core.LayoutError(
                f"{part.name}: shape {part.shape} != {expansion.shape} of the configuration"
            )
        return expansion.maps(ShardPlacement(part.shape, part.regions), numbers, TOGETHER)

    def _check_fused(self, part: _Part) -> None:
        """Fused experts pass as they are only where a family is known to save them so."""
        if self._family is None and part.name.endswith(_FUSED):
            known = f"the family {self._kind!r}" if self._kind else "a model without config"
            raise _core.UnsupportedError(
                f"{part.name}: experts are fused, and {known} has no rule for engines' names"
            )


def _check_same(forms: Sequence[Form], found: Sequence[_Part]) -> None:
    """Tensors may move; what they hold may not change."""
    for old, new in zip(forms, found, strict=False):
        if old != new.form:
            raise _core.LayoutError(
                f"{old[0]}: is sharded in another way now than when the layout was made"
            )
    if len(forms) != len(found):
        raise _core.LayoutError(
            f"{len(found)} tensors are held now, but {len(forms)} when the layout was made"
        )
