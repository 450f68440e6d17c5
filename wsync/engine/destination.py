"""Where tensors that a trainer delivers go in a module, by name.

What lies there afterwards has to be what the trainer has under every name.  So no byte belongs to
two tensors (Layout.check_apart), names that stand for one tensor (a tied head) may all be
delivered if they bring the same bytes, and nothing is copied to memory that is not the module's.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from wsync._core import (
    BufferTable,
    Layout,
    LayoutBuilder,
    LayoutError,
    StateError,
    TensorTable,
    WsyncError,
    describe,
)
from wsync.families.runtime_names import RuntimeNames
from wsync.module_tensors import dtype_of, same_bytes
from wsync.module_tensors.held import Seen, bound_tensors, parts_in_memory, seen, usable
from wsync.module_tensors.names_in_messages import listed, unfused
from wsync.module_tensors.tree import ModuleTree


class MissingError(LayoutError):
    """The trainer does not deliver what an engine would go on calling updated."""


class LoadTarget(Protocol):
    """What is filled for one update."""

    def layout(self) -> Layout:
        """Where each tensor goes."""

    def buffers(self) -> BufferTable:
        """The memory that the layout's buffers are."""

    def complete(self) -> None:
        """Does what is left when every byte has come, and counts the copies as writes, which torch
        has not seen: caches go by tensors' versions.  LayoutError: this cannot be served."""

    def check_places(self) -> None:
        """StateError: a tensor is not where it was any more."""


class HeldMemory:
    """The parameters and buffers that a module has at one moment, and where they lie.  Keeps that
    memory: nothing else can come to lie there.

    former: a snapshot of the module, to save another one where it still holds.
    """

    def __init__(self, module: torch.nn.Module, former: ModuleTree | None = None) -> None:
        if former is None or former.tensors() is None:
            former = ModuleTree([module])
        self.snapshot = former
        self._module = module
        tensors = self._tensors()
        self._table: TensorTable | None = None
        self._seen: list[list[Seen]] = []
        self._memory: list[torch.UntypedStorage] = []
        try:
            self._table = describe(tensors, gpu=True)
        except WsyncError:  # some are wrappers around others, or lie nowhere or on another device
            parts = list(map(_parts, tensors))
            self._memory = [part.untyped_storage() for each in parts for part in each]
            self._seen = [list(map(seen, each)) for each in parts]

    def check(self) -> None:
        """StateError: the module has other tensors by now, or has them elsewhere."""
        tensors = self._tensors()
        if self._table is not None:
            place = self._table.moved(tensors)
        else:
            now = [list(map(seen, _parts(each))) for each in tensors]
            place = next((n for n, each in enumerate(self._seen) if now[n] != each), None)
        if place is not None:
            raise StateError(
                f"{self._name(tensors[place])}: its memory was replaced while the update ran"
            )

    def _tensors(self) -> list[torch.Tensor]:
        tensors = self.snapshot.tensors()
        if tensors is None:
            raise StateError("a tensor of the module was replaced while the update ran")
        return tensors

    def _name(self, tensor: torch.Tensor) -> str:
        named = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
        return next((name for name, each in named if each is tensor), "a tensor of the module")


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part for _, part in parts_in_memory("", tensor)]


class OtherName(NamedTuple):
    """A further name that a tensor is delivered under; `first` is the place of its first one."""

    name: str
    first: int
    tensor: torch.Tensor


class Destination:
    """Tensors to fill for one update, and the names that they are delivered under.

    Keeps the memory of all of them: it is there until the last copy has run, whatever the module
    is bound to by then.

    twins: each gets memory of its own, which `complete` compares.  snapshot: of the module that
    the tensors are found in by name.  former: the form of the table of these tensors in another
    one, where that has no twins.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        twins: Sequence[OtherName] = (),
        snapshot: ModuleTree | None = None,
        former: TensorTable | None = None,
    ) -> None:
        self.snapshot = snapshot
        self._held = (snapshot.tensors() if snapshot is not None else None) or []
        self.names = list(names)
        self.tensors = list(tensors)
        self.twins = list(twins)
        # what a twin brings, and the memory that it is compared with
        self._copies = [
            (torch.empty_like(tensors[twin.first]), tensors[twin.first].detach()) for twin in twins
        ]
        self._every = [*names, *(twin.name for twin in twins)]
        self.table = describe(self._targets(), self._every, gpu=True, former=former)

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        delivered: Mapping[str, tuple[int, ...]],
        ignore: frozenset[str] = frozenset(),
    ) -> Destination:
        """The tensors of a module of these names.  delivered: shapes by name; ignore: names that
        may be unknown to the module, or missing.

        Raises:
            MissingError: a tensor of the module is not delivered.
            LayoutError: something else does not fit; the text names it.
        """
        who = type(module).__name__
        snapshot = ModuleTree([module])
        state = state_of(module)
        unknown = delivered.keys() - state.keys() - ignore
        if unknown:
            raise LayoutError(f"{listed(unknown)}: not in {who}{unfused(unknown)}")
        names: list[str] = []
        twins: list[OtherName] = []
        missing: list[str] = []
        for group in aliases(state):
            given = [name for name in group if name in delivered]
            if not given and state[group[0]].numel() and not ignore.intersection(group):
                missing.append(group[0])
            for name in given:
                if tuple(state[name].shape) != delivered[name]:
                    raise LayoutError(
                        f"{name}: shape {delivered[name]} delivered, {tuple(state[name].shape)} "
                        f"in {who}"
                    )
            if given and state[given[0]].numel():
                twins += [OtherName(name, len(names), state[name]) for name in given[1:]]
                names.append(given[0])
        if missing:
            raise MissingError(f"{listed(missing)}: in {who}, not delivered")
        tensors = [state[name] for name in names]
        check_owned(module, names, tensors)
        return cls(names, tensors, twins, snapshot)

    def layout(self) -> Layout:
        """One buffer for every name."""
        builder = LayoutBuilder()
        builder.add_tensors(self._every, self.table)
        return builder.build()

    def buffers(self) -> BufferTable:
        return BufferTable.of(self.table)

    def _targets(self) -> list[torch.Tensor]:
        return [*self.tensors, *(copy for copy, _ in self._copies)]

    def check_places(self) -> None:
        """StateError: a tensor is not where it was any more, or not in the module."""
        place = self.table.moved(self._targets())
        moved = [] if place is None else [self._every[place]]
        moved += [n for n, first, twin in self.twins if seen(twin) != seen(self.tensors[first])]
        if moved:
            raise StateError(f"{moved[0]}: its memory was replaced while the update ran")
        held = self._held if self.snapshot is None else self.snapshot.tensors()
        if held is None or not all(map(operator.is_, held, self._held)):
            raise StateError("a tensor of the module was replaced while the update ran")

    def complete(self) -> None:
        """LayoutError: two names of one tensor have brought different values."""
        increment_version([*self.tensors, *(twin.tensor for twin in self.twins)])
        for (name, index, _), (copy, first) in zip(self.twins, self._copies, strict=True):
            if not same_bytes(copy, first):
                raise LayoutError(
                    f"{name} and {self.names[index]} are one tensor of the module, and {name} "
                    "brings other values"
                )


class Boxes:
    """A worker's own layout, filled for one update: buffer i is tensors[i], whose memory is kept
    until the last copy has run.

    form: of tensors that the layout has been compared with, and that these have to be like; else
    the layout is compared with these, which is LayoutError where a box is none of its tensor.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], form: TensorTable | None = None
    ) -> None:
        self._layout = layout
        self._tensors = list(tensors)
        self.table = describe(self._tensors, gpu=True)
        if form is None:
            _check_boxes(layout, self.table)
        else:
            self._check_form(form)

    def layout(self) -> Layout:
        return self._layout

    def buffers(self) -> BufferTable:
        return BufferTable.of(self.table)

    def _check_form(self, form: TensorTable) -> None:
        """StateError: a tensor has not the dtype, shape or strides that it had."""
        if (place := self.table.differs(form)) is not None:
            tensor = self._tensors[place]
            raise StateError(
                f"tensor {place}: {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}, and not what the layout was made for"
            )

    def complete(self) -> None:
        """Each element has one name."""
        increment_version(self._tensors)

    def check_places(self) -> None:
        """StateError: a tensor is not where it was any more."""
        if (place := self.table.moved(self._tensors)) is not None:
            raise StateError(f"tensor {place}: its memory was replaced while the update ran")


def _check_boxes(layout: Layout, table: TensorTable) -> None:
    """LayoutError, by name, where a box has another dtype than its tensor, or its strides lead
    elsewhere than to the tensor's elements in their order.  Tensors of uint8 are raw memory, and
    contiguous ones may hold a box in any order of its axes."""
    rows = [table[place] for place in range(len(table))]
    grids = [_grid(*row[2:4]) for row in rows]
    for index in range(layout.tensor_count):
        name, dtype, *_ = layout.tensor(index)
        for shard in layout.shards(index):
            _, held, shape, strides, _ = rows[shard.buffer]
            if held not in (dtype, "uint8"):
                raise LayoutError(
                    f"{name}: {dtype} in the layout, {held} in its tensor {shard.buffer}"
                )
            size = dtype_of(held).itemsize
            axes = [(count, step) for count, step in zip(shard.extent, shard.strides, strict=True)]
            if held != dtype:
                axes.append((dtype_of(dtype).itemsize, 1))
            if not _leads_along(grids[shard.buffer], size, shard.offset, axes):
                raise LayoutError(
                    f"{name}: a box of {list(shard.extent)} with strides {list(shard.strides)} at "
                    f"{shard.offset}, in bytes, is none of its tensor {shard.buffer}: {held} "
                    f"{list(shape)} with strides {[size * stride for stride in strides]}"
                )


def _grid(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """A tensor's axes (size, stride), in its order, those that are one in memory in one."""
    grid: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if grid and grid[-1][1] == count * stride:
            grid[-1] = (grid[-1][0] * count, stride)
        elif count != 1:
            grid.append((count, stride))
    return grid


def _leads_along(
    grid: Sequence[tuple[int, int]], size: int, offset: int, axes: Sequence[tuple[int, int]]
) -> bool:
    """Whether a box begins at an element of a tensor and goes on to further ones alone.

    grid: of the tensor, whose elements have `size` bytes.  axes: (extent, byte stride) of the box.
    """
    if any(count == 0 for count, _ in axes):
        return True
    if any(stride == 0 for _, stride in grid):
        return False
    last: dict[int, int] = {}  # along each axis of the tensor
    for place, (_, stride) in sorted(enumerate(grid), key=lambda item: -item[1][1]):
        last[place], offset = divmod(offset, size * stride)
    if offset:
        return False
    place = 0
    for count, step in axes:
        if count == 1:
            continue
        while place < len(grid):
            steps, rest = divmod(step, size * grid[place][1])
            if not rest and last[place] + (count - 1) * steps < grid[place][0]:
                last[place] += (count - 1) * steps
                break
            place += 1
        else:
            return False
    return all(last[place] < count for place, (count, _) in enumerate(grid))


def check_owned(
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> None:
    """A state_dict may give copies: what is written there is lost."""
    held = itertools.chain(module.parameters(), module.buffers())
    identities = set(map(id, held))
    if all(id(tensor) in identities for tensor in tensors):
        return
    places = {tensor.untyped_storage().data_ptr() for *_, tensor in bound_tensors(module)}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.untyped_storage().data_ptr() not in places:
            raise LayoutError(
                f"{name}: {type(module).__name__}.state_dict gives a copy, or memory that is no "
                "parameter, buffer or attribute of the module"
            )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers themselves: their storage may be swapped under them.  What
    transformers has fused is views of it, by the names of the model's checkpoint."""
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    known = RuntimeNames.of_config(getattr(module, "config", None))
    return {
        plain: view
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        for plain, view in known.views(name, value).items()
    }


def aliases(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names grouped by the tensor that they stand for, in order."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        key = seen(tensor) if usable(tensor) and tensor.numel() else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())
