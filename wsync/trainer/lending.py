"""Memory of trainer ranks that engine workers on the same host read in place.

In every update each rank finds out where its weights are, and tells the other ranks if this has
changed.  The rank that holds a worker's session gives the worker the descriptors of all ranks'
segments, each once, and tells it where the buffers of its manifest are in these segments.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence, Set
from typing import Any, Final, NamedTuple

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.deadline import Deadline
from wsync.machine.device import KnownMemory, find, frees, of
from wsync.machine.lendable import (
    File,
    GpuAllocations,
    GpuSegment,
    LentPlace,
    SharedMaps,
    most_segments,
    place_of,
    raise_descriptor_limit,
)
from wsync.module_tensors.names import listed
from wsync.options import Options
from wsync.trainer.roster import Roster

_log = logging.getLogger(__name__)
_NOTHING: Final = _core.BufferTable([])

Segment = tuple[int, int]  # the rank that owns it, and its number there


class Bound(NamedTuple):
    """Where a buffer is in lent memory: the number that its rank gave the segment, and the offset
    and size in that segment."""

    segment: int
    offset: int
    nbytes: int


def buffers_of(layout: _core.Layout) -> set[int]:
    """The buffers that hold a layout's shards."""
    return {shard.buffer for index in range(layout.tensor_count) for shard in layout.shards(index)}


# GPU memory that is no longer lent but that workers still have open, and the tensors in it.  They
# are kept, because workers could read anything from freed memory.
_open = list[tuple[_core.Memory, _core.BufferTable]]()


def _sweep() -> None:
    for kept in [each for each in _open if each[0].retire()]:
        with contextlib.suppress(ValueError):  # another thread has removed it
            _open.remove(kept)


class Lending:
    """The memory that ranks lend to workers on their hosts.  All ranks make a `Lending` together,
    and call `share` once in every update.

    layout: this rank's layout; tells the names of tensors that cannot be lent.
    roster: tells the ranks' hosts, and the ranks that hold sessions with workers.
    wholly: for delivery="auto": a rank lends all its buffers or none, and no GPU memory.  Lending
    GPU memory would not make updates much faster.  It would keep a trainer that shares the GPU
    with engines from freeing memory, because workers have this memory open.
    """

    def __init__(
        self, layout: _core.Layout, rank: int, roster: Roster, options: Options, *, wholly: bool
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._hosts = roster.hosts
        self._host = roster.hosts[rank]
        homes = sorted({worker.served_by for worker in roster.workers})
        self._homes = [home for home in homes if self._hosts[home] == self._host]
        self._options = options
        self._wholly = wholly
        self._used = buffers_of(layout)
        self._known = KnownMemory()
        self._maps = SharedMaps()
        self._allocations = GpuAllocations()
        self._numbers: dict[File | GpuSegment, int] = {}  # of segments with buffers
        self._own: dict[int, _core.Memory] = {}  # segments by number; numbers are not used again
        self._forget()
        self._frees: int | None = None  # `frees` before `bind` asked the driver
        self._seen: object = None  # the last addresses, and the memory around them
        self._next = 0
        self._bounds: list[Bound | None] = []  # by buffer; None for an empty or private one
        self._obstacle = ""  # which tensors are private, and what can be done about that

    def close(self) -> None:
        self._maps.close()
        self.release()

    def reset(self, group: TrainerGroup) -> None:
        """Forgets what ranks have told each other; called before they make a connection."""
        self.release()
        self._group = group
        self.news = 0  # counts the calls of `share` that brought a change
        self.places: list[list[Bound | None]] = [[] for _ in range(group.size)]
        # plans depend on this: the place where each rank lends memory, and a byte for each of its
        # buffers, 1 if the buffer can be read in place
        self.pattern = (("", b""),) * group.size
        self.obstacles = [""] * group.size

    def release(self) -> None:
        """Releases the lent memory that this rank holds, its own and that of other ranks."""
        self._let_go()
        self._allocations.close()
        self._passed: set[int] = set()  # own segments that other ranks have got
        self._told: list[Bound | None] | None = None  # `_bounds` as other ranks know them
        self.segments: dict[Segment, _core.Memory] = {}  # of all ranks, to give to workers

    def _let_go(self) -> None:
        self._seen = None
        for source in list(self._numbers):
            self._drop(source)
        self._forget()
        _sweep()

    def _forget(self) -> None:
        self._buffers = _NOTHING  # with the tensors in lent GPU memory
        self.table: _core.TensorTable | None = None  # of these tensors

    def bind(self, table: _core.TensorTable) -> _core.BufferTable:
        """Returns the buffers that the tensors of a table lie in.

        Asks the driver nothing if the table is the last update's, all in memory of cudaMalloc.  Its
        tensors have been kept since, so that only a storage's resize_ can have returned memory to
        torch; and torch has freed none.
        """
        if self._wholly:
            return self._known.bind(table)
        now = frees(table.gpu)
        if table is self.table and now is not None and now == self._frees:
            return self._buffers
        buffers = _core.BufferTable.of(table)
        self.table, self._frees = None, now if buffers.malloced else None
        return buffers

    def _look(self, buffers: _core.BufferTable, table: _core.TensorTable) -> None:
        """Finds out where the buffers are now, and which of them other processes can map."""
        _sweep()
        if buffers is self._buffers:
            return
        gpu = of(table)
        if gpu and self._wholly:
            self._lend_nothing(len(buffers))
            return
        around: Any = self._allocations if gpu else self._maps
        seen = gpu, buffers.spans(), around.read(buffers)
        if seen != self._seen:
            self._seen = None
            spans = [buffers[i] if i in self._used else (0, 0) for i in range(len(buffers))]
            try:
                self._lend(around, spans, gpu)
                self._seen = seen
            except _core.WsyncError as error:
                if not self._wholly:
                    raise
                _log.debug("wsync: all weights go through rings: %s", error)
                self._lend_nothing(len(spans))
        if gpu and self._numbers:
            self._buffers, self.table = buffers, table
        else:
            self._forget()

    def _lend(self, around: Any, spans: Sequence[tuple[int, int]], gpu: str) -> None:
        found: Sequence[LentPlace | None] = around.find(spans)
        used = {place.source for place in found if place is not None}
        count = sum(source.descriptors for source in used)
        raise_descriptor_limit()  # also for other ranks' segments, which some ranks pass on
        if count > (most := most_segments(self._hosts.count(self._host))):
            text = (
                f"rank {self._rank} has weights in {count} pieces of shared memory, and can lend "
                f"only {most} (its share of half of `ulimit -Hn` and vm.max_map_count)"
            )
            if self._wholly:
                raise _core.UnsupportedError(text)
            self._lend_nothing(len(spans), text)
            return
        borrowed = around.borrow(used - self._numbers.keys())
        for source, memory in borrowed.items():
            self._numbers[source], self._own[self._next] = self._next, memory
            self._next += 1
        for source in self._numbers.keys() - used:
            self._drop(source)
        self._bounds = [
            Bound(self._numbers[place.source], place.offset, nbytes)
            if place is not None and place.source in self._numbers
            else None
            for place, (_, nbytes) in zip(found, spans, strict=True)
        ]
        pairs = zip(self._bounds, spans, strict=True)
        private = {i for i, (place, (_, nbytes)) in enumerate(pairs) if nbytes and not place}
        self._obstacle = self._name(private, gpu) if private else ""
        if private and self._wholly:
            raise _core.UnsupportedError(self._obstacle)

    def _lend_nothing(self, count: int, obstacle: str = "") -> None:
        self._let_go()
        self._bounds, self._obstacle = [None] * count, obstacle

    def _drop(self, source: File | GpuSegment) -> None:
        number = self._numbers.pop(source, None)
        if number is not None:
            memory = self._own.pop(number)
            if isinstance(source, GpuSegment) and not memory.retire():
                _open.append((memory, self._buffers))

    def _name(self, private: Set[int], gpu: str) -> str:
        layout = self._layout
        names = [
            layout.tensor(index).name
            for index in range(layout.tensor_count)
            if any(shard.buffer in private for shard in layout.shards(index))
        ]
        way = (
            "make the model within wsync.exportable(), or let torch allocate it without "
            "torch_memory_saver"
            if gpu
            else "call share_memory_() of the model's tensors"
        )
        return (
            f"{listed(names)}: rank {self._rank} has {len(private)} of {len(self._bounds)} "
            f"parameters in memory that no other process can map; for engines to read them in "
            f"place, {way}"
        )

    def lent(self, host: int, reached: Sequence[str], counts: Sequence[int]) -> bytes:
        """One byte for each buffer of all ranks, in the order of ranks: 1 if workers on a host that
        reach memory in these places can read it.  counts: the number of each rank's buffers."""
        found = b""
        for home, (place, lent), count in zip(self._hosts, self.pattern, counts, strict=True):
            near = lent if home == host and place in reached else b""
            found += near[:count].ljust(count, b"\0")
        return found

    @property
    def pieces(self) -> int:
        """How many segments the ranks of this host lend."""
        return sum(
            len({place.segment for place in found if place})
            for found, host in zip(self.places, self._hosts, strict=True)
            if host == self._host
        )

    def share(self, buffers: _core.BufferTable, table: _core.TensorTable) -> bool:
        """Tells all ranks where this rank's buffers are, if that has changed; gives new segments to
        the ranks on its host that hold sessions.  Returns whether a new plan is needed.

        buffers: what `bind` returns for this table.
        """
        self._look(buffers, table)
        mine, former = None, self.pattern
        new = sorted(self._own.keys() - self._passed)
        doors = dict[int, _core.Exporter]()
        try:
            if self._bounds != self._told:
                others = [home for home in self._homes if home != self._rank] if new else []
                doors = {home: _core.Exporter(self._options.directory) for home in others}
                gpu = of(table)
                mine = {
                    "place": place_of(gpu, mps=find(gpu).mps),
                    "places": self._bounds,
                    "obstacle": self._obstacle,
                    "new": new,
                    "addresses": {home: door.address for home, door in doors.items()},
                }
            news = self._group.gather_json(mine)
            for owner, told in enumerate(news):
                if told is not None:
                    self._learn(owner, told, doors)
        finally:
            for door in doors.values():
                door.close()
        self._told = self._bounds
        self._passed = set(self._own)
        self.news += any(told is not None for told in news)
        return self.pattern != former

    def _learn(self, owner: int, told: Any, doors: dict[int, _core.Exporter]) -> None:
        """Processes what one rank has told.  All ranks process each other's facts in the same
        order, so that no two ranks wait for each other."""
        self.places[owner] = [place and Bound(*place) for place in told["places"]]
        lent = bytes(place is not None for place in self.places[owner])
        known = (told["place"], lent)
        self.pattern = (*self.pattern[:owner], known, *self.pattern[owner + 1 :])
        self.obstacles[owner] = told["obstacle"]
        if owner == self._rank:
            self._pass(told["new"], doors)
            found = self._own
        elif self._rank in self._homes and self._hosts[owner] == self._host:
            address = told["addresses"].get(str(self._rank), "")
            found = self._fetch(address, told["new"]) if told["new"] else {}
        else:
            return
        held = {place.segment for place in self.places[owner] if place is not None}
        self.segments = {
            segment: memory
            for segment, memory in self.segments.items()
            if segment[0] != owner or segment[1] in held
        } | {(owner, number): found[number] for number in told["new"] if number in held}

    def _pass(self, new: Sequence[int], doors: dict[int, _core.Exporter]) -> None:
        """Gives the descriptors of new segments to the ranks that connect for them."""
        check = self._group.check
        for door in doors.values():
            deadline = Deadline(self._options.deadline)
            door.accept(deadline.left, check)
            door.attach(_core.Memory(1), b"", deadline.left, check)
            for number in new:
                door.lend(self._own[number], deadline.left, check)
            door.begin(0, 0, deadline.left, check)

    def _fetch(self, address: str, new: Sequence[int]) -> dict[int, _core.Memory]:
        """Gets the new segments, by number, from the rank that listens at an address."""
        deadline, check = Deadline(self._options.deadline), self._group.check
        session = _core.Importer(address, b"", deadline.left)
        try:
            session.begin(deadline.left, check)
            return dict(zip(new, session.segments, strict=True))
        finally:
            session.close()
