"""Loaders move the rounds of an update from the ring into an engine's parameters.

A loader belongs to one worker and is driven by wsync.engine.receiver.Receiver:

    attach(ring, manifest)   whenever the trainer has a new plan
    borrow(sources)          before `begin`: the trainer's own memory, if that is lent
    begin(rounds)            once an update
    load(round)              for each round: it is in the ring, or will be when `stream` gets there
    finish(timeout)          after the last round: waits until everything is loaded
    confirm()                after the update was committed
    abandon()                if the update has failed, instead of finish or after it

`comparison` takes the place of `begin` if an update is compared instead of being loaded.

The loaders here copy into a worker's layout (LayoutLoader), copy to a module's tensors of the same
names (ModuleLoader), or call a load_weights (CallingLoader).  RecordedLoader, in
wsync.engine.learn.recorded_loader, learns from load_weights where tensors go, and copies them there
directly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wsync._core import (
    ALL_BUFFERS,
    LOCAL,
    BufferTable,
    Device,
    Layout,
    LayoutError,
    Memory,
    ProtocolError,
    RemoteError,
    Route,
    StateError,
    Stream,
    UnsupportedError,
    WsyncError,
)
from wsync.engine.comparison import Comparison
from wsync.engine.destination import (
    Destination,
    LoadTarget,
    NamedPlaces,
    aliases,
    named_tensors,
    state_of,
)
from wsync.engine.post_load import in_place
from wsync.machine import device
from wsync.machine.error_text import error_text
from wsync.messages.control import PIECES, WHOLE
from wsync.module_tensors import dtype_of
from wsync.module_tensors.names import unfused

OnWeightsLost = Callable[[], object]
LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], Any]


def ignore_loss() -> None:
    """An `on_weights_lost` that does nothing."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker has loaded: the manifest's tensors, and the bytes delivered for them.
    audit_ns: duration of the check that load_weights still does what was learnt from it."""

    tensors: int
    nbytes: int
    audit_ns: int = 0


class Held(NamedTuple):
    """The boxes that a worker holds of a model's tensors.

    layout: the boxes; those of buffers without a tensor are not held.  tensors, names: the worker's
    tensor behind each buffer, and its name.
    """

    layout: Layout
    tensors: Sequence[torch.Tensor]
    names: Sequence[str]


class RingManifest:
    """The tensors that a plan delivers, by round."""

    def __init__(self, ring: Memory, layout: Layout) -> None:
        self.ring = ring
        self.layout = layout
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nbytes: dict[int, int] = {}  # by round
        self.whole: dict[int, list[tuple[str, torch.dtype, tuple[int, ...], int]]] = {}  # by round
        self.empty: list[tuple[str, str]] = []
        for index in range(layout.tensor_count):
            name, dtype, shape, _ = layout.tensor(index)
            self.shapes[name] = shape
            shards = layout.shards(index)
            if not shards:
                self.empty.append((name, dtype))
            for shard in shards:
                size = math.prod(shard.extent) * dtype_of(dtype).itemsize
                self.nbytes[shard.buffer] = self.nbytes.get(shard.buffer, 0) + size
                if shard.extent == shape:
                    found = self.whole.setdefault(shard.buffer, [])
                    found.append((name, dtype_of(dtype), shape, shard.offset))

    def check_rounds(self, rounds: int, first: int = 0) -> None:
        """Raises ProtocolError if the manifest has more rounds than the update.

        first: the buffer number of round 0.  Buffers with lower numbers come with that round.
        """
        last = max(max(self.nbytes, default=-1) - first, 0 if first else -1)
        if last >= rounds:
            raise ProtocolError(f"the update has {rounds} rounds, but the manifest has {last + 1}")

    def views(self, round: int, device: Device) -> list[tuple[str, torch.Tensor]]:
        """Returns the whole tensors of a round, as views of the ring."""
        flat = _bytes_of(self.ring, device)
        return [
            (name, flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            for name, dtype, shape, at in self.whole.get(round, ())
        ]

    def receipt(self, loaded: Iterable[int]) -> Receipt:
        nbytes = sum(self.nbytes.get(round, 0) for round in loaded)
        return Receipt(self.layout.tensor_count, nbytes)


def _bytes_of(memory: Memory, place: Device) -> torch.Tensor:
    if place.ordinal < 0:
        return torch.frombuffer(memory, dtype=torch.uint8)
    found = device.GpuBytes(memory.address, memory.nbytes, memory)
    return torch.as_tensor(found, device=torch.device("cuda", place.ordinal))


class Loader:
    """The base of all loaders, which a Receiver calls.  An exception fails the update and gives the
    error its text.

    device: where the ring is made.
    stream: the stream of that device that loads rounds; None: `load` itself loads them.
    borrows: whether the loader can copy from the trainer's own memory.
    """

    device: Device
    stream: Stream | None = None
    borrows = False

    def __init__(self) -> None:
        self._manifest: RingManifest | None = None
        self._loaded: set[int] = set()

    def blob(self) -> bytes:
        """The worker's layout in bytes, or control.WHOLE, PIECES or LEARN."""
        raise NotImplementedError

    def learn(self, model: Layout, on_weights_lost: OnWeightsLost) -> bytes:
        """Learns which parts of a model's tensors the worker needs, and returns them as a blob.
        Called if `blob` returns control.LEARN.  If the weights must be touched, here or in `begin`,
        `on_weights_lost` is called first."""
        raise NotImplementedError

    @property
    def own_loading(self) -> str:
        """Names the tensors that go through the engine's own loading, and says why.  Returns "" if
        there are none."""
        return ""

    def attach(self, ring: Memory, manifest: Layout) -> None:
        """Takes a new plan.  Round k's boxes are the shards of `manifest` with buffer k, and their
        offsets count from the start of `ring`."""
        self._manifest = None
        self._manifest = RingManifest(ring, manifest)

    def detach(self) -> None:
        """Lets go of the ring, whose session has ended."""
        self._manifest = None

    def borrow(self, sources: BufferTable | None) -> None:
        """Takes the trainer's lent memory before each `begin`.  The manifest's first buffers are at
        these sources and are loaded with round 0; the others are rounds.  None: all are rounds."""
        if sources is not None:
            raise UnsupportedError(
                f"{type(self).__name__} loads only from a ring, but the trainer lends its memory"
            )

    def begin(self, rounds: int) -> None:
        self._attached().check_rounds(rounds)
        self._loaded = set()

    def load(self, round: int) -> None:
        """Loads a round.  The round's slot is free when the stream gets here.  Without a stream, it
        is free when this returns."""
        self._attached()
        self._loaded.add(round)

    def finish(self, timeout: float) -> Receipt:
        """Waits until everything is loaded."""
        return self._attached().receipt(self._loaded)

    def confirm(self) -> None:
        """Raises StateError if the module no longer has the tensors that were written to."""

    def abandon(self) -> None:
        """Returns once nothing more is written."""

    def comparison(self, timeout: float) -> Comparison:
        """Returns an object that compares an update with what the loader has loaded.  It is called
        after `attach` and `borrow`, instead of `begin`.  timeout: seconds for each step.

        Raises:
            StateError: nothing can be compared; the text says why.
        """
        raise StateError(f"all tensors go through load_weights ({type(self).__name__})")

    def held(self) -> Held:
        """Returns what the worker holds, from which another engine can be filled.

        Raises:
            StateError: the loader does not know it; the text says why.
            UnsupportedError: the worker does not hold some tensors as they were delivered.
        """
        raise StateError(f"{type(self).__name__} does not know where load_weights puts tensors")

    def facts(self) -> dict[str, Any]:
        """Returns what the loader has learnt, for JSON; see wsync.inspection."""
        return {}

    def _attached(self) -> RingManifest:
        if self._manifest is None:
            raise StateError("no ring is attached")
        return self._manifest


def loading_stream(place: str, threads: int) -> Stream:
    """Makes a stream on the GPU whose UUID is `place`.  For "", which stands for host memory, the
    variable WSYNC_DEVICE may name a GPU to use."""
    return Stream(threads, device.find(place or device.wanted()))


class RoutedLoader(Loader):
    """Copies boxes to the places that an update gives them, on a stream of its own.

    threads: number of threads of the loader's stream.  While host memory is lent, a stream with one
    more thread is used, because trainer ranks then copy little or nothing.
    """

    borrows = True

    def __init__(self, stream: Stream, threads: int) -> None:
        super().__init__()
        self.device = stream.device
        self.stream = stream
        self._threads = threads
        self._streams: dict[bool, Stream] = {False: stream}  # by whether memory is lent
        self._route: Route | None = None
        self._boxes: Layout | None = None  # the layout that the route leads to
        self._sources = BufferTable([])
        self._borrowed: BufferTable | None = None  # the trainer's lent memory
        self._first = 0  # number of the route's first buffer that is a round
        self._destinations: BufferTable | None = None  # between `begin` and the last copy
        self._target: LoadTarget | None = None  # while an update runs
        self._memory = device.KnownMemory()  # of the module's tensors

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._route = None
        super().attach(ring, manifest)

    def detach(self) -> None:
        self._route, self._borrowed, self._sources = None, None, BufferTable([])
        super().detach()

    def borrow(self, sources: BufferTable | None) -> None:
        self._borrowed = sources
        lent = sources is not None and self.device.ordinal < 0
        if lent not in self._streams:
            self._streams[lent] = Stream(self._threads + 1, self.device)
        self.stream = self._streams[lent]

    def begin(self, rounds: int) -> None:
        self._first = 0 if self._borrowed is None else len(self._borrowed)
        self._attached().check_rounds(rounds, self._first)
        self._loaded = set()

    def _comparison(
        self, layout: Layout, tensors: Sequence[torch.Tensor], timeout: float
    ) -> Comparison:
        """Returns a comparison with the boxes that updates fill, and the tensors that have them."""
        assert self.stream is not None
        known = self._attached()
        brought = known.ring, known.layout, self._borrowed, self.stream
        return Comparison(*brought, layout, tensors, timeout)

    def _aim(self, target: LoadTarget) -> None:
        """Sets the destinations of the next rounds, because parameters may move between updates.
        check_rounds comes first, and checks the manifest's largest round number.
        LayoutError: two tensors share memory."""
        boxes = target.layout()
        if self._route is None or boxes is not self._boxes:
            manifest, self._boxes = self._attached(), boxes
            self._route, ring = Route(manifest.layout, boxes), manifest.ring
            self._sources = BufferTable(
                [(ring.address, ring.nbytes)] * self._route.buffer_count, ring
            )
        destinations = target.buffers()
        boxes.check_apart(destinations)
        self._target, self._destinations = target, destinations

    def load(self, round: int) -> None:
        if self._route is None or self._destinations is None:
            raise StateError(f"round {round} came before the update had begun")
        assert self.stream is not None
        if self._borrowed is not None and round == 0:
            self._loaded.update(range(self._first))
            self.stream.copy(self._route, ALL_BUFFERS, LOCAL, self._borrowed, self._destinations)
        buffer = self._first + round
        super().load(buffer)
        if buffer < self._route.buffer_count:
            self.stream.copy(self._route, buffer, LOCAL, self._sources, self._destinations)

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        assert self._target is not None and self.stream is not None
        self.stream.synchronize(timeout)
        # keep neither parameters nor the trainer's memory until the next update
        self._destinations = self._borrowed = None
        self._target.complete()
        return receipt

    def confirm(self) -> None:
        """Checks that no tensor has moved.  An earlier check, in `finish`, would find nothing
        more."""
        target, self._target = self._target, None
        if target is not None:
            target.check_places()

    def abandon(self) -> None:
        assert self.stream is not None
        self.stream.abandon()  # keeps the memory that it still writes to
        self._target = self._destinations = self._borrowed = None


class LayoutLoader(RoutedLoader):
    """Loads the boxes of a worker that keeps fused or sharded parameters.

    layout: this worker's boxes.  Buffer i is tensors[i], and offsets count from its first element.
    Only these boxes are asked of the trainer, and every byte of them must be delivered exactly
    once.  Memory outside them (padding rows) stays as it is.  The tensors may move between updates;
    StateError if their dtype, shape or strides change.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], *, threads: int = 1
    ) -> None:
        if layout.buffer_count() > len(tensors):
            raise LayoutError(
                f"the layout has {layout.buffer_count()} buffers, but {len(tensors)} tensors were "
                "given"
            )
        self._layout = layout
        self._tensors = list(tensors)
        table = Destination(layout, self._tensors).table
        self._form = table.form()
        super().__init__(loading_stream(device.of(table), threads), threads)

    def blob(self) -> bytes:
        return self._layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        self._aim(self._places())

    def comparison(self, timeout: float) -> Comparison:
        return self._comparison(self._layout, self._places().tensors, timeout)

    def held(self) -> Held:
        target = self._places()
        return Held(self._layout, target.tensors, target.names)

    def _places(self) -> Destination:
        target = Destination(self._layout, self._tensors)
        if (place := target.table.differs(self._form)) is not None:
            tensor = self._tensors[place]
            raise StateError(
                f"tensor {place} is now {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}, unlike when this loader was made"
            )
        return target


class ModuleLoader(RoutedLoader):
    """Copies tensors to the parameters and persistent buffers of the same names in a module.

    An unknown name is an error, and so is a parameter that is not delivered.  If a tensor has
    several names (a tied head), one name is enough.  Further names must be delivered with the same
    values.
    """

    def __init__(self, module: torch.nn.Module, *, threads: int = 1) -> None:
        super().__init__(loading_stream(device.of_module(module), threads), threads)
        self._module = module
        self._known: NamedPlaces | None = None  # from the last update of this plan

    def blob(self) -> bytes:
        return PIECES

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._known = None
        super().attach(ring, manifest)

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        target = self._known.again() if self._known is not None else None
        if target is None:
            target = named_tensors(self._module, self._attached().shapes)
            self._known = NamedPlaces(self._module, target)
        self._aim(target)

    def comparison(self, timeout: float) -> Comparison:
        found = named_tensors(self._module, self._attached().shapes)
        return self._comparison(found.layout(), found.tensors[: found.count], timeout)

    def held(self) -> Held:
        state = state_of(self._module)
        found = named_tensors(self._module, {n: tuple(state[n].shape) for n, *_ in aliases(state)})
        return Held(found.layout(), found.tensors, found.names)


class _Copies(list[tuple[str, torch.Tensor]]):
    """The list for a load_weights; iterating over it copies each tensor.  last: the name of the
    tensor that was taken last."""

    last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().__iter__():
            self.last = name
            yield name, tensor.clone()


class CallingLoader(Loader):
    """Passes tensors to a load_weights, once a round or once an update.

    Each tensor is copied when load_weights takes it, so load_weights may keep it.  A slot is freed
    once torch has done the work that load_weights gave it.

    load_weights: a function; None stands for the method that the module has at the time of the
    call.
    at_once: names.  If given, load_weights is called once an update, in place, with copies in host
        memory of the tensors of these names, in this order.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        at_once: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._module = module
        self._load_weights = load_weights
        self.at_once = tuple(at_once)
        self._staged: dict[str, torch.Tensor] = {}  # the tensors for that one call
        self.device = device.find(device.of_module(module))

    def blob(self) -> bytes:
        return WHOLE

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        self._staged = {}

    def load(self, round: int) -> None:
        super().load(round)
        views = self._attached().views(round, self.device)
        if self.at_once:
            # copy=True, because the ring may be in host memory, too
            self._staged |= {name: view.to("cpu", copy=True) for name, view in views}
        elif views:
            self._call(views)

    def finish(self, timeout: float) -> Receipt:
        receipt, manifest = super().finish(timeout), self._attached()
        empty = [
            (name, torch.empty(manifest.shapes[name], dtype=dtype_of(dtype), device="cpu"))
            for name, dtype in manifest.empty
        ]
        if self.at_once:
            staged, self._staged = self._staged | dict(empty), {}
            self._call([(name, staged[name]) for name in self.at_once if name in staged])
        elif empty:
            self._call(empty)
        return receipt

    def abandon(self) -> None:
        self._staged = {}

    def _call(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        method: Any = self._load_weights or self._module.load_weights
        who = getattr(method, "__qualname__", None) or type(method).__qualname__
        copies = _Copies(pairs)
        in_one = in_place(self._module) if self.at_once else contextlib.nullcontext()
        try:
            with torch.no_grad(), in_one:  # engines load so, and some methods rely on it
                method(copies)
        except WsyncError:
            raise
        except Exception as error:
            taken = f"; the last tensor that it took is {copies.last}" if copies.last else ""
            text = f"{who} raised{taken}: {error_text(error)}"
            raise RemoteError(f"{text}{unfused([copies.last])}") from error
        finally:
            copies.clear()  # frees the tensors even if the list is kept
            device.await_torch(self.device)


class ChoosingLoader(Loader):
    """A loader that passes all work on to `_chosen`, another loader."""

    borrows = True
    _chosen: Loader

    @property
    def device(self) -> Device:  # type: ignore[override]
        return self._chosen.device

    @property
    def stream(self) -> Stream | None:  # type: ignore[override]
        return self._chosen.stream

    def blob(self) -> bytes:
        return self._chosen.blob()

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._chosen.attach(ring, manifest)

    def detach(self) -> None:
        self._chosen.detach()

    def borrow(self, sources: BufferTable | None) -> None:
        self._chosen.borrow(sources)

    def begin(self, rounds: int) -> None:
        self._chosen.begin(rounds)

    def load(self, round: int) -> None:
        self._chosen.load(round)

    def finish(self, timeout: float) -> Receipt:
        return self._chosen.finish(timeout)

    def confirm(self) -> None:
        self._chosen.confirm()

    def comparison(self, timeout: float) -> Comparison:
        return self._chosen.comparison(timeout)

    def held(self) -> Held:
        return self._chosen.held()

    def abandon(self) -> None:
        self._chosen.abandon()
