"""The items of a mapping that may make its tensors when it is asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from wsync import _core
from wsync.module_tensors import flat_bytes
from wsync.module_tensors.places import parts_of, places_of

_RUNS, _RUN = 128, 8  # of elements that are compared of a tensor on a GPU
_INTEGERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by their bytes

_T = TypeVar("_T")

# of what holds its tensors; a subclass with one of its own may make them
_STORED: Final = (dict.items, OrderedDict.items)


def items_of(tensors: Mapping[str, _T]) -> list[tuple[str, _T]]:
    """All items at once: another thread may change the mapping.

    Raises LayoutError where a mapping that makes its tensors writes to one that it has given
    before, or moves it.
    """
    items = getattr(type(tensors), "items", None)
    if items in _STORED:
        return list(tensors.items())
    if items is None:  # only registered as a Mapping
        return kept(lambda: ((name, tensors[name]) for name in tensors))
    return kept(lambda: tensors.items())


def kept(make: Callable[[], Iterable[tuple[str, _T]]]) -> list[tuple[str, _T]]:
    """Names and tensors, which may be made one after another.

    Raises LayoutError where one was moved or written to when it had been given: it may have been
    made in a buffer that serves others, too, or parameters be lent other values while they are
    given.  torch does not count all that is written, and not by tensor.  So all are compared with
    what they were, large ones by some of their elements.
    """
    looks, given = _Looks(), list[tuple[str, _T]]()
    for name, tensor in make():
        given.append((name, tensor))
        looks.add(tensor)
    change = looks.change()
    if change is None:
        return given
    number, moved = change
    name, tensor = given[number]
    if moved:
        what = "moved or freed it since it gave it"
    elif other := _beside(name, tensor, given):
        what = f"written to it since, and gives the same memory as {other}"
    else:
        what = "written to it since it gave it"
    raise _core.LayoutError(
        f"{name}: the mapping has {what}: tensors have to stay as they are until the update is done"
    )


def _beside(name: str, tensor: object, given: Sequence[tuple[str, object]]) -> str:
    """The name of another tensor that has elements in common with one, or ""."""
    mine = places_of(tensor)
    meeting = (
        other
        for other, it in given
        if other != name and any(one.meets(place) for one in mine for place in places_of(it))
    )
    return next(meeting, "")


class _Look(NamedTuple):
    """What a tensor is: where its parts lie, checksums of those in host memory, and samples of
    those on a GPU.  Nothing of what cannot be sent: it is refused by name if it is to be."""

    places: Sequence[tuple[Any, ...]] = ()
    sums: Sequence[int] = ()
    samples: Sequence[Any] = ()


class _Looks:
    """What tensors are when they are given, to be compared when all have been."""

    def __init__(self) -> None:
        self._tensors: list[object] = []
        self._known: list[_Look] = []
        self._indices: dict[tuple[int, Any], Any] = {}

    def add(self, tensor: object) -> None:
        self._tensors.append(tensor)
        self._known.append(self._look(tensor))

    def change(self) -> tuple[int, bool] | None:
        """(number, whether it lies elsewhere) of a tensor that is not what it was."""
        before, now = self._known, list(map(self._look, self._tensors))
        for number, (known, look) in enumerate(zip(before, now, strict=True)):
            if known[:2] != look[:2]:
                return number, known.places != look.places
        if _same_samples(before, now):
            return None
        each = enumerate(zip(before, now, strict=True))
        return next((n, False) for n, (one, other) in each if not _same_samples([one], [other]))

    def _look(self, tensor: object) -> _Look:
        parts = list(parts_of(tensor))
        try:
            table = _core.describe(parts, gpu=True)
            if table.gpu is not None:
                _core.BufferTable.of(table)  # an allocator may have paused
        except _core.WsyncError:
            return _Look()
        places = [table[number] for number in range(len(table))]
        there = [] if table.gpu is None else [p for p in parts if p.is_cuda and p.numel()]
        return _Look(places, _core.checksums(table), list(map(self._sample, there)))

    def _sample(self, tensor: Any) -> Any:
        """Some elements of a tensor on a GPU, all over it, and at its ends: another one may begin
        there.  They stay there: to wait for each would take long."""
        import torch

        integers, count = _INTEGERS.get(tensor.element_size()), tensor.numel()
        if integers is None:
            return tensor.detach().clone()
        key = count, tensor.device
        if key not in self._indices:
            run = torch.arange(_RUN, device="cpu")
            firsts = torch.arange(_RUNS, device="cpu") * max(count - _RUN, 0) // (_RUNS - 1)
            index = (firsts[:, None] + run).clamp(max=count - 1)
            self._indices[key] = index.to(tensor.device)
        return torch.take(tensor.detach().view(getattr(torch, integers)), self._indices[key])


def _same_samples(before: Sequence[_Look], now: Sequence[_Look]) -> bool:
    """Whether samples of the same tensors are equal to the bit."""
    import torch

    by_device: dict[Any, tuple[list[Any], list[Any]]] = {}
    for place, looks in enumerate((before, now)):
        for sample in (each for look in looks for each in look.samples):
            by_device.setdefault(sample.device, ([], []))[place].append(flat_bytes(sample))
    return all(torch.cat(one).equal(torch.cat(other)) for one, other in by_device.values())
