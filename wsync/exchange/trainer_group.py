"""Collectives of all trainer ranks that can be given up, and that raise one error on all ranks.

The first rank that fails publishes its error in the process group's store.  Every wait looks there
about every 50 ms, so all ranks raise the same error soon after.

While the process that hosts the store is stopped, calls of the store do not return, whatever their
timeout.  So a thread makes these calls, and a wait looks at the answer to the last call.  A caller
that needs an answer waits for it as long as it would wait for another rank.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist

from wsync import _core
from wsync.exchange.polled_collectives import Collectives, first_line
from wsync.layout import Members
from wsync.machine.daemon_threads import WorkerThread, result
from wsync.machine.deadline import POLL_SECONDS, VERDICT_SECONDS, Check, Deadline, seconds
from wsync.machine.error_text import error_text
from wsync.machine.host import has_ended, host_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_MORE_SECONDS: Final = 10.0  # added to a deadline, for gloo's own or for a store's last answer
_SIZE_NBYTES: Final = 8
_STORE_GONE: Final = (
    "the process that hosts the trainer's store gives no answer: it is gone, stuck or stopped"
)
_T = TypeVar("_T")


class TrainerGroup:
    """All ranks of a trainer, with a gloo communicator of their own.

    Every rank makes a group at the same time.  Without an initialised process group, or if the
    group has a single rank, nothing is communicated.

    `name` is hex, new each time, and the same on all ranks.  `hosts` identifies each rank's host.
    `collectives` is None if nothing is communicated.

    Args:
        group: the ranks that take part.  None stands for the default process group.
        timeout: seconds after which a collective has failed.
        meeting: a name that all ranks know; only ranks that give the same name meet.

    Raises:
        DeadlineError: not all ranks made a group; the text names the ranks that did not.
        PeerClosedError: a rank has ended since.  An error that a rank has published is raised, too.
    """

    def __init__(
        self, group: ProcessGroup | Members | None = None, *, timeout: float, meeting: str = ""
    ) -> None:
        self.timeout = timeout
        self.closed = False
        self._watch: Check | None = None
        self.collectives: Collectives | None = None
        self._store: Any = None  # of this group only
        self._looking: Future[str] | None = None
        self._update = 0  # in this group; ranks may have been in different numbers of groups
        self.rank, self.size = 0, 1
        self.name, self.hosts = secrets.token_hex(8), [host_identity()]
        self._pids = [os.getpid()]
        store: Any
        if isinstance(group, Members):
            store, self.rank, self.size = group
            members = [*range(self.size)]
        elif dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if self.size == 1:
            return
        self._thread = WorkerThread("wsync-store")
        try:
            join = functools.partial(self._join, store, list(members), meeting)
            joining = self._thread.submit(join)
            gloo, self._store, self.name = _result(joining, timeout + _MORE_SECONDS)
            whole = f"{self.size} trainer ranks"
            self.collectives = Collectives(
                gloo, timeout=timeout, whole=whole, member="a trainer rank"
            )
            known = self.gather_json([*self.hosts, os.getpid()])
            self.hosts, self._pids = (list(facts) for facts in zip(*known, strict=True))
        except BaseException:
            self._thread.close()
            self.close()
            raise

    def _join(self, store: Any, members: list[int], meeting: str) -> tuple[Any, Any, str]:
        """Meets the other ranks and connects to them.  Returns (gloo group, store of this group
        only, name)."""
        # only a clone gets this timeout: the trainer's calls need the default, minutes long
        store = store.clone()
        store.set_timeout(timedelta(seconds=self.timeout))
        where = hashlib.sha256(repr((members, meeting)).encode()).hexdigest()[:16]
        store = dist.distributed_c10d.PrefixStore(f"wsync/{where}", store)
        name = _meet(store, self.rank, self.size, self.timeout)
        store = dist.distributed_c10d.PrefixStore(name, store)
        gloo = dist.distributed_c10d.PrefixStore("gloo", store)
        # our deadline passes before gloo's, whose error reads like a broken connection
        timeout = timedelta(seconds=self.timeout + _MORE_SECONDS)
        try:
            return dist.ProcessGroupGloo(gloo, self.rank, self.size, timeout), store, name
        except RuntimeError as error:
            raise _core.PeerClosedError(
                f"{self.size} trainer ranks did not connect: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """Closes the communicator, even if a call is stuck in it; other ranks may go on with
        theirs."""
        self.closed = True
        collectives, self.collectives = self.collectives, None
        if collectives is not None:
            self._thread.close()
            collectives.close()

    def check(self) -> None:
        """Raises the error that any rank has published, or that `watching` has met.  Every wait
        calls this method, also the waits of this group's collectives."""
        if self._store is not None:
            looking = self._looking
            if looking is None or looking.done():
                self._looking = self._thread.submit(self._look)
            if looking is not None and looking.done():
                _raise(_result(looking, self.timeout))
        if self._watch is not None:
            self._watch()

    @contextlib.contextmanager
    def watching(self, watch: Check) -> Iterator[None]:
        """In the block, `check` also calls `watch`, which waits for nothing and may raise."""
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    def begin(self) -> bool:
        """Relates later errors to this group's next update.  Returns False if the group is closed,
        or if a rank has published an error about an earlier update whose end this rank did not
        see."""
        if self.closed:
            return False
        if self._store is None:
            return True
        self._update += 1
        try:
            published = self._read()
        except _core.WsyncError:
            return False
        return not published or int(json.loads(published)["update"]) >= self._update

    def fail(self, error: BaseException) -> _core.WsyncError:
        """Publishes `error` unless another rank was first; returns the error to raise.  If a rank's
        process on this host has ended, the error says that instead of a closed connection."""
        if not isinstance(error, _core.WsyncError):
            error = _core.RemoteError(error_text(error))
        if self._store is None:
            return error
        text = str(error)
        if not text.startswith("trainer rank "):  # which a published error does
            text = f"trainer rank {self.rank}: {text}"
            if isinstance(error, _core.PeerClosedError) and (ended := self._await_end()):
                text, error = ended, _core.PeerClosedError(ended)
        said = json.dumps({"class": type(error).__name__, "text": text, "update": self._update})
        writing = self._thread.submit(lambda: self._store.compare_set("error", "", said).decode())
        try:
            first = _decode_error(_result(writing, min(_MORE_SECONDS, self.timeout)))
        except _core.WsyncError:  # nobody can be told this rank's error: raise what all ranks see
            return _core.PeerClosedError(_STORE_GONE)
        return error if (type(error), str(error)) == (type(first), str(first)) else first

    def _look(self) -> str:
        """Returns the published error; "" if there is none.  Called in the store's thread."""
        published: str = self._store.get("error").decode() if self._store.check(["error"]) else ""
        return published

    def _read(self) -> str:
        return _result(self._thread.submit(self._look), self.timeout)

    def ended(self) -> str:
        """Says which rank on this host has ended; "" if none has."""
        for rank, (host, pid) in enumerate(zip(self.hosts, self._pids, strict=True)):
            if host == self.hosts[self.rank] and has_ended(pid):
                return f"trainer rank {rank} (pid {pid}) has ended"
        return ""

    def _await_end(self) -> str:
        """Waits a moment for a rank to end, because a process closes its sockets a little before;
        returns `ended`.  Called after a connection has broken."""
        deadline = Deadline(VERDICT_SECONDS)
        while not (ended := self.ended()) and deadline.left:
            time.sleep(POLL_SECONDS)
        return ended

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns all ranks' bytes, by rank."""
        if self.size == 1:
            return [data]
        told = self._gather(len(data).to_bytes(_SIZE_NBYTES, "little"), _SIZE_NBYTES)
        sizes = [int.from_bytes(part, "little") for part in told]
        parts = self._gather(data, max(*sizes, 1))
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def gather_json(self, value: object) -> list[Any]:
        """Returns all ranks' values, by rank, after a round trip through JSON."""
        return [json.loads(data) for data in self.all_gather(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            self._collect("barrier")

    def confirm(self) -> None:
        """Waits like `barrier`, then looks for published errors, because a late rank may pass a
        barrier that the others have given up."""
        self.barrier()
        if self._store is not None:
            _raise(self._read())

    def _collect(self, name: str, *arguments: Any) -> None:
        if self.collectives is None:
            raise _core.StateError("the group of trainer ranks is closed")
        started = self.collectives.start(name, *arguments)
        self.collectives.finish(started, self.timeout, self.check)

    def _gather(self, data: bytes, width: int) -> list[bytes]:
        """Gathers `width` bytes from each rank.  They begin with the rank's data."""
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._collect("allgather", [parts], [mine])
        return [part.numpy().tobytes() for part in parts]


def together(make: Callable[[], _T], *, timeout: float) -> _T:
    """Calls `make` and returns its result.  If it raises on any rank of the default group, all
    ranks raise that error.  A rank that Ctrl-C interrupts raises KeyboardInterrupt."""
    group = TrainerGroup(timeout=timeout)
    try:
        made = make()
        group.barrier()
        return made
    except BaseException as error:
        first = group.fail(error)
        if first is error or not isinstance(error, Exception):
            raise
        raise first from error
    finally:
        group.close()


def _meet(store: Any, rank: int, size: int, timeout: float) -> str:
    """Waits until all ranks have come; returns a name that no other meeting has.

    Each rank leaves a word under its number.  Rank 0 answers these words once all ranks have come
    or time is over.  So ranks that have left different numbers of meetings still find each other,
    and no rank asks twice.
    """
    if rank != 0:
        return _come(store, rank, timeout)
    keys = [f"rank{other}" for other in range(1, size)]
    with contextlib.suppress(RuntimeError):  # if the store is gone, so are the next calls
        store.wait(keys, timedelta(seconds=timeout))
    came = [key for key in keys if store.check([key])]
    absent = [other for other, key in enumerate(keys, 1) if key not in came]
    name, text = secrets.token_hex(8), ""
    if absent:
        text = f"trainer ranks {absent} did not join the others within {seconds(timeout)}"
    for key in came:
        store.set(store.get(key).decode(), json.dumps([name, text]))
    if absent:
        raise _core.DeadlineError(text)
    return name


def _come(store: Any, rank: int, timeout: float) -> str:
    """Leaves a word, and waits for rank 0 to answer it."""
    key, word = f"rank{rank}", secrets.token_hex(8)
    store.set_timeout(timedelta(seconds=timeout + VERDICT_SECONDS))
    store.set(key, word)
    try:
        name, text = json.loads(store.get(word))
    except RuntimeError as error:
        late = f"trainer rank 0 did not join the others within {seconds(timeout)}"
        raise _core.DeadlineError(late) from error
    finally:
        # before other ranks can miss this one: rank 0 would answer an old word, too; raises if the
        # store is gone
        store.delete_key(key)
    if text:
        raise _core.DeadlineError(text)
    return str(name)


def _result(future: Future[_T], timeout: float) -> _T:
    """Returns the result of a store's call; DeadlineError or PeerClosedError if it has none."""
    try:
        return result(future, Deadline(timeout), bool, _STORE_GONE)
    except _core.WsyncError:
        raise
    except RuntimeError as error:
        raise _core.PeerClosedError(_STORE_GONE) from error


def _raise(published: str) -> None:
    if published:
        raise _decode_error(published)


def _decode_error(text: str) -> _core.WsyncError:
    fields = json.loads(text)
    cls: type[_core.WsyncError] = getattr(_core, fields["class"], _core.RemoteError)
    return cls(fields["text"])
