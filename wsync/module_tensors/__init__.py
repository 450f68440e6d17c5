"""Where modules keep their tensors, and what tensors are: dtypes, bytes, whether two are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from wsync import _core

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module


class ModuleTree:
    """The parts of modules, and the names of their tensors, at one moment.

    Keeps the parts, but no tensors: an engine may replace its weights between updates.
    """

    def __init__(self, roots: Iterable[Module]) -> None:
        parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._children: list[dict[str, Any]] = [part._modules for part in parts]
        tensors = (store for part in parts for store in (part._parameters, part._buffers))
        self._stores: list[dict[str, Any]] = [*self._children, *tensors]
        self._seen = self._see()

    def same(self) -> bool:
        """Whether all parts are the same objects, with tensors of the same names."""
        return self._see() == self._seen

    def _see(self) -> tuple[object, ...]:
        """Names, in which stores they are, and parts.  Most stores are empty, and passed over."""
        full = list(filter(None, self._stores))
        parts = chain.from_iterable(map(dict.values, filter(None, self._children)))
        return list(map(tuple, full)), list(map(id, full)), list(parts)


class Slot(NamedTuple):
    """home[key] is a tensor; `name` is the one that it has without wrappers, `path` with them.
    `part`: within one, a tensor of two names goes by the first."""

    name: str
    home: dict[str, Any]
    key: str
    path: str
    part: int = 0


class Slots:
    """The places of all tensors, which are read again at every update.

    Args:
        roots: the modules in which `find` looks; a list of the caller's may change.
        find: the slots there are now; it is asked again when modules were replaced, or
            have more tensors, and after it was asked in vain.

    Raises:
        LayoutError: two tensors have the same name.
    """

    def __init__(self, roots: Sequence[Module], find: Callable[[], Iterable[Slot]]) -> None:
        self._roots, self._find = roots, find
        self._known: list[Module] = []  # of the roots
        self._slots: list[tuple[Slot, int]] = []  # and the number of the tensor that is there
        self._tree: ModuleTree | None = None  # that all of it was found in
        self.names = self._scan()
        """Of the distinct tensors, in order."""

    def read(self) -> list[Tensor]:
        """The tensors of `names` as they are now.

        Raises:
            LayoutError: one is gone or new, or is no longer the one of all its names.
        """
        if self._tree is None or [*self._roots] != self._known or not self._tree.same():
            found = self._scan()
            if found != self.names:
                self._tree = None
                odd = next(iter({*self.names} ^ {*found}), "the order of tensors")
                raise _core.LayoutError(
                    f"{odd}: differs since the layout was made: make the layout anew"
                )
        tensors: list[Any] = []
        for slot, number in self._slots:
            tensor = slot.home.get(slot.key)
            if number == len(tensors):
                tensors.append(tensor)
            elif tensor is not tensors[number]:
                raise _core.LayoutError(
                    f"{slot.path}: was one tensor with {self.names[number]} when the layout "
                    "was made, and is another now: make the layout anew"
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
    """(module, home, key, path) of every parameter and buffer: home[key] is the tensor.

    once: a module that has several paths goes by the first.
    """
    for path, module in root.named_modules(remove_duplicate=once):
        for home in (module._parameters, module._buffers):
            for key, tensor in home.items():
                if tensor is not None:
                    yield module, home, key, f"{path}.{key}" if path else key


def two_tensors(one: str, other: str, name: str) -> _core.LayoutError:
    return _core.LayoutError(
        f"{one} and {other}: two tensors, but without their wrappers both are {name}"
    )


def dtype_of(name: str) -> dtype:
    """The torch dtype of a layout's dtype, whose name is torch's; LayoutError where this torch has
    none."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise _core.LayoutError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def name_of(dtype: dtype) -> str:
    """What a layout calls a torch dtype; `dtype_of` is the way back."""
    return str(dtype).removeprefix("torch.")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal to the bit."""
    return flat_bytes(one).equal(flat_bytes(other))


def checksum_of(tensor: Tensor) -> int:
    """A checksum of a tensor's values.  By its address: torch resizes no storage any more of which
    `numpy` has made an array."""
    return _core.checksum(_core.describe([flat_bytes(tensor).cpu()]))


def flat_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, element by element: itself if it is contiguous, else a copy.

    Raises LayoutError where its storage was freed or made smaller, and StateError where a GPU has
    no memory while an allocator has paused: torch would read there all the same.
    """
    import torch

    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((extent - 1) * step for extent, step in steps)
    held, item = tensor.untyped_storage().nbytes(), tensor.element_size()
    if tensor.numel() and held < (last + 1) * item:
        raise _core.LayoutError(
            f"a tensor of {tuple(tensor.shape)} needs {(last + 1) * item} bytes of a storage that "
            f"has {held}: it was freed or made smaller"
        )
    if tensor.is_cuda:
        _core.BufferTable.of(_core.describe([tensor], gpu=True))
    flat = tensor.detach().contiguous().reshape(-1)
    if len(flat) == 1:  # which may have any stride
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
