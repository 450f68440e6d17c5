"""An engine worker's part in updates over process groups, with SGLang's semantics."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    StateError,
)
from wsync.bucket import FlattenedTensorBucket, metadata_at
from wsync.exchange.update_group import Rendezvous, UpdateGroup, connection_of, device_of
from wsync.machine.deadline import Deadline, seconds
from wsync.messages.control import FLATTENED_BUCKET

BROADCAST_SECONDS: Final = 120.0
"""The most that a broadcast may take where an engine is not told otherwise: as many seconds as a
trainer waits for it by default.  SGLang has no such deadline of its own."""

Named = list[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class _Membership:
    group: UpdateGroup | None = None  # before all members have come


class UpdateGroups:
    """The groups that trainers had this worker join, by name.

    They are one trainer's: when the worker has joined one, it leaves all of other connections.  A
    group is also left when one of its broadcasts fails, or is not taken.

    rank: the worker's, in its engine.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._members: dict[str, _Membership] = {}

    def init(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        meeting: float,
        timeout: float = BROADCAST_SECONDS,
    ) -> None:
        """Joins a group; returns when all its members have.

        meeting: seconds until they have; timeout: the most seconds that a broadcast may take.

        Raises:
            DeadlineError: they have not.
            StateError: the worker has been called away.
        """
        if rank_offset < 1:
            raise InvalidArgumentError(f"rank_offset {rank_offset}: rank 0 is the trainer's")
        mine = _Membership()
        with self._lock:
            if self._members.setdefault(group_name, mine) is not mine:
                raise InvalidArgumentError(f"group {group_name}: this worker is in it")
        try:
            place = Rendezvous(master_address, master_port, world_size, backend, group_name)
            mine.group = place.join(
                rank_offset + self._rank,
                meeting,
                lambda: self._check(group_name, mine),
                device=device_of(backend),  # this thread's
                collective_timeout=timeout,
            )
            self._check(group_name, mine)
        except BaseException:
            self._leave(group_name, mine)
            raise
        for name, member in list(self._members.items()):
            if connection_of(name) != connection_of(group_name):
                self._leave(name, member)

    @contextmanager
    def announced(self, group_name: str) -> Iterator[None]:
        """Around what is done for one bucket that a trainer has announced.  The trainer sends it
        whatever becomes of the announcement: a worker that fails leaves the group, or it would take
        this bucket for the next one."""
        member = self._members.get(group_name)
        try:
            yield
        except BaseException:
            if member is not None:
                self._leave(group_name, member)
            raise

    def receive(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        timeout: float = math.inf,
    ) -> Named:
        """Takes one broadcast of a bucket, or one of each tensor; (name, tensor) in order.

        dtypes are torch's names.  A flattened bucket has no gaps, so that each tensor has to
        start at a multiple of its item size.  timeout: seconds, where the group's are more.
        """
        member = self._member(group_name)
        if not len(names) == len(dtypes) == len(shapes) or not names:
            raise InvalidArgumentError(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes"
            )
        if load_format not in (None, FLATTENED_BUCKET):
            raise InvalidArgumentError(f"load_format {load_format!r}: None or {FLATTENED_BUCKET!r}")
        metadata, start = [], 0
        for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
            entry = metadata_at(start, name, dtype_name, shape)
            if load_format and start % entry.dtype.itemsize:
                raise LayoutError(f"{name}: {dtype_name} at byte {start} of a bucket")
            metadata.append(entry)
            start = entry.end_idx
        flat = torch.empty(start, dtype=torch.uint8, device="cpu")
        each = [flat[entry.start_idx : entry.end_idx] for entry in metadata]
        self._broadcast(group_name, member, [flat] if load_format else each, timeout)
        return FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata).reconstruct_tensors()

    def _broadcast(
        self, name: str, member: _Membership, tensors: list[torch.Tensor], timeout: float
    ) -> None:
        assert member.group is not None
        deadline = Deadline(timeout)

        def check() -> None:
            self._check(name, member)
            if not deadline.left:
                raise DeadlineError(f"group {name}: a broadcast took over {seconds(timeout)}")

        try:
            member.group.broadcast(tensors, check)
        except BaseException:
            self._leave(name, member)
            raise

    def destroy(self, group_name: str) -> None:
        """Leaves a group; ends what is under way in it."""
        member = self._members.get(group_name) or self._member(group_name)
        self._leave(group_name, member)

    def _check(self, name: str, member: _Membership) -> None:
        if self._members.get(name) is not member:
            raise StateError(f"group {name!r}: this worker has left it")

    def _leave(self, name: str, member: _Membership) -> None:
        with self._lock:
            if self._members.get(name) is member:
                del self._members[name]
        if member.group is not None:
            member.group.close()

    def _member(self, name: str) -> _Membership:
        member = self._members.get(name)
        if member is None or member.group is None:
            raise InvalidArgumentError(
                f"group {name!r}: this worker is in none of that name; "
                "init_weights_update_group comes first"
            )
        return member
