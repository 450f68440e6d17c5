"""Tensors in modules: where they are kept, their dtypes and bytes, and whether two are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from wsync import _core

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module


class ModuleTree:
    """A snapshot of modules' parts and of the names of their tensors.

    Keeps the parts but no tensors, because an engine may replace its weights between updates.
    """

    def __init__(self, roots: Iterable[Module]) -> None:
        parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._children: list[dict[str, Any]] = [part._modules for part in parts]
        tensors = (store for part in parts for store in (part._parameters, part._buffers))
        self._stores: list[dict[str, Any]] = [*self._children, *tensors]
        self._seen = self._see()

    def same(self) -> bool:
        """Whether all parts are still the same objects, with tensors of the same names."""
        return self._see() == self._seen

    def _see(self) -> tuple[object, ...]:
        """Returns the names, their stores, and the parts.  Most stores are empty and left out."""
        full = list(filter(None, self._stores))
        parts = chain.from_iterable(map(dict.values, filter(None, self._children)))
        return list(map(tuple, full)), list(map(id, full)), list(parts)


class Slot(NamedTuple):
    """The place of a tensor: home[key].  `name` has no wrappers' names in it, `path` has them.
    `part`: if a tensor has two names within one part, the first one counts."""

    name: str
    home: dict[str, Any]
    key: str
    path: str
    part: int = 0


class Slots:
    """The places of all tensors; the tensors are read again at every update.

    Args:
        roots: the modules in which `find` looks; the caller may change this list.
        find: returns the current slots.  It is called again when modules were replaced or have
            more tensors, and after a call that failed.

    Raises:
        LayoutError: two tensors have the same name.
    """

    def __init__(self, roots: Sequence[Module], find: Callable[[], Iterable[Slot]]) -> None:
        self._roots, self._find = roots, find
        self._known: list[Module] = []  # the roots at that time
        self._slots: list[tuple[Slot, int]] = []  # with the number of each slot's tensor
        self._tree: ModuleTree | None = None  # in which everything was found
        self.names = self._scan()
        """Names of the distinct tensors, in order."""

    def read(self) -> list[Tensor]:
        """The tensors of `names` as they are now.

        Raises:
            LayoutError: a tensor is gone or new, or a name now has a tensor of its own.
        """
        if self._tree is None or [*self._roots] != self._known or not self._tree.same():
            found = self._scan()
            if found != self.names:
                self._tree = None
                odd = next(iter({*self.names} ^ {*found}), "the order of tensors")
                raise _core.LayoutError(
                    f"{odd}: it has changed since the layout was made: make the layout again"
                )
        tensors: list[Any] = []
        for slot, number in self._slots:
            tensor = slot.home.get(slot.key)
            if number == len(tensors):
                tensors.append(tensor)
            elif tensor is not tensors[number]:
                raise _core.LayoutError(
                    f"{slot.path}: it shared a tensor with {self.names[number]} when the layout "
                    "was made, and has its own now: make the layout again"
                )
        return tensors

    def _scan(self) -> tuple[str, ...]:
        """Finds the slots; returns the names of the distinct tensors."""
        self._tree, self._slots = None, []
        named: dict[str, tuple[Slot, Any]] = {}
        numbers: dict[tuple[int, int], int] = {}  # by part and tensor
        for slot in self._find():
            tensor = slot.home[slot.key]
            first, known = named.setdefault(slot.name, (slot, tensor))
            if known is not tensor:
                raise two_tensors(slot.path, first.path, slot.name)
            number = numbers.setdefault((first.part, id(tensor)), len(numbers))
            self._slots.append((slot, number))
        self._known = [*self._roots]
        self._tree = ModuleTree(self._known)  # after `find`, which may reshard
        names = {number: slot.name for slot, number in reversed(self._slots)}
        return tuple(names[number] for number in range(len(names)))


def homes_of(
    root: Module, *, once: bool = True
) -> Iterator[tuple[Module, dict[str, Any], str, str]]:
    """Yields (module, home, key, path) of every parameter and buffer: home[key] is the tensor.

    once: a module with several paths comes only under the first one.
    """
    for path, module in root.named_modules(remove_duplicate=once):
        for home in (module._parameters, module._buffers):
            for key, tensor in home.items():
                if tensor is not None:
                    yield module, home, key, f"{path}.{key}" if path else key


def two_tensors(one: str, other: str, name: str) -> _core.LayoutError:
    return _core.LayoutError(
        f"{one} and {other}: two tensors, but without their wrappers' names both are {name}"
    )


def dtype_of(name: str) -> dtype:
    """Returns the torch dtype of a layout's dtype, which has the same name.  LayoutError: this
    torch lacks it."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise _core.LayoutError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def name_of(dtype: dtype) -> str:
    """Returns the name that layouts use for a torch dtype; `dtype_of` is the inverse."""
    return str(dtype).removeprefix("torch.")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit by bit."""
    return flat_bytes(one).equal(flat_bytes(other))


def checksum_of(tensor: Tensor) -> int:
    """Returns a checksum of a tensor's values.  Reads them by address, because torch never again
    resizes a storage of which `numpy` has made an array."""
    return _core.checksum(_core.describe([flat_bytes(tensor).cpu()]))


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes, element by element: a view if it is contiguous, else a copy.

    Raises LayoutError if its storage was freed or made smaller.  Raises StateError if an allocator
    has paused its GPU memory; torch itself would try to read it.
    """
    import torch

    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((extent - 1) * step for extent, step in steps)
    held, item = tensor.untyped_storage().nbytes(), tensor.element_size()
    if tensor.numel() and held < (last + 1) * item:
        raise _core.LayoutError(
            f"a tensor of shape {tuple(tensor.shape)} needs {(last + 1) * item} bytes of a storage "
            f"that has {held}: it was freed or made smaller"
        )
    if tensor.is_cuda:
        _core.BufferTable.of(_core.describe([tensor], gpu=True))
    flat = tensor.detach().contiguous().reshape(-1)
    if len(flat) == 1:  # one element may have any stride
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
