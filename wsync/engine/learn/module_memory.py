"""The tensors that a module holds: parameters, buffers and plain attributes, and their memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from wsync._core import (
    BufferTable,
    LayoutError,
    StateError,
    TensorTable,
    UnsupportedError,
    WsyncError,
    describe,
)
from wsync.engine.learn.regions import Move, united
from wsync.machine import device
from wsync.module_tensors import checksum_of, dtype_of
from wsync.module_tensors.places import parts_of
from wsync.module_tensors.value_forms import (
    KEEP,
    Form,
    at,
    atom,
    items,
    module_pattern,
    own,
    typed,
)

# (path, dtype, shape, strides in elements, area, byte offset in it)
Fact = tuple[str, str, tuple[int, ...], tuple[int, ...], int, int]
Name = tuple[str, str | None]  # of a part or tensor, and the first one of what it stands for
Seen = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]

CACHE_NBYTES: Final = 16 << 20  # of host memory for a copy: an engine's caches are larger
_ROW_NBYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Area:
    """One storage that tensors of the module lie in; `find` gives one of them.

    It is looked up each time: torch swaps no tensors that there are weak references to.
    """

    start: int
    end: int
    find: Callable[[], Any]
    path: str

    @staticmethod
    def of(tensor: torch.Tensor, path: str) -> Area:
        """The storage of a tensor, which the area keeps."""
        return Area(*_span(tensor), lambda: tensor, path)

    def view(self, dtype: torch.dtype, offset: int, shape: Any, strides: Any) -> torch.Tensor:
        """As `view`, of its storage."""
        tensor = _there(self.path, self.find())
        if _span(tensor) != (self.start, self.end):
            raise LayoutError(f"{self.path}: its memory is gone")
        return view(tensor.untyped_storage(), dtype, offset, shape, strides)

    def bytes(self) -> torch.Tensor:
        return self.view(torch.uint8, 0, (self.end - self.start,), (1,))

    def checksum(self) -> int:
        return checksum_of(self.bytes())

    def sums(self, moves: Iterable[Move]) -> list[int]:
        """Checksums of what moves write to, whose destinations count from the area's start."""
        data = self.bytes()
        return [checksum_of(region(data, move)) for move in moves]


def view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, strides: Any
) -> torch.Tensor:
    """Elements at a byte offset of a storage; shape and strides in elements."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(strides))


def bytes_of(storage: torch.UntypedStorage, low: int, high: int) -> torch.Tensor:
    """Part of a storage's bytes."""
    return view(storage, torch.uint8, low, (high - low,), (1,))


def region(data: torch.Tensor, move: Move) -> torch.Tensor:
    """The bytes of a move's destination, which counts from the start of `data`."""
    shape = (*(n for n, _, _ in move.dims), move.into)
    steps = (*(d for _, _, d in move.dims), 1)
    return data.as_strided(shape, steps, move.destination)


def _sums_of_words(data: torch.Tensor) -> int:
    """A checksum of a region's bytes, by the sums of its rows and columns, which are made where it
    lies; of all bytes where these are no whole words."""
    rows, rest = data, data[:0]
    if data.dim() == 1:
        whole = len(data) // _ROW_NBYTES * _ROW_NBYTES
        rows, rest = data[:whole].view(whole // _ROW_NBYTES, _ROW_NBYTES), data[whole:]
    if any(step % 8 for step in (rows.storage_offset(), rows.shape[-1], *rows.stride()[:-1])):
        return checksum_of(data)
    words = rows.view(torch.int64)
    sums = (words.sum(0), words.sum(-1), rest.to(torch.int64))
    return checksum_of(torch.cat([each.flatten() for each in sums]))


def _there(path: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{path}: the tensor is gone")
    return tensor


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor's storage, and the byte after its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class ModuleMemory:
    """The tensors that a module has now.  Areas are numbered in the order of their first tensor.

    Refers to tensors without keeping them alive: an engine may replace its weights between updates.

    Raises LayoutError where two storages share memory, or where a tensor's memory is gone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.areas: list[Area] = []
        self.facts: list[Fact] = []
        self.parameters: set[str] = set()  # paths
        numbers: dict[int, int] = {}
        self.parts = dict(module.named_modules())
        self.names = _names_of_parts(self.parts)
        self.device = torch.device("cpu")  # that the first tensor is on
        self._places: list[tuple[dict[str, Any], str]] = []  # where each is bound
        # where they are bound first, and their areas
        self._distinct: list[tuple[dict[str, Any], str, int]] = []
        bound: dict[int, Form] = {}  # by the tensor's id
        firsts: dict[int, str] = {}
        for path, slot, name, tensor in bound_tensors(module):
            start, end = _span(tensor)
            if tensor.numel() and (not start or _end(tensor) > end - start):
                raise LayoutError(f"{path}: its memory is gone")
            if not tensor.numel():
                continue
            if tensor.is_neg() or tensor.is_conj():
                raise LayoutError(
                    f"{path}: its memory holds other values, which torch negates or conjugates when"
                    " they are read (is_neg, is_conj)"
                )
            number = numbers.setdefault(start, len(self.areas))
            if id(tensor) not in bound:
                self._distinct.append((slot, name, number))
            bound[id(tensor)] = at(tensor, typed(type(tensor), KEEP))
            if number == len(self.areas):
                self.areas.append(Area(start, end, partial(slot.get, name), path))
            elif end != self.areas[number].end:
                raise _shared(self.areas[number].path, path)
            dtype = str(tensor.dtype).removeprefix("torch.")
            offset = int(tensor.storage_offset()) * tensor.element_size()
            shape, strides = tuple(tensor.shape), tensor.stride()
            self.facts.append((path, dtype, shape, strides, number, offset))
            self.names.append((path, firsts.setdefault(id(tensor), path)))
            if isinstance(tensor, torch.nn.Parameter):
                self.parameters.add(path)
            self.device = self.device if self._places else tensor.device
            self._places.append((slot, name))
        self._forms = list(bound.values())
        self._held = module_pattern([module], lambda part: _forms_of_part(part, bound))
        self._table = _table_of(self._held())
        self._spans = [(area.start, area.end - area.start) for area in self.areas]
        self._order = sorted(range(len(self.areas)), key=lambda i: self.areas[i].start)
        self._starts = [self.areas[i].start for i in self._order]
        for one, two in zip(self._order, self._order[1:], strict=False):
            first, second = self.areas[one], self.areas[two]
            if first.end > second.start:
                raise _shared(first.path, second.path)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of `facts`."""
        return [
            _there(fact[0], slot.get(name))
            for fact, (slot, name) in zip(self.facts, self._places, strict=True)
        ]

    def tied(self) -> list[list[str]]:
        """Groups of two and more names of parameters and buffers that stand for one tensor."""
        module = self.parts[""]
        groups: dict[Seen, list[str]] = {}
        for name, tensor in itertools.chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        ):
            if usable(tensor) and tensor.numel():
                groups.setdefault(seen(tensor), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def memory(self) -> list[torch.Tensor]:
        """Keeps the memory of all areas, whatever becomes of the tensors.

        Raises:
            StateError: another thread has replaced it.
        """
        kept = [tensor.detach() for tensor in self.tensors]
        for fact, tensor in zip(self.facts, kept, strict=True):
            area = self.areas[fact[4]]
            if _span(tensor) != (area.start, area.end):
                raise StateError(f"{fact[0]}: its memory was replaced while the update began")
        return kept

    def check_place(self, areas: Collection[int]) -> None:
        """Raises LayoutError for tensors of these areas that copies cannot reach: neither all on
        the host, nor all on one GPU."""
        first: torch.device | None = None
        for fact, tensor in zip(self.facts, self.tensors, strict=True):
            if fact[4] not in areas:
                continue
            first = tensor.device if first is None else first
            if tensor.device != first or first.type not in ("cpu", "cuda"):
                raise LayoutError(f"{fact[0]} is on {tensor.device}, other tensors on {first}")

    def kept(self) -> list[torch.Tensor] | None:
        """The tensors of all areas, if the module holds the very same tensors where they were, and
        all else as it was: what an update asks each time, at little cost; else None."""
        if self._table is None or (tensors := self._held()) is None:
            return None
        return tensors if self._table.moved(tensors) is None else None

    def count_writes(self, areas: Collection[int]) -> None:
        """Raises the versions of the tensors in areas that were written to without torch."""
        found = (slot.get(name) for slot, name, area in self._distinct if area in areas)
        increment_version([tensor for tensor in found if isinstance(tensor, torch.Tensor)])

    def current(self) -> bool:
        """Whether the module holds the very same tensors where they were, and no others."""
        return self.kept() is not None or ModuleMemory(self.parts[""])._same(self)

    def _same(self, other: ModuleMemory) -> bool:
        return all(
            getattr(self, what) == getattr(other, what)
            for what in ("parts", "names", "facts", "_forms", "_spans")
        )

    def find(self, address: int) -> int:
        """The area of an address, or -1."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return -1
        number = self._order[place]
        return number if address < self.areas[number].end else -1

    @cached_property
    def _names(self) -> AreaNames:
        return AreaNames(self.facts)

    def spans(self) -> list[tuple[int, int]]:
        return self._spans

    def table(self) -> BufferTable:
        return BufferTable(self.spans(), self.memory())

    @cached_property
    def own_bytes(self) -> dict[int, list[Move]]:
        """By area: the bytes that are tensors of the module, counted from its start.  A storage may
        hold others' as well."""
        found: dict[int, list[Move]] = {}
        for fact in self.facts:
            found.setdefault(fact[4], []).append(whole(fact))
        return {area: united(moves) for area, moves in found.items()}

    @cached_property
    def caches(self) -> frozenset[int]:
        """Areas of more than CACHE_NBYTES that hold no parameter and no buffer."""
        spans = enumerate(self._spans)
        large = {number for number, (_, nbytes) in spans if nbytes > CACHE_NBYTES}
        return frozenset(large - self.weights) if large else frozenset()

    @cached_property
    def weights(self) -> frozenset[int]:
        """Areas that hold parameters or buffers."""
        module = self.parts[""]
        bound = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        named = zip(self.facts, self.tensors, strict=True)
        return frozenset(f[4] for f, t in named if f[0] in self.parameters or id(t) in bound)

    def awake(self, areas: Iterable[int]) -> list[int]:
        """Those that there is memory for.  An engine may wake its weights before its caches."""
        return [number for number in areas if device.has_memory(self.areas[number].bytes())]

    def sums_of(self, regions: Mapping[int, Iterable[Move]]) -> dict[int, list[int]]:
        """Checksums of regions by area, counted from its start; those of caches are made where they
        lie.  None of what is not awake."""
        found = {}
        for number in self.awake(regions):
            moves = regions[number]
            area = self.areas[number]
            if number in self.caches:
                data = area.bytes()
                found[number] = [_sums_of_words(region(data, move)) for move in united(moves)]
            else:
                found[number] = area.sums(moves)
        return found

    def name(self, number: int, offset: int) -> str:
        """The tensor that a byte of an area belongs to."""
        return self._names.at(number, offset)[-1]

    def sums(self, paths: Collection[str]) -> dict[str, int]:
        """Checksums of tensors."""
        named = zip(self.facts, self.tensors, strict=True)
        return {fact[0]: checksum_of(tensor) for fact, tensor in named if fact[0] in paths}

    def difference(self, facts: list[Fact], names: list[Name] | None = None) -> str:
        """How the tensors, and the names if they are given, differ from what they were; "" where
        tensors only moved."""
        names = self.names if names is None else names
        if (self.facts, self.names) == (facts, names):
            return ""
        now, before = _texts(self.facts, self.names), _texts(facts, names)
        for what, text in before.items():
            if what not in now:
                return f"{what} is gone"
            if now[what] != text:
                return f"{what} was {text} and is {now[what]}"
        new = next((what for what in now if what not in before), "")
        return f"{new} is new" if new else "the tensors or parts are in another order"


class AreaNames:
    """Names of the tensors that areas consist of."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._areas: dict[int, list[tuple[int, str]]] = {}
        for path, _, _, _, area, offset in facts:
            self._areas.setdefault(area, []).append((offset, path))
        for found in self._areas.values():
            found.sort(key=lambda place: place[0])

    def known(self, area: int) -> bool:
        return area in self._areas

    def at(self, area: int, offset: int) -> list[str]:
        """The tensors that a byte belongs to, of those that begin at one place; in order."""
        found = self._areas[area]
        end = max(bisect.bisect_right(found, offset, key=lambda place: place[0]), 1)
        first = bisect.bisect_left(found, found[end - 1][0], key=lambda place: place[0])
        return [path for _, path in found[first:end]]


def whole(fact: Fact, start: int = 0) -> Move:
    """A tensor, as a move from nowhere; start: that of its area."""
    _, dtype, shape, strides, _, offset = fact
    item = dtype_of(dtype).itemsize
    dims = tuple((n, s * item, s * item) for n, s in zip(shape, strides, strict=True))
    return Move(0, start + offset, dims, item, item)


def seen(tensor: torch.Tensor) -> Seen:
    """What memory a tensor is, and how it is seen."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def check_python(module: torch.nn.Module) -> None:
    """UnsupportedError where the tensors of a part are kept by TorchScript: neither what it holds
    nor its attributes are compared."""
    for path, part in module.named_modules():
        if not isinstance(part._parameters, dict):
            raise UnsupportedError(
                f"{path or 'the module'}: of {type(module).__name__}, is TorchScript, and what a "
                "part of it holds cannot be compared, nor load_weights be learnt: ModuleLoader "
                "(wsync.engine.ring_loaders) calls it as it is, or copies by name where there is "
                "none"
            )


class SharedError(LayoutError):
    """Tensors share memory, and torch does not know of it."""


def _shared(one: str, other: str) -> LayoutError:
    return SharedError(f"{one} and {other} share memory of two storages")


def _texts(facts: list[Fact], names: list[Name]) -> dict[str, str]:
    """What is said of each tensor, and of each name; of a storage, which tensor is the first of
    it."""
    firsts = {area: path for path, *_, area, _ in reversed(facts)}
    tensors = {
        path: f"{dtype} {shape} with strides {strides} at byte {offset} of {firsts[area]}'s storage"
        for path, dtype, shape, strides, area, offset in facts
    }
    return tensors | {f"the name {path}": f"that of {first}" for path, first in names}


def _names_of_parts(parts: dict[str, torch.nn.Module]) -> list[Name]:
    firsts = {id(part): path for path, part in parts.items()}
    return [
        (f"{path}.{name}" if path else name, firsts.get(id(child)))
        for path, part in parts.items()
        for name, child in part._modules.items()
    ]


def _end(tensor: torch.Tensor) -> int:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.element_size()


def bound_tensors(
    module: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """(path, where it is bound, under which name, tensor)"""
    return (bound for bound in _tensors_of(module) if usable(bound[-1]))


def _tensors_of(
    module: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for slot in slots(part):
            for name, tensor in slot.items():
                if isinstance(tensor, torch.Tensor):
                    yield (f"{prefix}.{name}" if prefix else name), slot, name, tensor


def without_strides(module: torch.nn.Module) -> dict[str, bool]:
    """Parameters that have values, but no memory of their own; and whether the parts that they
    are wrappers around are known."""
    return {
        path: any(True for _ in parts_in_memory(path, parameter))
        for path, parameter in module.named_parameters()
        if not usable(parameter) and not is_lazy(parameter)
        if parameter.numel() and not parameter.is_meta
    }


def wrapped_tensors(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(path, tensor, part) of the module's tensors that are wrappers around others, as DTensors
    are: every part that has memory of its own.  A wrapper of several has a path for each."""
    for path, _, _, tensor in _tensors_of(module):
        if not usable(tensor):
            for inside, part in parts_in_memory(path, tensor):
                if part.numel():
                    yield inside, tensor, part


def parts_in_memory(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Paths and parts of a tensor that have memory of their own: of a usable one, itself."""
    if usable(tensor):
        yield path, tensor
        return
    inside = {str(number): part for number, part in enumerate(parts_of(tensor))}
    if inside.get("0") is tensor:
        flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's own protocol of wrappers
        inside = {name: getattr(tensor, name) for name in (flatten()[0] if flatten else ())}
    for name, part in inside.items():
        if isinstance(part, torch.Tensor):
            yield from parts_in_memory(path if len(inside) == 1 else f"{path}.{name}", part)


def _table_of(tensors: list[torch.Tensor] | None) -> TensorTable | None:
    """Where tensors lie; None where that cannot be described, and is found anew each time."""
    try:
        return describe(tensors, gpu=True).form() if tensors is not None else None
    except WsyncError:
        return None


def _forms_of_part(part: torch.nn.Module, bound: dict[int, Form]) -> tuple[Form, ...]:
    """Of a part: which tensors it holds, under which names.

    bound: the forms of tensors by their ids.  Others have no memory, and may get some.
    """

    def held(slot: dict[str, Any]) -> Form:
        return items({name: bound.get(id(v)) or _other(v) for name, v in slot.items()})

    stores = {name: held(getattr(part, name)) for name in ("_parameters", "_buffers")}
    return *own(vars(part), **stores), ("own", None, (held(vars(part)),))


def _other(value: object) -> Form:
    return _EMPTY if isinstance(value, torch.Tensor) else _NO_TENSOR


def _without_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (not usable(value) or not value.numel())


_NO_TENSOR: Final[Form] = ("other", torch.Tensor, ())
_EMPTY: Final[Form] = ("apply", _without_memory, (atom(True),))


def slots(part: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps tensors."""
    return part._parameters, part._buffers, vars(part)


def usable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, in which its elements lie at strides: not one on the
    meta device, sparse, nested, uninitialised, or a wrapper around others."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return False
    return True
