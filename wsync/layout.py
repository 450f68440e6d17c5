"""Trainer layouts: which boxes of which tensors one trainer rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from wsync import _core
from wsync.families.registry import TOGETHER
from wsync.families.runtime_names import RuntimeNames
from wsync.module_tensors import two_tensors
from wsync.module_tensors.names import group_of, group_of_parts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["TrainerLayout", "from_tensors", "global_name", "position"]

_T = TypeVar("_T")
_Row = tuple[int, str, tuple[int, ...], tuple[int, ...], int]  # of a TensorTable


_ANEW: Final = "; update takes tensors like those at connect: connect again for other tensors"
# Parts that FSDP1, activation checkpointing, torch.compile and Lightning Fabric add to names.
WRAPPERS: Final = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"}
)
# Parts that peft's adapters add to names.
ADAPTERS: Final = frozenset(
    {"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save"}
)


def global_name(name: str) -> str:
    """A parameter name without the prefixes (`module.`) of Megatron's and slime's wrappers."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise _core.InvalidArgumentError(f"{name!r}: names must be str, not {type(name).__name__}")


def by_plain_name(
    tensors: Mapping[str, _T], plain: Callable[[str], str], wanted: Collection[str] | None = None
) -> dict[str, _T]:
    """Tensors by their names without wrappers.

    Raises LayoutError if two tensors get the same name and `wanted` has this name (None: always).
    """
    given = list(tensors.items())
    found: dict[str, _T] = {}
    for name, tensor in given:
        _check_name(name)
        short = plain(name)
        if found.setdefault(short, tensor) is not tensor and (wanted is None or short in wanted):
            other = next(n for n, known in given if known is found[short] and plain(n) == short)
            raise two_tensors(name, other, short)
    return found


def chosen(known: Mapping[str, _T], names: Sequence[str]) -> list[_T]:
    """The tensors with these names.  Raises LayoutError if a name is missing."""
    missing = [name for name in names if name not in known]
    if missing:
        raise _core.LayoutError(
            f"{missing[0]}: not among the {len(known)} weights given "
            f"({len(missing)} of {len(names)} missing){_ANEW}"
        )
    return [known[name] for name in names]


class Members(NamedTuple):
    """Ranks that meet in a store of their own, and not in a process group of the trainer.  store: a
    torch.distributed.Store.  rank: of this process.  size: the number of ranks."""

    store: Any
    rank: int
    size: int


@dataclass(frozen=True)
class TrainerLayout:
    """The layout of one trainer rank, and access to its current tensors.

    Buffer i of `layout` on this rank is the trainer parameter `names[i]`.  `tensors()` returns the
    tensors that hold the parameters now, in that order.  `rank` and `ranks` count in `group`
    (None: the default process group, or a single process).  `made_from` has the dtypes, shapes and
    strides of the tensors from which the layout was built; these must not change.  `pick` finds the
    buffers' tensors among weights that the caller gives by name; None looks for equal global names.
    `other_names`: other names of some parameters, used if the weights have none of the usual names.
    `widened`: float32 parameters for which a caller may give an older 16-bit copy.
    """

    layout: _core.Layout
    names: tuple[str, ...]
    tensors: Callable[[], Sequence[Tensor]]
    made_from: _core.TensorTable
    rank: int = 0
    ranks: int = 1
    group: ProcessGroup | Members | None = None
    pick: Callable[[Mapping[str, Tensor]], Sequence[Tensor]] | None = None
    other_names: Mapping[str, str] = field(default_factory=dict)
    widened: Collection[str] = ()
    _known: list[_core.TensorTable] = field(  # the form of the last table
        default_factory=list, init=False, repr=False, compare=False
    )
    # the names of the last weights, and those of them that were taken
    _taken: dict[tuple[str, ...], list[str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # a description keeps its tensors alive, but a layout must not
        object.__setattr__(self, "made_from", self.made_from.form())
        self._known.append(self.made_from)

    def bind(
        self,
        weights: Mapping[str, Tensor] | None = None,
        former: _core.TensorTable | None = None,
    ) -> _core.TensorTable:
        """Describes the tensors that hold the parameters now.  Returns `former`, an earlier table,
        if it is of the same tensors, in the same memory.

        `weights` ({name: tensor}, names with or without leading `module.`) replaces the model's
        own tensors, as slime's weights_getter does; it may hold more tensors than the layout needs.
        A contiguous tensor is copied for the update if the layout has other strides.  The table
        keeps the tensors alive.  Raises LayoutError if a parameter is missing, or if its dtype,
        shape or strides differ from the layout's.
        """
        tensors = self._current(weights)
        table = _core.describe(tensors, self.names, gpu=True, former=former or self._known[0])
        if table is former:
            return table
        index = table.differs(self.made_from)
        if index is not None and weights is not None:
            _core.BufferTable.of(table)  # StateError before torch reads memory that is not there
            tensors = [
                self._fitted(place, tensor, table[place]) for place, tensor in enumerate(tensors)
            ]
            table = _core.describe(tensors, self.names, gpu=True)
            index = table.differs(self.made_from)
        if index is not None:
            _refuse(self.names[index], self.made_from[index], table[index])
        if not table.known:
            self._known[0] = table.form()
        return table

    def _fitted(self, place: int, tensor: Tensor, row: _Row) -> Tensor:
        """Returns a given weight.  If the weight may have another form than the layout, returns a
        copy in the layout's form."""
        form = self.made_from[place]
        narrow = row[1] in ("bfloat16", "float16") and form[1] == "float32"
        if narrow and self.names[place] in self.widened:
            return tensor.detach().float()
        return _laid_out(tensor, row, form)

    def _current(self, weights: Mapping[str, Tensor] | None) -> Sequence[Tensor]:
        if weights is None:
            return self.tensors()
        if isinstance(weights, int | str):
            raise _core.InvalidArgumentError(
                f"weights={weights!r:.130}: pass tensors by global name; to give a version, pass "
                f"version={weights!r:.130}"
            )
        if not isinstance(weights, Mapping):
            raise _core.InvalidArgumentError(
                f"weights: pass tensors by global name, not a {type(weights).__name__}"
            )
        if self.pick is not None:
            return self.pick(weights)
        given = tuple(weights)
        if taken := self._taken.get(given):
            return [weights[name] for name in taken]
        wanted = list(by_plain_name({name: name for name in self.names}, global_name))
        others = self.other_names
        known = by_plain_name(weights, global_name, {*wanted, *others.values()})
        if not any(name in known for name in others):
            wanted = [others.get(name, name) for name in wanted]
        found = chosen(known, wanted)
        self._taken.clear()
        plain = {global_name(name): name for name in given}
        if len(plain) == len(given):  # else tensors with two names may become two tensors
            self._taken[given] = [plain[name] for name in wanted]
        return found


def _laid_out(tensor: Tensor, row: _Row, form: _Row) -> Tensor:
    """Returns the tensor.  If it is contiguous and differs from the layout only in its strides,
    returns a copy with the layout's strides."""
    if row[1:3] != form[1:3] or row[3] == form[3] or not tensor.is_contiguous():
        return tensor
    import torch

    copy = torch.empty_strided(form[2], form[3], dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _refuse(name: str, expected: tuple[object, ...], found: tuple[object, ...]) -> None:
    pairs = zip(expected[1:4], found[1:4], strict=True)
    for what, (old, new) in zip(("dtype", "shape", "strides"), pairs, strict=True):
        if old != new:
            raise _core.LayoutError(f"{name}: {what} {new} != {old} of the layout{_ANEW}")


def from_tensors(
    tensors: Mapping[str, Tensor], *, group: ProcessGroup | None = None
) -> TrainerLayout:
    """The layout of this rank, which holds whole tensors under their Hugging Face names.  Names of
    a transformers model's parameters work, too, if names and shapes tell its checkpoint's names.

    `group`: the ranks that take part in updates (default: all).  Each rank gives its own tensors;
    tensors with the same name must have the same values on all ranks.  Not collective.

    The mapping is read again at every update, so its tensors may be replaced by others of the
    same names, dtypes, shapes and strides.  The tensors must not change until the update is done.
    """
    if not isinstance(tensors, Mapping):
        raise _core.InvalidArgumentError(
            f"{type(tensors).__name__}: pass tensors by name, as dict(m.named_parameters()) gives "
            "them, or a layout, as wsync.megatron.layout makes it"
        )
    given = list(tensors.items())
    names = tuple(name for name, _ in given)
    for name, tensor in given:
        _check_name(name)
        if is_sharded(tensor):
            raise _core.InvalidArgumentError(
                f"{name}: a {type(tensor).__name__} holds its elements on several ranks: "
                "make the layout with wsync.fsdp.layout"
            )
        check_unpartitioned(name, tensor)
    table = _core.describe([tensor for _, tensor in given], names, gpu=True)
    rank, count = position(group)
    wanted = set(names)

    def current() -> Sequence[Tensor]:
        known = dict(tensors)
        if tuple(known) == names:  # as in almost every update
            return list(known.values())
        for name in sorted(known.keys() ^ wanted):
            text = "no longer among the" if name in wanted else "not among the layout's"
            raise _core.LayoutError(f"{name}: {text} tensors{_ANEW}")
        return [known[name] for name in names]

    return TrainerLayout(_layout(names, table, rank), names, current, table, rank, count, group)


def _layout(names: Sequence[str], table: _core.TensorTable, rank: int) -> _core.Layout:
    """A layout with one buffer for each tensor.  If names and shapes tell that transformers has
    renamed or fused tensors, a buffer holds the checkpoint's tensors instead."""
    forms = [table[place][1:4] for place in range(len(names))]
    shapes = {name: shape for name, (_, shape, _) in zip(names, forms, strict=True)}
    known = RuntimeNames.of_shapes(shapes)
    builder = _core.LayoutBuilder(rank)
    if known.family is None:
        groups = [
            group_of(name, TOGETHER) or group_of_parts(name, dtype)
            for name, (dtype, _, _) in zip(names, forms, strict=True)
        ]
        builder.add_tensors(names, table, groups)
        return builder.build()
    for place, (name, (dtype, shape, strides)) in enumerate(zip(names, forms, strict=True)):
        whole = [((0,) * len(shape), shape, (0,) * len(shape))]
        maps = known.maps(name, dtype, shape, whole)
        builder.add_parameter(name, place, dtype, strides, whole, maps)
    return builder.build()


def is_sharded(tensor: object) -> bool:
    """Whether a tensor holds its elements on several ranks: a DTensor or a ShardedTensor."""
    return hasattr(tensor, "placements") or hasattr(tensor, "local_shards")


def check_unpartitioned(name: str, tensor: object) -> None:
    """Raises InvalidArgumentError for a parameter that DeepSpeed's ZeRO-3 has partitioned: between
    passes it is empty, and `ds_shape` has its shape (deepspeed.zero.Init)."""
    whole = getattr(tensor, "ds_shape", None)
    if whole is not None and tuple(getattr(tensor, "shape", ())) != tuple(whole):
        raise _core.InvalidArgumentError(
            f"{name}: DeepSpeed's ZeRO-3 has partitioned it: call wsync within "
            "deepspeed.zero.GatheredParameters, which gathers it"
        )


def position(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) of this process; 0 of 1 without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise _core.InvalidArgumentError("this process is not a member of the group it passed")
    return rank, dist.get_world_size(group)
