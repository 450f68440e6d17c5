"""What a module is before load_weights is tried, to put it back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

import torch

from wsync._core import LayoutError
from wsync.engine.learn.attribute_watch import watch, watching
from wsync.engine.learn.forms_of_values import ABSENT, storages_of, tensors_of
from wsync.engine.learn.kept_contents import Content, content_of
from wsync.engine.learn.module_memory import (
    CACHE_NBYTES,
    Area,
    ModuleMemory,
    region,
    seen,
    slots,
    usable,
    wrapped_tensors,
)
from wsync.engine.learn.regions import Move
from wsync.engine.learn.watched_writes import BeforeWrites
from wsync.machine.error_text import error_text
from wsync.machine.sent_memory import is_sent
from wsync.module_tensors.names_in_messages import listed

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


class NotPutBackError(Exception):
    """A module keeps what load_weights made of values that it was tried with."""


class PlainAttributes:
    """What the attributes of a module's parts and of their tensors are, but for the parts' tensors,
    and what they hold, as far as `content_of` knows it.

    Put back is what was touched while that was watched: the rest is what other threads have done.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = dict(module.named_modules())
        owners: dict[int, tuple[str, Any]] = {
            id(part): (path, part) for path, part in parts.items()
        }
        for path, _, name, tensor in tensors_of(parts):
            owners.setdefault(id(tensor), (f"{path}.{name}", tensor))
        self.watch = watch()
        self._kind = type(module).__name__
        self._kept = [(path, o, vars(o), dict(vars(o))) for path, o in owners.values()]
        storages, found = storages_of(parts), dict[int, Content]()  # by the identities of values
        todo = [
            value
            for *_, values in self._kept
            for name, value in values.items()
            if name not in _BOUND
        ]
        while todo:
            value = todo.pop()
            content = None if id(value) in found else content_of(value, storages)
            if content is not None:
                found[id(value)] = content
                todo += content.inside()
        # that a trainer's memory was written to is an error, which is not to be hidden
        own = [not sent for sent in is_sent(content.span() for content in found.values())]
        self._contents = dict(itertools.compress(found.items(), own))

    def restore(self) -> bool:
        """Whether anything had changed.  NotPutBackError, when all else is put back, where a value
        does not hold what it did."""
        changed = False
        for _, owner, slot, values in self._kept:
            for name in [*slot, *(values.keys() - slot.keys())]:
                old, new = values.get(name, ABSENT), slot.get(name, ABSENT)
                if new is old or _is_bound(owner, name, old, new):
                    continue
                if not self.watch.was_changed(owner, name, new=old is ABSENT):
                    continue
                changed = True
                if old is ABSENT:
                    del slot[name]
                else:
                    slot[name] = old
        left: dict[str, str] = {}
        for content, name in self._reached():
            try:
                changed = content.put_back() or changed
            except Exception as error:
                left.setdefault(name, error_text(error))
        if left:
            raise NotPutBackError(
                f"{listed(left)}: of {self._kind}, keeps what load_weights made of values that it "
                f"was tried with, and cannot be put back ({next(iter(left.values()))}): nothing is "
                "loaded by that; make the engine anew, with a load_weights that can be undone"
            )
        return changed

    def _reached(self) -> Iterator[tuple[Content, str]]:
        """What attributes that were looked up hold, and what that holds; and their names."""
        todo = [
            (value, f"{path}.{name}".lstrip("."))
            for path, owner, _, values in self._kept
            for name, value in values.items()
            if id(value) in self._contents
            if name == "_modules" or self.watch.was_looked_up(owner, name)
        ]
        seen: set[int] = set()
        while todo:
            value, name = todo.pop()
            content = self._contents.get(id(value))
            if content is not None and id(value) not in seen:
                seen.add(id(value))
                todo += [(each, name) for each in content.inside()]
                yield content, name


def _is_bound(owner: Any, name: str, *values: Any) -> bool:
    """Whether it is for Bindings to put that attribute back."""
    if not isinstance(owner, torch.nn.Module):
        return False
    return name in _BOUND or any(isinstance(value, torch.Tensor) for value in values)


class KeptRegions:
    """Copies, on the host, of parts of a module's memory, to put them back where that memory is
    still the module's.  Of caches (ModuleMemory.caches) that is made when torch is about to write
    there, and until then only checksums: one that is written to all the same cannot be put back.

    regions: by area, counted from its start.
    """

    def __init__(self, held: ModuleMemory, regions: Mapping[int, Sequence[Move]]) -> None:
        self._held, self._regions = held, regions
        self._copies: list[tuple[Area, Move, torch.Tensor]] = []
        self._sums = held.sums_of({n: regions[n] for n in held.caches & regions.keys()})
        copied = held.awake(regions.keys() - held.caches)
        asleep = regions.keys() - self._sums.keys() - set(copied)
        self._asleep = {held.areas[number].start for number in asleep}
        self._uncopied = {held.areas[number].start: number for number in self._sums}
        self._lost: list[str] = []  # caches that were written to before a copy was to be made
        for number in copied:
            self._copy(number)

    def _copy(self, number: int) -> None:
        area = self._held.areas[number]
        data = area.bytes()
        for move in self._regions[number]:
            self._copies.append((area, move, region(data, move).to("cpu", copy=True)))

    def _copy_before(self, tensor: torch.Tensor) -> None:
        start = tensor.untyped_storage().data_ptr() if usable(tensor) else 0
        if start not in self._uncopied:
            return
        number = self._uncopied.pop(start)
        with contextlib.suppress(LayoutError):  # the module has other memory there
            if not self._changed(number):
                self._copy(number)
                return
        self._lost.append(self._held.areas[number].path)

    def _changed(self, number: int) -> bool:
        """Whether a cache was written to that is not copied."""
        sums = self._held.sums_of({number: self._regions[number]})
        return sums.get(number) != self._sums[number]

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Around what may write to them."""
        return BeforeWrites(self._copy_before) if self._uncopied else contextlib.nullcontext()

    @property
    def unwritten(self) -> Set[int]:
        """Where the caches start that were not seen to be written to, and what has no memory."""
        return self._uncopied.keys() | self._asleep

    def restore(self) -> None:
        """NotPutBackError, when all else is put back, where that cannot be."""
        lost = list(self._lost)
        for area, move, data in self._copies:
            with contextlib.suppress(LayoutError):  # its memory is gone
                region(area.bytes(), move).copy_(data)
        for number in self._uncopied.values():
            with contextlib.suppress(LayoutError):
                if self._changed(number):
                    lost.append(self._held.areas[number].path)
        if lost:
            raise NotPutBackError(
                f"{listed(lost)}: of {type(self._held.parts['']).__name__}, was written to by "
                "means that cannot be seen while load_weights was tried, and is not copied before, "
                f"as it has over {CACHE_NBYTES >> 20} MiB and is no parameter or buffer: nothing "
                "is loaded by that; make the engine anew, with a buffer there"
            )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Puts them back at the end."""
        try:
            with self.watched():
                yield
        finally:
            self.restore()


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

    @property
    def unwritten(self) -> Set[int]:
        """As of KeptRegions."""
        return self._regions.unwritten if self._regions is not None else frozenset()

    def restore(self) -> None:
        """NotPutBackError, when all else is put back, as of PlainAttributes."""
        self._bindings.restore()
        try:
            self.plain.restore()
        finally:
            for part, copy in self._parts:
                part.copy_(copy)
            if self._regions is not None:
                self._regions.restore()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        watched = contextlib.nullcontext() if self._regions is None else self._regions.watched()
        with watching(self.plain.watch), watched:
            yield

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Puts it back at the end."""
        try:
            with self._watched():
                yield
        finally:
            self.restore()

    @contextlib.contextmanager
    def unless_done(self) -> Iterator[None]:
        """Puts it back where the block raises."""
        try:
            with self._watched():
                yield
        except BaseException:
            self.restore()
            raise
