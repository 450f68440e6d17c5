"""The items of a mapping that may make its tensors when it is asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from wsync import _core
from wsync.module_tensors import checksum_of
from wsync.module_tensors.places import MemoryPlace, parts_of, places_of

_SMALL_NBYTES: Final = 1 << 20  # of a tensor in host memory that is compared as a whole
_RUNS, _RUN = 128, 8  # of elements that are compared of others
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
    given, places, looks = list[tuple[str, _T]](), list[list[MemoryPlace]](), list[list[int]]()
    for name, tensor in make():
        given.append((name, tensor))
        places.append(places_of(tensor))
        looks.append(_look(tensor, places[-1]))
    for number, (name, tensor) in enumerate(given):
        if places_of(tensor) != places[number]:
            what = "moved or freed it since it gave it"
        elif _look(tensor, places[number]) == looks[number]:
            continue
        elif other := _beside(name, places[number], given, places):
            what = f"written to it since, and gives the same memory as {other}"
        else:
            what = "written to it since it gave it"
        raise _core.LayoutError(
            f"{name}: the mapping has {what}: tensors have to stay as they are until the update is "
            "done"
        )
    return given


def _beside(
    name: str,
    mine: Sequence[MemoryPlace],
    given: Sequence[tuple[str, object]],
    places: Sequence[Sequence[MemoryPlace]],
) -> str:
    """The name of another tensor that has elements in common with one, or ""."""
    pairs = zip(given, places, strict=True)
    meeting = (
        other
        for (other, _), its in pairs
        if other != name and any(one.meets(place) for one in mine for place in its)
    )
    return next(meeting, "")


def _look(tensor: object, places: Sequence[MemoryPlace]) -> list[int]:
    """What is compared of a tensor in these places: a checksum of each part, or of a sample."""
    return [checksum_of(_sample(part)) for part in _readable(tensor)] if places else []


def _sample(tensor: Any) -> Any:
    """Some elements of a tensor, all over it, and at its ends: another one may begin there.  In
    host memory a small tensor itself."""
    import torch

    integers, count = _INTEGERS.get(tensor.element_size()), tensor.numel()
    if integers is None or (tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_NBYTES):
        return tensor
    run = torch.arange(_RUN, device="cpu")
    firsts = torch.arange(_RUNS, device="cpu") * max(count - _RUN, 0) // (_RUNS - 1)
    index = (firsts[:, None] + run).clamp(max=count - 1).to(tensor.device)
    return torch.take(tensor.detach().view(getattr(torch, integers)), index)


def _readable(tensor: object) -> list[Any]:
    """Its parts; none of what cannot be sent, as where a GPU has no memory while an allocator has
    paused: it is refused by name if it is to be."""
    parts = list(parts_of(tensor))
    try:
        _core.BufferTable.of(_core.describe(parts, gpu=True))
    except _core.WsyncError:
        return []
    return parts
