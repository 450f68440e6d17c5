"""Loaders: how the rounds of an update get from the ring into an engine's parameters.

A loader belongs to one worker and is driven by wsync.engine.receiver.Receiver:

    attach(ring, manifest)   whenever the trainer has a new plan
    borrow(sources)          before `begin`: where the trainer's own memory lies, if it is lent
    begin(rounds)            once an update
    load(round)              for each round; it lies in the ring, or will when `stream` gets there
    finish(timeout)          all rounds were given: is everything there?
    confirm()                the update has been committed
    abandon()                where the update has failed, instead of finish or after it

The loaders here copy into a layout of the worker's (LayoutLoader) or to the tensors of a module by
name (ModuleLoader), or call a load_weights (CallingLoader).  RecordedLoader, in
wsync.engine.learn.recorded_loader, learns from load_weights where tensors go, and copies them there
directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from wsync.engine.destination import Destination, LoadTarget, NamedPlaces, named_tensors
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
    """What a worker has loaded: tensors of the manifest, and bytes that were delivered for them.
    audit_ns: how long it took to see that load_weights is what it was."""

    tensors: int
    nbytes: int
    audit_ns: int = 0


class RingManifest:
    """What will be delivered, by round."""

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
        """first: the number of round 0 among the buffers; those before it come with that round."""
        last = max(max(self.nbytes, default=-1) - first, 0 if first else -1)
        if last >= rounds:
            raise ProtocolError(f"update of {rounds} rounds: the manifest has {last + 1}")

    def views(self, round: int, device: Device) -> list[tuple[str, torch.Tensor]]:
        """The whole tensors of a round as they lie in the ring."""
        flat = _bytes_of(self.ring, device)
        return [
            (name, flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            for name, dtype, shape, at in self.whole.get(round, ())
        ]

    def receipt(self, loaded: Iterable[int]) -> Receipt:
        nbytes = sum(self.nbytes.get(round, 0) for round in loaded)
        return Receipt(self.layout.tensor_count, nbytes)


class _GpuBytes:
    """Memory of a GPU as CUDA's array interface has it, by which torch makes tensors."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory  # for as long as there are such tensors
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _bytes_of(memory: Memory, device: Device) -> torch.Tensor:
    if device.ordinal < 0:
        return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.as_tensor(_GpuBytes(memory), device=torch.device("cuda", device.ordinal))


class Loader:
    """What a Receiver needs.  Any exception fails the update and becomes its text.

    device: where the ring is to lie.
    stream: the one of that device that loads rounds; None: the thread that calls `load` does.
    borrows: whether it can copy out of the trainer's own memory.
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
        """Of a loader whose blob is control.LEARN: what the worker asks for of a model's tensors,
        as a blob.  `on_weights_lost` is called before the weights are touched, if they have to be,
        here or in the `begin` of an update."""
        raise NotImplementedError

    @property
    def own_loading(self) -> str:
        """Which tensors go through the engine's own loading, and why; "" for none."""
        return ""

    def attach(self, ring: Memory, manifest: Layout) -> None:
        """A new plan: round k's boxes are the shards of `manifest` with buffer k, their
        offsets count from the start of `ring`."""
        self._manifest = None
        self._manifest = RingManifest(ring, manifest)

    def borrow(self, sources: BufferTable | None) -> None:
        """Called before each `begin`: the first buffers of the manifest lie at these sources, and
        are loaded with round 0; those after them are the rounds.  None: all are rounds."""
        if sources is not None:
            raise UnsupportedError(
                f"{type(self).__name__} loads from a ring, and the trainer lends its memory"
            )

    def begin(self, rounds: int) -> None:
        self._attached().check_rounds(rounds)
        self._loaded = set()

    def load(self, round: int) -> None:
        """Loads a round; its slot is free when the stream gets here, or now."""
        self._attached()
        self._loaded.add(round)

    def finish(self, timeout: float) -> Receipt:
        """Waits until everything is loaded."""
        return self._attached().receipt(self._loaded)

    def confirm(self) -> None:
        """StateError where the module does not hold any more what the update was written to."""

    def abandon(self) -> None:
        """Returns when nothing more is written."""

    def facts(self) -> dict[str, Any]:
        """What it has learnt, for JSON; see wsync.inspection."""
        return {}

    def _attached(self) -> RingManifest:
        if self._manifest is None:
            raise StateError("no ring is attached")
        return self._manifest


def loading_stream(place: str, threads: int) -> Stream:
    """A stream of the GPU that weights are on, by its UUID; "" for weights in host memory, which
    another device may serve."""
    return Stream(threads, device.find(place or device.wanted()))


class RoutedLoader(Loader):
    """Copies boxes to where an update finds them, on a stream of its own.

    threads: of that stream.  While host memory is lent, a stream with one more thread is used,
    because trainer ranks then copy little or nothing.
    """

    borrows = True

    def __init__(self, stream: Stream, threads: int) -> None:
        super().__init__()
        self.device = stream.device
        self.stream = stream
        self._threads = threads
        self._streams: dict[bool, Stream] = {False: stream}  # by whether memory is lent
        self._route: Route | None = None
        self._boxes: Layout | None = None  # of what the route leads to
        self._sources = BufferTable([])
        self._borrowed: BufferTable | None = None  # the trainer's memory, beside the ring
        self._first = 0  # of the route's buffers that is a round
        self._destinations: BufferTable | None = None  # between `begin` and the last copy
        self._target: LoadTarget | None = None  # while an update runs

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._route = None
        super().attach(ring, manifest)

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

    def _aim(self, target: LoadTarget) -> None:
        """Sets where rounds are copied to from now on: parameters may move between updates.
        Called after check_rounds: until then the manifest's largest round number is unchecked.
        LayoutError where two tensors lie in the same memory."""
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
            raise StateError(f"round {round} before the update has begun")
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
        # no parameters are kept until the next update, and nothing of the trainer's
        self._destinations = self._borrowed = None
        self._target.complete()
        return receipt

    def confirm(self) -> None:
        """Only here is it checked where tensors lie: a check in `finish` would find nothing
        more."""
        target, self._target = self._target, None
        if target is not None:
            target.check_places()

    def abandon(self) -> None:
        assert self.stream is not None
        self.stream.abandon()  # it keeps what it still writes to
        self._target = self._destinations = self._borrowed = None


class LayoutLoader(RoutedLoader):
    """Loads the boxes of a worker that keeps fused or sharded parameters.

    layout: this worker's boxes; buffer i is tensors[i], offsets count from its first element.
    Only these boxes are asked of the trainer.  Every byte of them must be delivered exactly
    once; anything outside them (padding rows) is left alone.  The tensors may move between
    updates, but keep dtype, shape and strides: StateError.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], *, threads: int = 1
    ) -> None:
        if layout.buffer_count() > len(tensors):
            raise LayoutError(f"layout of {layout.buffer_count()} buffers, {len(tensors)} tensors")
        self._layout = layout
        self._tensors = list(tensors)
        table = Destination(layout, self._tensors).table
        self._form = table.form()
        super().__init__(loading_stream(device.of(table), threads), threads)

    def blob(self) -> bytes:
        return self._layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        target = Destination(self._layout, self._tensors)
        if (place := target.table.differs(self._form)) is not None:
            tensor = self._tensors[place]
            raise StateError(
                f"tensor {place}: {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}, and not what the layout was made for"
            )
        self._aim(target)


class ModuleLoader(RoutedLoader):
    """Copies tensors to the parameters and persistent buffers of the same names in a module.

    An unknown name and a parameter that is not delivered are errors.  Of names that stand for one
    tensor (a tied head) one is enough; further ones have to bring the same values.
    """

    def __init__(self, module: torch.nn.Module, *, threads: int = 1) -> None:
        super().__init__(loading_stream(device.of_module(module), threads), threads)
        self._module = module
        self._known: NamedPlaces | None = None  # of the last update by this plan

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


class _Copies(list[tuple[str, torch.Tensor]]):
    """What a load_weights is given: iterating makes the copies.  last: the name of what it has
    taken last."""

    last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().__iter__():
            self.last = name
            yield name, tensor.clone()


class CallingLoader(Loader):
    """Hands tensors to a load_weights, once a round or once an update.

    They are copies, each made when load_weights takes it, so that it may keep them.  A slot is
    given back once torch has done what load_weights asked for.

    load_weights: None for the one that the module has when it is called.
    at_once: call it once an update, with copies of all tensors in host memory, in this order.
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
        self._staged: dict[str, torch.Tensor] = {}  # what one call is to bring
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
            # a view of the host's memory has to be copied, too
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
        try:
            with torch.no_grad():  # as engines load, and not each method says
                method(copies)
        except WsyncError:
            raise
        except Exception as error:
            taken = f"; the last tensor that it had taken is {copies.last}" if copies.last else ""
            text = f"{who} raised{taken}: {error_text(error)}"
            raise RemoteError(f"{text}{unfused([copies.last])}") from error
        finally:
            copies.clear()  # of what was not taken, whoever keeps the list
            device.await_torch(self.device)


class ChoosingLoader(Loader):
    """A loader that has `_chosen`, another one, do the work."""

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

    def abandon(self) -> None:
        self._chosen.abandon()
