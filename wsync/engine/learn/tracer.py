"""Watches what a loader does to tensors, without doing it.

Under a Tracer, data that comes from the model's stand-ins (wsync.engine.learn.dummy_weights) is not
moved: each movement is written down, and followed through temporaries (cat, clone, index, casts)
until it reaches a tensor of the module.  What is no movement taints what it computes.  Values of
the model's tensors are not there to be looked at; which of the module's were looked at is noted.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wsync.engine.learn.attribute_watch import watching
from wsync.engine.learn.dummy_weights import MadeUpModel, there, weak
from wsync.engine.learn.module_memory import ModuleMemory, bytes_of, whole
from wsync.engine.learn.movements import HANDLERS
from wsync.engine.learn.operators import (
    COPIES,
    FILLS,
    SHAPES,
    VIEWS,
    are_lists,
    arguments_read,
    as_cat,
    changed_arguments,
    index_of_put,
    parts_of_cat,
    parts_written,
    tensors_in,
)
from wsync.engine.learn.regions import Move, UnexpressedError, compose, in_one_run, without
from wsync.engine.learn.thread_state import pushed
from wsync.engine.learn.time_limit import check
from wsync.engine.learn.watched_pools import watched_pools
from wsync.engine.learn.writes import (
    COMPUTED,
    CONSTANT,
    HELD,
    SOURCE,
    Write,
    byte_strides,
    continued,
    found_by,
    in_memory,
    last_written,
    move_to,
    place_of,
)
from wsync.module_tensors import checksum_of

_aten = torch.ops.aten
# methods that are no operators, and let values out
_LETS_OUT = {
    *("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__repr__", "__format__"),
    *("apply_", "map_", "map2_"),
}
# those that hand out the memory itself; of a module's tensors, loaders ask who shares it
_HANDS_OUT = {"data_ptr", "const_data_ptr", "untyped_storage", "storage", "share_memory_"}


class ReadsValuesError(BaseException):
    """The loader looked at values of the weights.  No loader's `except Exception` catches it."""


@dataclass(slots=True)
class _Temporary:
    """Memory that is neither the model's nor the module's."""

    reference: StorageWeakRef
    writes: list[Write] = field(default_factory=list)
    origins: list[Write] = field(default_factory=list)  # the same while everything is computed


@dataclass(slots=True)
class Outside:
    """Part of a storage, in bytes, that is neither the model's nor the module's and was read."""

    reference: StorageWeakRef
    low: int
    high: int

    def sum(self) -> int | None:
        """The checksum of its values now; None where it is gone."""
        storage = self._storage()
        if storage is None or storage.nbytes() < self.high:
            return None
        return checksum_of(bytes_of(storage, self.low, self.high))

    def holds(self, other: Outside) -> bool:
        """Whether a part of the same storage lies in this one."""
        return self.low <= other.low and other.high <= self.high

    def start(self) -> int:
        """Where its storage starts; 0 where it is gone."""
        storage = self._storage()
        return 0 if storage is None else storage.data_ptr()

    def _storage(self) -> torch.UntypedStorage | None:
        if not there(self.reference):
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every write to the tensors of a module.

    writes: by area of `held`, in order.
    looked: by area, what was looked at before it was written, as moves from and to itself.
    outside: tensors of neither the module nor the model that were read, by storage; and parts of
    the module's storages that are no tensors of it, by where they start as well.
    opaque: computes everything, and says only what is written, not from where.
    """

    def __init__(
        self, held: ModuleMemory, model: MadeUpModel, *, opaque: frozenset[str] = frozenset()
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[list[Write]] = [[] for _ in held.areas]
        self.looked: dict[int, set[Move]] = {}
        self.refused: frozenset[str] = frozenset()
        self.outside: dict[tuple[int, int], Outside] = {}
        self.elsewhere = False  # another thread that the loader started works on such tensors
        self.late = False  # a task of a pool has not ended before the next one
        self.ended = False  # threads that go on are not traced any more
        self._turn = threading.RLock()  # of the threads that are traced then
        self._held = held
        self._model = model
        self._opaque = opaque
        self._offsets = [offset for _, _, _, offset, _ in model.tensors]
        self._temporaries: dict[int, _Temporary] = {}
        self._changed: dict[int, StorageWeakRef] = {}  # storages outside that were written to
        self._clock = 0
        self._glances = _Glances(self)

    def __enter__(self) -> Any:
        self._glances.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._glances.__exit__(*raised)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch would wrap around every call costs more than the call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.ended:
            return func(*args, **(kwargs or {}))
        check()
        with self._turn:
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._clock += 1
        packet = func.overloadpacket
        if func.is_view or packet in VIEWS or packet in SHAPES:
            return func(*args, **kwargs)
        if packet is _aten._foreach_copy_:
            targets, sources, *rest = args
            for pair in zip(targets, sources, strict=True):
                self._dispatch(_aten.copy_.default, (*pair, *rest), kwargs)
            return None
        if packet.__name__.startswith("_foreach_") and are_lists(args):
            return self._each(func, args, kwargs)
        tensors = tensors_in((args, kwargs))
        changed = changed_arguments(func, args, kwargs)
        copies = packet in COPIES
        for tensor in changed:
            self._note_changed(tensor)
        for tensor in tensors:
            if not copies or all(tensor is not other for other in changed):
                self.read_outside(tensor)
        handler = None if self._opaque or "out" in kwargs else HANDLERS.get(packet)
        try:
            if handler is not None:
                return handler(self, func, *args, **kwargs)
        except UnexpressedError:
            pass  # a movement of too many parts is as good as a computation
        return self._other(func, args, kwargs, changed)

    def _each(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator on lists, for one tensor after another: each has values of its own."""
        count = len(args[0])

        def part(value: Any, place: int) -> Any:
            lists = isinstance(value, list | tuple) and len(value) == count
            return [value[place]] if lists else value

        answers = [
            self._dispatch(
                func,
                [part(value, place) for value in args],
                {name: part(value, place) for name, value in kwargs.items()},
            )
            for place in range(count)
        ]
        return None if answers[0] is None else [each for answer in answers for each in answer]

    def read_outside(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that others may change when the load is over."""
        if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
            return
        place = tensor.data_ptr()
        if self._source(place):
            return
        read = place_of(tensor)
        area = self._held.find(place)
        if area < 0:
            self._note_outside(tensor, read, -1)
            return
        for part in self._strays(area, read):
            self._note_outside(tensor, part, part.destination)

    def _note_outside(self, tensor: torch.Tensor, read: Move, part: int) -> None:
        storage = tensor.untyped_storage()
        low, high = (address - storage.data_ptr() for address in read.span())
        key = storage._cdata, part
        if key not in self.outside:
            self.outside[key] = Outside(weak(tensor), low, high)
        known = self.outside[key]
        known.low, known.high = min(known.low, low), max(known.high, high)

    def _strays(self, area: int, read: Move) -> list[Move]:
        """What of a read is no tensor of the module, though it lies in a storage of one, and was
        not written by this load."""
        start = self._held.areas[area].start
        low, high = read.span()
        if in_one_run(self._held.own_bytes[area], low - start, high - start):
            return []
        known = [whole(fact, start) for fact in self._held.facts if fact[4] == area]
        rest = [read]
        try:
            for move in (*known, *(write.move for write in self.writes[area])):
                rest = [part for each in rest for part in without(each, move)]
        except UnexpressedError:
            return [read]
        return rest

    # -- what memory is

    def _source(self, address: int) -> bool:
        return 0 <= address - self._model.address < self._model.nbytes

    def name_at(self, address: int) -> str:
        place = bisect.bisect_right(self._offsets, address - self._model.address) - 1
        return self._model.tensors[place][0]

    def _temporary(self, tensor: torch.Tensor) -> _Temporary:
        identity = tensor.untyped_storage()._cdata
        if identity not in self._temporaries:
            # the reference keeps the identity from being used again
            self._temporaries[identity] = _Temporary(weak(tensor))
        return self._temporaries[identity]

    def _written(self, tensor: torch.Tensor) -> list[Write]:
        """What was written to the memory of a tensor."""
        area = self._held.find(tensor.data_ptr())
        if area >= 0:
            return self.writes[area]
        found = self._temporaries.get(tensor.untyped_storage()._cdata)
        return [] if found is None else found.writes

    def symbolic(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are not in its memory while recording."""
        if tensor.numel() == 0:
            return False
        held, writes = self.held(tensor), self._written(tensor)
        return self._source(tensor.data_ptr()) or any(held or w.kind != CONSTANT for w in writes)

    def held(self, tensor: torch.Tensor) -> bool:
        """Whether it is the module's."""
        return tensor.numel() > 0 and self._held.find(tensor.data_ptr()) >= 0

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether its content is followed, not looked at."""
        return self.symbolic(tensor) or self.held(tensor)

    def forgets(self, tensor: torch.Tensor) -> bool:
        """Whether it need not be noted that its content is known now."""
        return not self._written(tensor) and not self._source(tensor.data_ptr())

    def escaped(self) -> frozenset[str]:
        """Tensors of the model that went into memory which is not the module's and still there."""
        left = (each for each in self._temporaries.values() if there(each.reference))
        return self.names_of(write for temporary in left for write in temporary.writes)

    def _note_changed(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            place, key = tensor.data_ptr(), tensor.untyped_storage()._cdata
            if key not in self._changed and not self._source(place) and not self.held(tensor):
                self._changed[key] = weak(tensor)

    def changes_outside(self) -> bool:
        """Whether it has written to tensors that are not the module's and are still there."""
        return any(map(there, self._changed.values()))

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that the values of tensors are looked at, as far as they are known."""
        for tensor in tensors:
            if not self.held(tensor) or self._opaque:
                continue
            place = tensor.data_ptr()
            area = self._held.find(place)
            seen = [place_of(tensor)]
            for write in self.writes[area]:
                seen = [part for move in seen for part in without(move, write.move)]
            if seen:
                self.looked.setdefault(area, set()).update(seen)

    def let_out(self, tensor: torch.Tensor, reason: str) -> None:
        """Notes that a tensor's memory is handed to others than torch."""
        self.read_outside(tensor)
        if not self._opaque and self.symbolic(tensor):
            self.refuse(self.names(tensor), reason)
        self.look([tensor])

    def names(self, tensor: torch.Tensor) -> frozenset[str]:
        """Tensors of the model that the values may depend on."""
        if self._source(tensor.data_ptr()):
            return frozenset([self.name_at(tensor.data_ptr())])
        return self.names_of(found_by(tensor, self._written(tensor)))

    def names_of(self, writes: Iterable[Write]) -> frozenset[str]:
        """Tensors of the model that what was written may depend on."""
        found: set[str] = set()
        todo, seen = list(writes), set[int]()
        while todo:
            write = todo.pop()
            found |= write.names
            if write.kind == SOURCE:
                found.add(self.name_at(write.move.source))
            elif write.kind == HELD and id(write) not in seen:
                seen.add(id(write))
                read, others = write.move, self.writes[self._held.find(write.move.source)]
                todo += last_written(read, [w for w in others if 0 < w.time < write.clock])
                # what was loaded by itself, perhaps before
                todo += [w for w in others if not w.time and last_written(read, [w])]
        return frozenset(found)

    # -- movements

    def _note(self, destination: torch.Tensor, write: Write) -> None:
        area = self._held.find(write.move.destination)
        if area >= 0:
            self.writes[area].append(replace(write, time=self._clock))
        else:
            self._temporary(destination).writes.append(write)

    def move(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """destination.copy_(source)."""
        if destination.numel() == 0:
            return
        source = source.expand(destination.shape)
        read = move_to(source, destination.data_ptr(), byte_strides(destination), destination.dtype)
        if source.dtype == destination.dtype and read.is_noop():
            return
        for write in self._resolve(read, source, destination.dtype):
            self._note(destination, write)

    def _resolve(self, read: Move, tensor: torch.Tensor, into: torch.dtype) -> list[Write]:
        """Where what a move reads comes from."""
        area = self._held.find(read.source)
        here = (tensor.dtype,) if tensor.dtype == into else (tensor.dtype, into)
        if area >= 0:
            return [Write(read, HELD, here, self._clock)]
        found: list[Write] = []
        rest = [read]
        for write in reversed(self._written(tensor)):
            left: list[Move] = []
            for part in rest:
                moves, outside = compose(part, write.move)
                left += outside
                found += [continued(write, move, tensor.dtype, into) for move in moves]
            rest = left
        if self._source(read.source):
            found += [Write(part, SOURCE, here, self._clock) for part in rest]
        elif rest:
            found += self._constants(rest, tensor, here)
        return found

    def _constants(
        self, moves: list[Move], tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]
    ) -> list[Write]:
        """Reads of memory that holds its values, which are kept as they are now."""
        storage = tensor.untyped_storage()
        spans = [move.reversed().span() for move in moves]
        low, high = min(start for start, _ in spans), max(end for _, end in spans)
        keep = bytes_of(storage, low - storage.data_ptr(), high - storage.data_ptr()).clone()
        shift = keep.data_ptr() - low
        return [
            Write(replace(m, source=m.source + shift), CONSTANT, dtypes, self._clock, keep=keep)
            for m in moves
        ]

    def taint(
        self,
        tensor: torch.Tensor,
        names: frozenset[str],
        reason: str,
        flow: frozenset[str] | None = None,
    ) -> None:
        """Notes that all of a tensor was computed."""
        if tensor.numel():
            write = Write(place_of(tensor), COMPUTED, names=names, flow=flow, reason=reason)
            self._note(tensor, write)

    def _flow(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Tensors of the model whose values operators have brought into others."""
        found = set[str]()
        for tensor in filter(in_memory, tensors):
            area = self._held.find(tensor.data_ptr())
            if self._source(tensor.data_ptr()):
                found.add(self.name_at(tensor.data_ptr()))
                continue
            writes = self.writes[area] if area >= 0 else self._temporary(tensor).origins
            for write in found_by(tensor, writes):
                found |= write.flow or frozenset()
        return frozenset(found)

    def _carry(self, tensor: torch.Tensor, flow: frozenset[str]) -> None:
        """Notes whose values a temporary has now."""
        if in_memory(tensor):
            self._temporary(tensor).origins.append(Write(place_of(tensor), COMPUTED, flow=flow))

    # -- everything else

    def _other(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        changed: list[torch.Tensor],
    ) -> Any:
        packet = func.overloadpacket
        reason = f"{packet.__name__}"
        inputs = arguments_read(packet, args, kwargs)
        # what it goes on from and replaces is computed anew by each load
        self.look(t for t in inputs if "out" not in kwargs or all(t is not c for c in changed))
        rows = self._rows_put(packet, args)
        whole = packet in FILLS or "out" in kwargs
        read = inputs if whole or rows is not None else [*inputs, *changed]
        targets = changed if rows is None else rows
        known = [tensor for tensor in read if self.symbolic(tensor)]
        names = self._opaque or frozenset().union(*map(self.names, known))
        # of how many elements depends on values; an index refuses masks by itself
        counts = torch.Tag.dynamic_output_shape in func.tags and packet is not _aten.index
        if known and counts and not self._opaque:
            self.refuse(names, reason)
        flow = self._flow(read) if self._opaque else None
        if any(map(self.held, changed)):
            for tensor in targets:
                self.taint(tensor, names, reason, flow)
                if flow is not None and not self.held(tensor):
                    self._carry(tensor, flow)
            returned = len(func._schema.returns)
            if returned > len(changed):
                self.refuse(names, reason)
            return changed[0] if returned == 1 else tuple(changed[:returned]) or None
        answer = func(*args, **kwargs)
        if flow is not None and packet in (_aten.cat, _aten.stack):
            for part, tensor in parts_of_cat(answer, *as_cat(packet, *args)):
                self._carry(part, self._flow([tensor]))
        elif flow is not None:
            for tensor in targets or tensors_in(answer):
                self._carry(tensor, flow)
        if self._opaque or not (known or any(self._written(t) for t in changed if t.numel())):
            return answer
        leaves = tree_leaves(answer)
        if known and any(not isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None):
            self.refuse(names, reason)
        for tensor in targets or tensors_in(leaves):
            if known:
                self.taint(tensor, names, reason)
            else:
                self.move(tensor, tensor.clone())
        return answer

    def _rows_put(self, packet: Any, args: Sequence[Any]) -> list[torch.Tensor] | None:
        """The parts of a tensor that an operator writes to by an index of one dimension, whatever
        their order; None for other operators, and for an index that the model's values say."""
        found = index_of_put(packet, args)
        if found is None or self.symbolic(found[2]) or self._flow([found[2]]):
            return None
        parts = parts_written(packet, args, found[0])
        return None if parts[0] is found[0] else parts

    def refuse(self, names: frozenset[str], reason: str) -> None:
        """Ends the load: values are looked at that are not there.  Not where others wait for what
        this thread does: nothing is learnt then."""
        self.refused |= names or frozenset(["?"])
        if not self.late:
            raise ReadsValuesError(f"{', '.join(sorted(names)[:5])}: read by {reason}")


class _Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a tracer that another thread works on tensors that it follows."""

    def __init__(self, tracer: weakref.ref[Tracer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tracer = self._tracer()
        if tracer is not None:
            for tensor in tensors_in((args, kwargs)):
                if tensor.layout == torch.strided:
                    tracer.elsewhere = tracer.elsewhere or tracer.moves(tensor)
        return func(*args, **kwargs)


class _Glances(TorchFunctionMode):
    """Tells a tracer of methods that let values out."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = "" if self._tracer.ended else getattr(func, "__name__", "")
        if name in _LETS_OUT or (name in _HANDS_OUT and not self._tracer.held(args[0])):
            self._tracer.let_out(args[0], name)
        return func(*args, **(kwargs or {}))


@contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """Traces this thread, and tasks that it gives to thread pools, one after another.  Of other
    threads that this one starts, the tracer learns whether they work on what it follows: they may
    outlive it, and do not keep it."""
    reference = weakref.ref(tracer)

    def late() -> None:
        tracer.late = True

    with watching(beside=lambda: pushed(_Elsewhere(reference))), watched_pools(late), tracer:
        try:
            yield
        finally:
            tracer.ended = True
