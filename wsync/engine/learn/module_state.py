"""What a module is before load_weights is tried, to put it back."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from wsync._core import LayoutError
from wsync.engine.learn.attributes_touched import touched, watching
from wsync.engine.learn.module_memory import (
    Area,
    ModuleMemory,
    region,
    seen,
    slots,
    usable,
    wrapped_tensors,
)
from wsync.engine.learn.regions import Move

CONTAINERS: Final = frozenset(
    (list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter)
)
_ABSENT: Final = object()
_BOUND: Final = frozenset(("_parameters", "_buffers"))  # Bindings puts these back


class Bindings:
    """What tensors a module's attributes are bound to, to put it back after a trial."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parts = [(slot, dict(slot)) for part in module.modules() for slot in slots(part)]
        bound = (value for _, values in self._parts for value in values.values())
        self._data = [(t, t.detach()) for t in bound if isinstance(t, torch.Tensor) and usable(t)]

    def restore(self) -> list[str]:
        """Binds everything as it was; the names that had been bound to other tensors."""
        changed: list[str] = []
        for slot, values in self._parts:
            for name in [*slot, *(values.keys() - slot.keys())]:
                old, new = values.get(name), slot.get(name)
                if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
                    same = new is old
                else:
                    same = old is not None or name in slot
                if same:
                    continue
                changed.append(name)
                if name in values:
                    slot[name] = old
                else:
                    del slot[name]
        for tensor, data in self._data:
            if seen(tensor) != seen(data):
                changed.append(f"the memory of {tuple(data.shape)}")
                tensor.data = data
        return changed


class PlainAttributes:
    """What the attributes of a module's parts and of their parameters are, but for the parts'
    tensors, and what containers and arrays of numpy among them hold.  What other objects hold is
    not kept.

    Put back is what was touched while that was watched: the rest is what other threads have done.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = list(module.modules())
        parameters = (p for part in parts for p in part._parameters.values() if p is not None)
        owners = {id(owner): owner for owner in (*parts, *parameters)}
        self.touched = touched()
        self._kept = [(owner, vars(owner), dict(vars(owner))) for owner in owners.values()]
        self._contents: dict[int, tuple[Any, Any]] = {}  # containers, and copies of them
        self._arrays: dict[int, tuple[Any, Any]] = {}  # those with memory of their own, as well
        for _, _, values in self._kept:
            self._add(value for name, value in values.items() if name not in _BOUND)

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) in CONTAINERS and id(value) not in self._contents:
                self._contents[id(value)] = value, value.copy()
                self._add(_items(value))
            elif _is_array(value) and value.flags.owndata and value.flags.writeable:
                self._arrays[id(value)] = value, value.copy()

    def restore(self) -> bool:
        """Whether anything had changed."""
        changed = False
        for owner, slot, values in self._kept:
            for name in [*slot, *(values.keys() - slot.keys())]:
                old, new = values.get(name, _ABSENT), slot.get(name, _ABSENT)
                tensors = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
                if new is old or name in _BOUND or tensors:
                    continue
                if not self.touched.was_set(owner, name, new=old is _ABSENT):
                    continue
                changed = True
                if old is _ABSENT:
                    del slot[name]
                else:
                    slot[name] = old
        reached = self._reached()
        for container, content in (self._contents[i] for i in reached & self._contents.keys()):
            if list(map(id, _items(container))) != list(map(id, _items(content))):
                changed = True
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(content)
        for array, content in (self._arrays[i] for i in reached & self._arrays.keys()):
            # of objects these bytes are their identities
            if array.shape != content.shape or array.tobytes() != content.tobytes():
                changed = True
                if array.shape != content.shape:
                    array.resize(content.shape, refcheck=False)
                array[...] = content
        return changed

    def _reached(self) -> set[int]:
        """What attributes that were looked up hold, and what containers among it do."""
        todo = [
            value
            for owner, _, values in self._kept
            for name, value in values.items()
            if id(value) in self._contents or id(value) in self._arrays
            if name == "_modules" or self.touched.was_looked_up(owner, name)
        ]
        found: set[int] = set()
        while todo:
            value = todo.pop()
            if id(value) not in found:
                found.add(id(value))
                todo += _items(self._contents[id(value)][1]) if id(value) in self._contents else ()
        return found


class KeptRegions:
    """Copies, on the host, of parts of a module's memory; as a context it puts them back at the
    end, where that memory is still the module's.

    regions: by area, counted from its start.
    """

    def __init__(self, held: ModuleMemory, regions: Mapping[int, Sequence[Move]]) -> None:
        self._copies: list[tuple[Area, Move, torch.Tensor]] = []
        for number, moves in regions.items():
            area = held.areas[number]
            data = area.bytes()
            for move in moves:
                self._copies.append((area, move, region(data, move).to("cpu", copy=True)))

    def put_back(self) -> None:
        for area, move, data in self._copies:
            with contextlib.suppress(LayoutError):  # its memory is gone
                region(area.bytes(), move).copy_(data)

    def __enter__(self) -> KeptRegions:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


class ModuleState:
    """What a module's attributes are, and, where `values` is set, a copy of its tensors on the
    host.

    Its contexts watch what of the attributes is touched, and put that and the values back.
    """

    def __init__(self, module: torch.nn.Module, *, values: bool) -> None:
        self._bindings, self.plain = Bindings(module), PlainAttributes(module)
        held = ModuleMemory(module) if values else None
        self._regions = KeptRegions(held, held.own_bytes) if held is not None else None
        parts = [part.detach() for _, _, part in wrapped_tensors(module)] if values else []
        self._parts = [(part, part.to("cpu", copy=True)) for part in parts]

    def restore(self) -> None:
        self._bindings.restore()
        self.plain.restore()
        if self._regions is not None:
            self._regions.put_back()
        for part, copy in self._parts:
            part.copy_(copy)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Puts it back at the end."""
        try:
            with watching(self.plain.touched):
                yield
        finally:
            self.restore()

    @contextlib.contextmanager
    def unless_done(self) -> Iterator[None]:
        """Puts it back where the block raises."""
        try:
            with watching(self.plain.touched):
                yield
        except BaseException:
            self.restore()
            raise


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)
