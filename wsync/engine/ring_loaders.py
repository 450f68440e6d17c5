"""Loaders: how the rounds of an update get from the ring into an engine's parameters.

A loader belongs to one worker and is driven by wsync.engine.receiver.Receiver:

    attach(ring, manifest)   whenever the trainer has a new plan
    begin(rounds)            once an update
    load(round)              for each round; it lies in the ring, or will when `stream` gets there
    finish(timeout)          all rounds were given: is everything there?
    abandon()                where the update has failed, instead of finish or after it

The loaders here copy into a layout of the worker's (LayoutLoader) or to the tensors of a module by
name (ModuleLoader), or call a load_weights.  RecordedLoader, which learns from load_weights where
tensors go and copies them there directly, is in wsync.engine.learn.loader.
"""

import contextlib
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
    ViewPool,
    WsyncError,
    describe,
)
from wsync.engine.destination import (
    Boxes,
    Destination,
    HeldMemory,
    LoadTarget,
    OtherName,
    aliases,
)
from wsync.machine import device
from wsync.machine.error_text import error_text
from wsync.messages.control import PIECES, WHOLE
from wsync.module_tensors import checksum_of, dtype_of
from wsync.module_tensors.names_in_messages import listed, unfused
from wsync.module_tensors.tree import ModuleTree

_log = logging.getLogger(__name__)

Losing = Callable[[], object]
LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], Any]
# tensors that are loaded to one place, by name: the first of them, and the place's dtype
Twins = dict[str, tuple[str, torch.dtype]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker has loaded: tensors of the manifest, bytes that were delivered for them, and
    a checksum (0: not computed)."""

    tensors: int
    nbytes: int
    checksum: int = 0


class Loader(Protocol):
    """What a Receiver needs.  Any exception fails the update and becomes its text."""

    @property
    def device(self) -> Device:
        """Where the ring is to lie."""

    @property
    def stream(self) -> Stream | None:
        """The stream of that device that loads rounds; None: the thread that calls `load` does."""

    def blob(self) -> bytes:
        """The worker's layout in bytes, or control.WHOLE, PIECES or LEARN."""

    def attach(self, ring: Memory, manifest: Layout) -> None:
        """A new plan: round k's boxes are the shards of `manifest` with buffer k, their
        offsets count from the start of `ring`."""

    def begin(self, rounds: int) -> None: ...
    def load(self, round: int) -> None:
        """Loads a round; its slot is free when the stream gets here, or now."""

    def finish(self, timeout: float) -> Receipt:
        """Waits until everything is loaded; raises if a parameter was not delivered."""

    def abandon(self) -> None:
        """Returns when nothing more is written."""


@runtime_checkable
class Borrows(Protocol):
    """A loader that can copy out of the trainer's own memory."""

    def borrow(self, sources: BufferTable | None) -> None:
        """Called before each `begin`: the first buffers of the manifest lie at these sources, and
        are loaded with round 0; those after them are the rounds.  None: all are rounds."""


@runtime_checkable
class Learner(Protocol):
    """A loader whose blob is control.LEARN."""

    def learn(self, model: Layout, losing: Losing) -> bytes:
        """What the worker asks for of a model's tensors, as a blob.  `losing` is called before
        the weights are touched, if they have to be, here or in the `begin` of an update."""

    @property
    def own_loading(self) -> str:
        """Which tensors go through the engine's own loading, and why; "" for none."""


def keeps() -> None:
    """A `losing` that does nothing."""


@runtime_checkable
class Confirms(Protocol):
    """A loader that notices what happens to a module between `finish` and the commit."""

    def confirm(self) -> None:
        """Called when the update has been committed.  StateError where the module does not hold
        any more what the update was written to."""


@runtime_checkable
class Describes(Protocol):
    """A loader that can say what it has learnt."""

    def facts(self) -> dict[str, Any]:
        """See wsync.inspection; for JSON."""


class RingManifest:
    """What will be delivered, by round."""

    def __init__(self, ring: Memory, layout: Layout) -> None:
        self.ring = ring
        self.layout = layout
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nbytes: dict[int, int] = {}  # by round
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

    def check_rounds(self, rounds: int, first: int = 0) -> None:
        """first: the number of round 0 among the buffers; those before it come with that round."""
        last = max(max(self.nbytes, default=-1) - first, 0 if first else -1)
        if last >= rounds:
            raise ProtocolError(f"update of {rounds} rounds: the manifest has {last + 1}")

    def receipt(self, loaded: Iterable[int]) -> Receipt:
        nbytes = sum(self.nbytes.get(round, 0) for round in loaded)
        return Receipt(self.layout.tensor_count, nbytes)


class _Loading:
    """What loaders keep of a plan, and of one update."""

    def __init__(self) -> None:
        self._manifest: RingManifest | None = None
        self._loaded: set[int] = set()

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._manifest = None
        self._manifest = RingManifest(ring, manifest)

    def begin(self, rounds: int) -> None:
        self._attached().check_rounds(rounds)
        self._loaded = set()

    def load(self, round: int) -> None:
        self._attached()
        self._loaded.add(round)

    def finish(self, timeout: float) -> Receipt:
        return self._attached().receipt(self._loaded)

    def _attached(self) -> RingManifest:
        if self._manifest is None:
            raise StateError("no ring is attached")
        return self._manifest


def loading_stream(place: str, threads: int) -> Stream:
    """A stream of the GPU that weights are on, by its UUID; "" for weights in host memory, which
    another device may serve."""
    return Stream(threads, device.find(place or device.wanted()))


class RoutedLoader(_Loading):
    """Copies boxes to where an update finds them, on a stream of its own.

    threads: of that stream.  While host memory is lent, a stream with one more thread is used,
    because trainer ranks then copy little or nothing.
    """

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
        if self._route is None or self._boxes is None:
            manifest, self._boxes = self._attached(), target.layout()
            self._route, ring = Route(manifest.layout, self._boxes), manifest.ring
            self._sources = BufferTable(
                [(ring.address, ring.nbytes)] * self._route.buffer_count, ring
            )
        destinations = target.buffers()
        self._boxes.check_apart(destinations)
        self._target, self._destinations = target, destinations

    def load(self, round: int) -> None:
        if self._route is None or self._destinations is None:
            raise StateError(f"round {round} before the update has begun")
        if self._borrowed is not None and round == 0:
            self._loaded.update(range(self._first))
            self.stream.copy(self._route, ALL_BUFFERS, LOCAL, self._borrowed, self._destinations)
        buffer = self._first + round
        super().load(buffer)
        if buffer < self._route.buffer_count:
            self.stream.copy(self._route, buffer, LOCAL, self._sources, self._destinations)

    def finish(self, timeout: float) -> Receipt:
        receipt = super().finish(timeout)
        assert self._target is not None
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
        self.stream.abandon()  # it keeps what it still writes to
        self._target = self._destinations = self._borrowed = None


class LayoutLoader(RoutedLoader):
    """Loads the boxes of a worker that keeps fused or sharded parameters.

    layout: this worker's boxes; buffer i is tensors[i], offsets count from its first element.
    Only these boxes are asked of the trainer.  Every byte of them must be delivered exactly
    once; anything outside them (padding rows) is left alone.  The tensors may move between
    updates, but keep dtype, shape and strides: StateError.

    Raises:
        LayoutError: a box is none of its tensor: one of uint8 may hold any dtype, a contiguous one
            any order of axes; others are followed along their axes in their order.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], *, threads: int = 1
    ) -> None:
        if layout.buffer_count() > len(tensors):
            raise LayoutError(f"layout of {layout.buffer_count()} buffers, {len(tensors)} tensors")
        self._layout = layout
        self._tensors = list(tensors)
        table = Boxes(layout, self._tensors).table
        self._form = table.form()
        super().__init__(loading_stream(device.of(table), threads), threads)

    def blob(self) -> bytes:
        return self._layout.to_bytes()

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        self._aim(Boxes(self._layout, self._tensors, self._form))


class ChoosingLoader:
    """A loader that has `_chosen`, another one, do the work."""

    _chosen: Loader

    @property
    def device(self) -> Device:
        return self._chosen.device

    @property
    def stream(self) -> Stream | None:
        return self._chosen.stream

    def blob(self) -> bytes:
        return self._chosen.blob()

    def attach(self, ring: Memory, manifest: Layout) -> None:
        self._chosen.attach(ring, manifest)

    def borrow(self, sources: BufferTable | None) -> None:
        if isinstance(self._chosen, Borrows):
            self._chosen.borrow(sources)
        elif sources is not None:
            raise UnsupportedError("whole tensors are loaded here, which lent memory need not hold")

    def begin(self, rounds: int) -> None:
        self._chosen.begin(rounds)

    def load(self, round: int) -> None:
        self._chosen.load(round)

    def finish(self, timeout: float) -> Receipt:
        return self._chosen.finish(timeout)

    def confirm(self) -> None:
        if isinstance(self._chosen, Confirms):
            self._chosen.confirm()

    def abandon(self) -> None:
        self._chosen.abandon()


class ModuleLoader(ChoosingLoader):
    """Loads whole tensors into a torch module.

    If the module has a `load_weights` method (or one is given) it is called once a round with
    [(name, tensor)], the tensors being views of the ring that it must not keep; a loader that
    keeps them is named in a warning and gets copies from then on.  Its answer, where it is a set
    of parameter names (vLLM's convention), is used to check that every parameter was loaded.
    at_once: it is called once an update instead, with copies of all tensors in host memory, in
    this order.  Tensors that it binds anew stay where it puts them; RecordedLoader has the memory
    that was there take their values, which captured CUDA graphs read.

    Otherwise tensors are copied to the module's parameters and persistent buffers of the same
    name: an unknown name and a parameter that is not delivered are errors.  Names that stand for
    one tensor (a tied head) count as one.  ignore: names that may be unknown or missing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        at_once: Sequence[str] = (),
        ignore: Iterable[str] = (),
        threads: int = 1,
    ) -> None:
        method = load_weights if load_weights is not None else getattr(module, "load_weights", None)
        self._chosen = (
            _ByName(module, frozenset(ignore), threads)
            if method is None
            else _ByCall(module, load_weights, frozenset(ignore), tuple(at_once))
        )

    def compare(self, twins: Twins) -> None:
        """Has each update raise LayoutError where tensors that are loaded to one place differ."""
        if isinstance(self._chosen, _ByCall):
            self._chosen.twins = twins

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Around what the engine does after load_weights and may replace the module's tensors."""
        chosen = self._chosen
        return chosen.loading() if isinstance(chosen, _ByCall) else contextlib.nullcontext()


class _ByName(RoutedLoader):
    """Copies tensors to the parameters and buffers of the same name."""

    def __init__(self, module: torch.nn.Module, ignore: frozenset[str], threads: int) -> None:
        super().__init__(loading_stream(device.of_module(module), threads), threads)
        self._module = module
        self._ignore = ignore
        self._found: _Found | None = None
        self._table = describe([]).form()  # of the tensors that the route leads to

    def blob(self) -> bytes:
        return PIECES

    def begin(self, rounds: int) -> None:
        """Finds the parameters as they are now: they may be replaced, move, come apart or change
        their strides between updates, which is rare and has to be noticed at little cost."""
        super().begin(rounds)
        target = self._found.again() if self._found is not None and self._route else None
        if target is None:
            target = Destination.of(self._module, self._attached().shapes, self._ignore)
            found = _Found(self._module, target)
            if self._found is None or self._found.names != found.names:
                self._route = None
            self._found = found
        if target.table.differs(self._table) is not None:
            self._table, self._route = target.table.form(), None
        self._aim(target)


class _Found:
    """What a Destination was made of, to make the same one again without the module's state_dict;
    keeps no tensors."""

    def __init__(self, module: torch.nn.Module, target: Destination) -> None:
        assert target.snapshot is not None
        self._asks = _has_own_state_dict(module)
        self.names = target.names, [(twin.name, twin.first) for twin in target.twins]
        self._snapshot = target.snapshot
        tensors = [*target.tensors, *(twin.tensor for twin in target.twins)]
        places = {id(t): place for place, t in enumerate(self._snapshot.tensors() or [])}
        # where a state_dict of the module's own making gives others, it is asked each time
        self._places = [places.get(id(tensor), -1) for tensor in tensors]
        self._in_order = self._places == list(range(len(places)))
        table = describe(tensors, gpu=True) if target.twins else target.table
        self._form = table.form()

    def again(self) -> Destination | None:
        """None: the module, or the memory of a tensor, is not what it was."""
        held = None if self._asks or -1 in self._places else self._snapshot.tensors()
        if held is None:
            return None
        tensors = held if self._in_order else [held[place] for place in self._places]
        names, pairs = self.names
        if not pairs:
            found = Destination(names, tensors, (), self._snapshot, self._form)
            return found if found.table.known else None
        if self._form.moved(tensors) is not None:
            return None
        twins = [
            OtherName(*pair, tensor)
            for pair, tensor in zip(pairs, tensors[len(names) :], strict=True)
        ]
        return Destination(names, tensors[: len(names)], twins, self._snapshot)


def _has_own_state_dict(module: torch.nn.Module) -> bool:
    """Whether some part of it overrides state_dict: a name may then be that of another tensor each
    time, as with weights that are buffered twice."""
    methods = "state_dict", "_save_to_state_dict"
    return any(
        part._state_dict_hooks
        or part._state_dict_pre_hooks
        or any(
            name in vars(part) or getattr(type(part), name) is not getattr(torch.nn.Module, name)
            for name in methods
        )
        for part in module.modules()
    )


class _Given(list[tuple[str, torch.Tensor]]):
    """What a load_weights is given.  last: the name of what it has taken last."""

    last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.last = pair[0]
            yield pair


class _ByCall(_Loading):
    """Hands views of the ring to a load_weights method.

    It is called once a round has arrived, and the slot is given back once torch has done what it
    asked for.  So it is on a GPU, too: whatever runs in between may wait for the device.

    A call may give the module other tensors, and put them elsewhere.  What does so after the first
    call, in between or before the commit, takes away what was loaded: StateError.
    """

    stream = None

    def __init__(
        self,
        module: torch.nn.Module,
        given: LoadWeights | None,
        ignore: frozenset[str],
        at_once: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._module = module
        self._given = given  # None: what the module has when an update begins
        self._method = self._current()
        self._at_once = at_once
        self._staged: dict[str, torch.Tensor] = {}  # what one call is to bring
        self._ignore = ignore
        self.device = device.find(device.of_module(module))
        self._like = torch.empty(0, device="cpu")
        self._pool: ViewPool | None = None
        self._keeps: bool | None = None  # unknown until a round was watched
        self._named: set[str] | None = None
        self.twins: Twins = {}  # what the module's own names do not show
        self._tied: Twins = {}
        self._sums: dict[str, tuple[str, int]] = {}  # of those tensors, and the name it came by
        self._held: HeldMemory | None = None  # since the last call of the update
        self._snapshot: ModuleTree | None = None  # of the last of these

    def blob(self) -> bytes:
        return WHOLE

    def attach(self, ring: Memory, manifest: Layout) -> None:
        super().attach(ring, manifest)
        self._pool = ViewPool(ring)

    def begin(self, rounds: int) -> None:
        """What the loader does with its tensors is not known; those that go by the name and shape
        of a parameter must not lie in one place."""
        super().begin(rounds)
        self._named, self._sums, self._staged, self._held = None, {}, {}, None
        if (method := self._current()) != self._method:
            self._method, self._keeps = method, None
        shapes = self._attached().shapes
        state = {
            name: tensor
            for name, tensor in itertools.chain(
                self._module.named_parameters(remove_duplicate=False),
                self._module.named_buffers(remove_duplicate=False),
            )
            if name in shapes and shapes[name] == tuple(tensor.shape)
            if tensor.numel() and not tensor.is_meta
        }
        groups = aliases(state)
        self._tied = self.twins | {
            name: (group[0], state[group[0]].dtype)
            for group in groups
            if len(group) > 1
            for name in group
        }
        kept = Destination([g[0] for g in groups], [state[g[0]] for g in groups])
        layout, buffers = kept.layout(), kept.buffers()
        layout.check_apart(buffers)

    def _current(self) -> LoadWeights:
        method: Any = self._module.load_weights if self._given is None else self._given
        return method  # type: ignore[no-any-return]

    def _compare(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """LayoutError where names of one tensor bring different values."""
        for name, tensor in pairs:
            if name not in self._tied:
                continue
            first, dtype = self._tied[name]
            sum = checksum_of(tensor.to(dtype))
            other, known = self._sums.setdefault(first, (name, sum))
            if known != sum:
                raise LayoutError(
                    f"{name} and {other} are one tensor of the module, and {name} brings other "
                    "values"
                )

    def load(self, round: int) -> None:
        super().load(round)
        manifest = self._attached()
        assert self._pool is not None
        if round not in manifest.nbytes:
            return
        if self._at_once:
            views = self._pool.views(self._like, manifest.layout, round)
            # a view of the host's memory has to be copied, too
            self._staged |= {name: view.to("cpu", copy=True) for name, view in views}
            return
        pairs = self._pool.views(self._like, manifest.layout, round)
        if self._keeps is not False:
            pairs = [(name, view.clone()) for name, view in pairs]
        memory: list[Any] | None = None
        if self._keeps is None:  # found out without harm by the first round, which is copies
            weak: Any = StorageWeakRef
            memory = [weak(tensor.untyped_storage()) for _, tensor in pairs]
        self._call(pairs)
        del pairs
        if memory or self._pool.live:
            gc.collect()  # garbage in reference cycles does not count
        if memory is not None:
            kept = sum(not each.expired() for each in memory)
            self._note_kept(kept, len(memory))
        elif kept := self._pool.live:
            # too late for this round: its slot cannot be given back under the loader's feet
            self._keeps = True
            raise StateError(
                f"{self._who()} keeps {kept} tensors of round {round} after it has returned; "
                "the update is given up, the next one will be given copies"
            )

    def finish(self, timeout: float) -> Receipt:
        receipt, manifest = super().finish(timeout), self._attached()
        empty = [
            (name, torch.empty(manifest.shapes[name], dtype=dtype_of(dtype), device="cpu"))
            for name, dtype in manifest.empty
        ]
        if self._at_once:
            staged, self._staged = self._staged | dict(empty), {}
            self._call([(name, staged[name]) for name in self._at_once if name in staged])
        elif empty:
            self._call(empty)
        if self._named is None:
            return receipt
        names: dict[int, list[str]] = {}  # parts that share a parameter have it by several
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        told = self._named | self._ignore
        if missing := {group[0] for group in names.values() if told.isdisjoint(group)}:
            raise LayoutError(f"{listed(missing)}: not loaded by {self._who()}")
        return receipt

    def confirm(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.check()

    def abandon(self) -> None:
        """Nothing is kept from one update to the next."""
        self._staged, self._held = {}, None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around what may replace the module's tensors, whose memory is not kept meanwhile."""
        self.confirm()
        yield
        self._held = HeldMemory(self._module, self._snapshot)
        self._snapshot = self._held.snapshot

    def _note_kept(self, kept: int, given: int) -> None:
        self._keeps = kept > 0
        if self._keeps:
            _log.warning(
                "%s keeps tensors after it has returned (%d of %d); it gets copies, which cost "
                "time and memory",
                self._who(),
                kept,
                given,
            )

    def _call(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._compare(pairs)
        given = _Given(pairs)
        try:
            # engines load under no_grad, and not each method says so
            with self.loading(), torch.no_grad():
                answer = self._method(given)
        except WsyncError:
            raise
        except Exception as error:
            taken = f"; the last tensor that it had taken is {given.last}" if given.last else ""
            text = f"{self._who()} raised{taken}: {error_text(error)}"
            raise RemoteError(f"{text}{unfused([given.last])}") from error
        finally:
            device.await_torch(self.device)
        if isinstance(answer, set | frozenset):
            self._named = (self._named or set()) | answer

    def _who(self) -> str:
        return getattr(self._method, "__qualname__", None) or type(self._method).__qualname__
