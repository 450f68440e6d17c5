"""The tensors that a module holds: parameters, buffers and plain attributes, and their memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wsync._core import BufferTable, LayoutError

# (path, dtype, shape, strides in elements, area, byte offset in it)
Fact = tuple[str, str, tuple[int, ...], tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class Area:
    """One storage that tensors of the module lie in."""

    start: int
    end: int
    tensor: torch.Tensor
    path: str

    def view(self, dtype: torch.dtype, offset: int, shape: Any, strides: Any) -> torch.Tensor:
        """Elements at a byte offset; shape and strides in elements."""
        empty = torch.empty(0, dtype=dtype, device=self.tensor.device)
        storage = self.tensor.untyped_storage()
        return empty.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(strides))

    def bytes(self) -> torch.Tensor:
        return self.view(torch.uint8, 0, (self.end - self.start,), (1,))


class Held:
    """What a module holds now.  Areas are numbered in the order of their first tensor.

    Raises LayoutError where tensors share memory in ways that torch does not know of, or have
    lost theirs.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.areas: list[Area] = []
        self.facts: list[Fact] = []
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, int] = {}
        self._parts = [(part, _outline(part)) for part in module.modules()]
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, int, torch.Size]] = []
        for path, slot, name, tensor in _tensors(module):
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
            if tensor.numel() and (not start or _end(tensor) > nbytes):
                raise LayoutError(f"{path}: its memory is gone")
            if not tensor.numel():
                continue
            number = numbers.setdefault(start, len(self.areas))
            if number == len(self.areas):
                self.areas.append(Area(start, start + nbytes, tensor, path))
            dtype = str(tensor.dtype).removeprefix("torch.")
            offset = int(tensor.storage_offset()) * tensor.element_size()
            shape, strides = tuple(tensor.shape), tensor.stride()
            self.facts.append((path, dtype, shape, strides, number, offset))
            self.tensors.append(tensor)
            self._places.append((slot, name, tensor, tensor.data_ptr(), tensor.shape))
        self._order = sorted(range(len(self.areas)), key=lambda i: self.areas[i].start)
        self._starts = [self.areas[i].start for i in self._order]
        for one, two in zip(self._order, self._order[1:], strict=False):
            first, second = self.areas[one], self.areas[two]
            if first.end > second.start:
                raise LayoutError(f"{first.path} and {second.path} share memory of two storages")

    def check_host(self) -> None:
        """Raises LayoutError for tensors that are not in host memory: copies run there alone."""
        for fact, tensor in zip(self.facts, self.tensors, strict=True):
            if tensor.device.type != "cpu":
                raise LayoutError(f"{fact[0]} is on {tensor.device}, copies run on the host")

    def current(self) -> bool:
        """Whether the module holds the very same tensors where they were: what an update asks
        each time, at little cost."""
        return all(_outline(part) == outline for part, outline in self._parts) and all(
            slot.get(name) is tensor and tensor.data_ptr() == address and tensor.shape == shape
            for slot, name, tensor, address, shape in self._places
        )

    def find(self, address: int) -> int:
        """The area of an address, or -1."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return -1
        number = self._order[place]
        return number if address < self.areas[number].end else -1

    def spans(self) -> list[tuple[int, int]]:
        return [(area.start, area.end - area.start) for area in self.areas]

    def table(self) -> BufferTable:
        return BufferTable(self.spans(), self.tensors)

    def name(self, number: int, offset: int) -> str:
        """The tensor that a byte of an area belongs to."""
        found = self.areas[number].path
        for path, dtype, shape, strides, area, start in self.facts:
            item: int = getattr(torch, dtype).itemsize
            reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) * item + item
            if area == number and start <= offset < start + reach:
                found = path
        return found

    def difference(self, facts: list[Fact]) -> str:
        """How the tensors differ from what they were; "" where they only moved."""
        if self.facts == facts:
            return ""
        now = {fact[0]: fact[1:] for fact in self.facts}
        before = {fact[0]: fact[1:] for fact in facts}
        for path, fact in before.items():
            if path not in now:
                return f"{path} is gone"
            if now[path] != fact:
                return f"{path} was {_text(fact)} and is {_text(now[path])}"
        new = next((path for path in now if path not in before), "")
        return f"{new} is new" if new else "the tensors are in another order"


def _text(fact: Any) -> str:
    dtype, shape, strides, area, offset = fact
    return f"{dtype} {shape} with strides {strides} at byte {offset} of storage {area}"


def _end(tensor: torch.Tensor) -> int:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()


def _tensors(
    module: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """(path, where it is bound, under which name, tensor)"""
    for prefix, part in module.named_modules():
        for slot in slots(part):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor) and _usable(tensor):
                    yield (f"{prefix}.{name}" if prefix else name), slot, name, tensor


def _outline(part: torch.nn.Module) -> tuple[int, int, int, list[int]]:
    """Changes when attributes or modules come, go or are replaced by other modules."""
    children = [id(child) for child in part._modules.values()]
    return len(part._parameters), len(part._buffers), len(vars(part)), children


def slots(part: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps tensors."""
    return part._parameters, part._buffers, vars(part)


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


class Kept:
    """What a module's attributes are bound to, to put it back after a trial."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = [
            (slot, {n: t for n, t in slot.items() if isinstance(t, torch.Tensor) or t is None})
            for part in module.modules()
            for slot in slots(part)
        ]
        self._data = [
            (tensor, tensor.detach())
            for _, tensors in self._parts
            for tensor in tensors.values()
            if isinstance(tensor, torch.Tensor)
        ]

    def restore(self) -> list[str]:
        """Binds everything as it was; the names that had been bound to other tensors."""
        changed: list[str] = []
        for slot, tensors in self._parts:
            for name, value in list(slot.items()):
                if isinstance(value, torch.Tensor) and value is not tensors.get(name):
                    changed.append(name)
                    if name in tensors:
                        slot[name] = tensors[name]
                    else:
                        del slot[name]
            for name in tensors.keys() - slot.keys():
                changed.append(name)
                slot[name] = tensors[name]
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr() or tensor.stride() != data.stride():
                changed.append(f"the memory of {tuple(data.shape)}")
                tensor.data = data
        return changed
