"""Memory of trainer ranks that engine workers on their host read in place.

Every update a rank looks where its weights lie (`Lender.look`), and says so to the others if that
has changed (`Lending.share`).  The rank that holds a worker's session passes the descriptors of all
ranks' segments on to it, each once, and tells it where the buffers of its manifest lie in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence, Set
from typing import Any, Final, NamedTuple

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.deadline import Deadline
from wsync.machine.device import find
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

_NOTHING: Final = _core.BufferTable([])

# Whether "auto" lends memory of GPUs.  It would be about as fast, but what a worker has open the
# driver gives to nobody else, and trainers that share a GPU with engines count on giving it back.
GPUS_UNASKED = False

Segment = tuple[int, int]  # the rank whose it is, and its number there


class Bound(NamedTuple):
    """Where a buffer lies: the number of a segment of its rank, and the place in it."""

    segment: int
    offset: int
    nbytes: int


def buffers_of(layout: _core.Layout) -> set[int]:
    """The buffers that shards of a layout lie in."""
    return {shard.buffer for index in range(layout.tensor_count) for shard in layout.shards(index)}


# GPU memory that is no longer lent but that workers still have open, and the tensors in it: what
# workers would read after it is freed is undefined.
_open = list[tuple[_core.Memory, _core.BufferTable]]()


def _sweep() -> None:
    for kept in [each for each in _open if each[0].retire()]:
        with contextlib.suppress(ValueError):  # another thread has done so
            _open.remove(kept)


class Lender:
    """What one rank has to lend: where its buffers lie in shared memory, or in that of a GPU.

    layout: of this rank; names buffers in `obstacle`.
    wholly: for delivery="auto": it lends all of its buffers or none, and none where processes might
    not have descriptors enough.  ranks: trainer ranks on its host; each rank with sessions, and
    each worker, holds the segments of all of them.  own: how many buffers are the trainer's; the
    others are codes and scales, which can be mapped.
    """

    def __init__(
        self,
        layout: _core.Layout,
        rank: int,
        *,
        wholly: bool = False,
        ranks: int = 1,
        own: int | None = None,
    ) -> None:
        self._layout = layout
        self.wholly = wholly
        # quarters of its descriptors that a process may hold for what is lent
        self.quarters = 1 if wholly else 3
        self._ranks = ranks
        self._rank = rank
        self._own = own
        self._used = buffers_of(layout)
        self._maps = SharedMaps()
        self._allocations = GpuAllocations()
        self._numbers: dict[File | GpuSegment, int] = {}  # of the segments that hold buffers
        self._buffers = _NOTHING  # that lie in those of a GPU
        self._seen: object = None  # where that was, and what was around it
        self._next = 0
        self.segments: dict[int, _core.Memory] = {}  # kept: no other file takes such a number
        self.gpu = ""  # that they are on, "" for host memory
        self.places: list[Bound | None] = []  # by buffer; None for one that is empty or private
        self.obstacle = ""  # which tensors are private, and what can be done about that

    def close(self) -> None:
        self._maps.close()
        self._allocations.close()
        self.release()

    def release(self) -> None:
        """Lets go of all segments."""
        self._seen = None
        for source in list(self._numbers):
            self._drop(source)
        self._buffers = _NOTHING
        _sweep()

    def look(self, buffers: _core.BufferTable, gpu: str) -> None:
        """Finds out where the buffers lie now, and which of them other processes can map.

        gpu: the UUID of the GPU that some of them are on, "" where all are in host memory.
        """
        self.gpu = gpu
        _sweep()
        if gpu and self.wholly and not GPUS_UNASKED:
            self._lend_nothing(len(buffers), "")
            return
        around: Any = self._allocations if gpu else self._maps
        seen = gpu, buffers.spans(), around.read(buffers)
        if seen != self._seen:
            self._seen = None
            spans = [buffers[i] if i in self._used else (0, 0) for i in range(len(buffers))]
            if self._lend(around, spans):
                self._seen = seen
        self._buffers = buffers if gpu and self._numbers else _NOTHING

    def _lend(self, around: Any, spans: Sequence[tuple[int, int]]) -> bool:
        """False if what lies so is not lent."""
        found: Sequence[LentPlace | None] = around.find(spans)
        used = {place.source for place in found if place is not None}
        count = sum(source.descriptors for source in used)
        raise_descriptor_limit()  # also for what other ranks lend, which some ranks pass on
        if count > (most := self.quarters * most_segments(self._ranks)):
            only = "read in place only with Options(delivery='direct')"
            return self._lend_nothing(
                len(spans),
                f"rank {self._rank} has its weights in {count} pieces of shared memory, and "
                f"more than {most}, the ranks' share of {self.quarters}/4 of ulimit -Hn, are "
                f"{only if self.wholly else 'not lent'}",
            )
        try:
            borrowed = around.borrow(used - self._numbers.keys())
        except _core.WsyncError as error:
            if not self.wholly:
                raise
            text = f"rank {self._rank} cannot lend its weights: {error}"
            return self._lend_nothing(len(spans), text)
        for source, memory in borrowed.items():
            self._numbers[source], self.segments[self._next] = self._next, memory
            self._next += 1
        for source in self._numbers.keys() - used:
            self._drop(source)
        self.places = [
            Bound(self._numbers[place.source], place.offset, nbytes)
            if place is not None and place.source in self._numbers
            else None
            for place, (_, nbytes) in zip(found, spans, strict=True)
        ]
        pairs = zip(self.places, spans, strict=True)
        private = {i for i, (place, (_, nbytes)) in enumerate(pairs) if nbytes and not place}
        self.obstacle = self._name(private) if private else ""
        if private and self.wholly:
            way = f"{self.obstacle}; Options(delivery='direct') has them read the others so"
            return self._lend_nothing(len(spans), way if any(self.places[: self._own]) else "")
        return True

    def _lend_nothing(self, count: int, why: str) -> bool:
        self.release()
        self.places, self.obstacle = [None] * count, why
        return False

    def _drop(self, source: File | GpuSegment) -> None:
        number = self._numbers.pop(source, None)
        if number is not None:
            memory = self.segments.pop(number)
            if isinstance(source, GpuSegment) and not memory.retire():
                _open.append((memory, self._buffers))

    def _name(self, private: Set[int]) -> str:
        layout = self._layout
        names = [
            layout.tensor(index).name
            for index in range(layout.tensor_count)
            if any(shard.buffer in private for shard in layout.shards(index))
        ]
        way = (
            "make the model within wsync.exportable(), or leave their allocation to torch, which "
            "torch_memory_saver does not"
            if self.gpu
            else "call its tensors' share_memory_()"
        )
        return (
            f"{listed(names)}: rank {self._rank} has {len(private)} of {len(self.places)} "
            f"parameters in memory that no other process can map; {way}, for engines to read them "
            "in place"
        )


class Lending:
    """What the ranks know of each other's memory; all of them make one together, and call `share`
    once an update.

    homes: the ranks that hold sessions with workers; hosts: of every rank.
    """

    def __init__(
        self,
        group: TrainerGroup,
        lender: Lender,
        homes: Sequence[int],
        hosts: Sequence[int],
        options: Options,
    ) -> None:
        self._group = group
        self._lender = lender
        self._hosts = hosts
        self._host = hosts[group.rank]
        self._homes = [home for home in homes if hosts[home] == self._host]
        self._options = options
        self._told: list[Bound | None] | None = None  # where others know this rank's buffers
        self._passed: set[int] = set()  # segments that the homes have
        self.news = 0  # counts the calls of `share` that brought a change
        self.places: list[list[Bound | None]] = [[] for _ in range(group.size)]
        # what plans are made for: where each rank lends memory, and a byte for each of its buffers,
        # 1 where that can be read in place
        self.pattern = (("", b""),) * group.size
        self.obstacles = [""] * group.size
        self.segments: dict[Segment, _core.Memory] = {}

    def lent(self, host: int, reached: Sequence[str], counts: Sequence[int]) -> bytes:
        """For each buffer of all ranks, one rank after another: whether workers on a host that
        reach memory in these places can read it. counts: how many buffers each rank has."""
        found = b""
        for home, (place, lent), count in zip(self._hosts, self.pattern, counts, strict=True):
            near = lent if home == host and place in reached else b""
            found += near[:count].ljust(count, b"\0")
        return found

    @property
    def quarters(self) -> int:
        """Of its descriptors, that a worker may hold for what is lent to it."""
        return self._lender.quarters

    @property
    def pieces(self) -> int:
        """How many segments the ranks of this host lend."""
        near = [
            found
            for found, host in zip(self.places, self._hosts, strict=True)
            if host == self._host
        ]
        return sum(len({place.segment for place in found if place}) for found in near)

    @property
    def empty(self) -> bool:
        """Whether no rank lends anything."""
        return not any(any(lent) for _, lent in self.pattern)

    def share(self) -> None:
        """Tells all ranks where this one's buffers lie, if that has changed, and has the homes on
        its host map new segments."""
        mine, rank = None, self._group.rank
        new = sorted(self._lender.segments.keys() - self._passed)
        doors = dict[int, _core.Exporter]()
        try:
            if self._lender.places != self._told:
                others = [home for home in self._homes if home != rank] if new else []
                doors = {home: _core.Exporter(self._options.directory) for home in others}
                addresses = {home: door.address for home, door in doors.items()}
                mine = {
                    "place": place_of(self._lender.gpu, mps=find(self._lender.gpu).mps),
                    "places": self._lender.places,
                    "obstacle": self._lender.obstacle,
                    "new": new,
                    "addresses": addresses,
                }
            news = self._group.gather_json(mine)
            for owner, told in enumerate(news):
                if told is not None:
                    self._learn(owner, told, doors)
        finally:
            for door in doors.values():
                door.close()
        self._told = self._lender.places
        self._passed = set(self._lender.segments)
        self.news += any(told is not None for told in news)

    def release(self) -> None:
        """Lets go of what this rank holds of its own memory and of the others'."""
        self._lender.release()
        self.segments, self._passed, self._told = {}, set(), None

    def _learn(self, owner: int, told: Any, doors: dict[int, _core.Exporter]) -> None:
        """Takes in what one rank has told.  All take the ranks in the same order, so that no two
        wait for each other."""
        rank = self._group.rank
        self.places[owner] = [place and Bound(*place) for place in told["places"]]
        lent = bytes(place is not None for place in self.places[owner])
        known = (told["place"], lent)
        self.pattern = (*self.pattern[:owner], known, *self.pattern[owner + 1 :])
        self.obstacles[owner] = told["obstacle"]
        if owner == rank:
            self._pass(told["new"], doors)
            found = self._lender.segments
        elif rank in self._homes and self._hosts[owner] == self._hosts[rank]:
            address = told["addresses"].get(str(rank), "")
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
        """Hands the descriptors of new segments to the ranks that come for them."""
        check = self._group.check
        for door in doors.values():
            deadline = Deadline(self._options.deadline)
            door.accept(deadline.left, check)
            door.attach(_core.Memory(1), b"", deadline.left, check)
            for number in new:
                door.lend(self._lender.segments[number], deadline.left, check)
            door.begin(0, 0, deadline.left, check)

    def _fetch(self, address: str, new: Sequence[int]) -> dict[int, _core.Memory]:
        """The new segments of the rank that listens at an address, by their numbers."""
        deadline, check = Deadline(self._options.deadline), self._group.check
        session = _core.Importer(address, b"", deadline.left)
        try:
            session.begin(deadline.left, check)
            return dict(zip(new, session.segments, strict=True))
        finally:
            session.close()
