"""Trainer ranks acting together: collectives that can be given up, and one error for all.

The first rank that fails publishes its error on a board in the process group's store.  Every
wait looks at the board about every 50 ms, so all ranks raise the same error soon after.
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
from wsync.machine.daemon_threads import Lane, result
from wsync.machine.deadline import POLL_SECONDS, VERDICT_SECONDS, Check, Deadline, seconds
from wsync.machine.error_text import error_text
from wsync.machine.host import has_ended, host_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_STORE_SECONDS: Final = 2.0  # for one answer of the store, where a deadline has passed already
_GLOO_SECONDS: Final = 10.0
_SIZE_NBYTES: Final = 8
_SHORT_NBYTES: Final = 504
_STORE_SILENT: Final = (
    "the trainer's store does not answer: the process that hosts it is stuck or stopped"
)
_ENDED: Final = "trainer process"  # the origin of an error about one that has ended
_STORE_GONE: Final = "the trainer's store cannot be reached: the process that hosts it is gone"
_T = TypeVar("_T")


class TrainerGroup:
    """All ranks of a trainer, with a gloo communicator of their own.

    Every rank makes one at the same time.  Without an initialised process group, or with one
    of a single rank, nothing is ever communicated.

    `name`, in hex, is new each time, and the same on all ranks.

    Args:
        group: the ranks that take part; None for the default group.
        timeout: seconds after which a collective has failed.
        meeting: a name that all ranks know; only those that give the same one meet.

    Raises:
        DeadlineError: not all ranks made one; the text says which did not.
        PeerClosedError: one of them has gone since; or what it has published.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, timeout: float, meeting: str = ""
    ) -> None:
        self.timeout = timeout
        self.closed = False
        self._watch: Check | None = None
        self._gloo: Collectives | None = None
        self._board: _Board | None = None
        self.rank, self.size = 0, 1
        self.name = secrets.token_hex(8)
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size == 1:
            return
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._lane = Lane("wsync-store")
        try:
            joining = self._lane.submit(functools.partial(self._join, list(members), meeting))
            gloo, store, self.name = _result(joining, timeout + _STORE_SECONDS)
        except BaseException as error:
            self.closed = True
            self._lane.close()
            if isinstance(error, RuntimeError) and not isinstance(error, _core.WsyncError):
                raise _core.PeerClosedError(_STORE_GONE) from error
            raise
        self._board = _Board(store, self.rank, self._lane, timeout)
        self._board.introduce(self.size)
        whole = f"{self.size} trainer ranks"
        self._gloo = Collectives(gloo, whole=whole, member="a trainer rank")

    def _join(self, members: list[int], meeting: str) -> tuple[Any, Any, str]:
        """Meets the others, and connects to them; (gloo group, store of this group only, name)."""
        deadline = Deadline(self.timeout)
        # the default store's own timeout, which calls of the trainer need, is minutes long
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        store.set_timeout(timedelta(seconds=self.timeout))
        where = hashlib.sha256(repr((members, meeting)).encode()).hexdigest()[:16]
        store = dist.distributed_c10d.PrefixStore(f"wsync/{where}", store)
        name = _meet(store, self.rank, self.size, self.timeout)
        store = dist.distributed_c10d.PrefixStore(name, store)
        gloo = dist.distributed_c10d.PrefixStore("gloo", store)
        # a deadline of ours comes before one of gloo's, whose text is that of a broken connection
        timeout = timedelta(seconds=self.timeout + _GLOO_SECONDS)
        try:
            return dist.ProcessGroupGloo(gloo, self.rank, self.size, timeout), store, name
        except RuntimeError as error:
            _raise(_published(store))  # who has failed since has left, which is what gloo saw
            if deadline.left:
                raise _core.PeerClosedError(
                    f"a trainer rank is gone: {first_line(error)}"
                ) from error
            raise _core.DeadlineError(
                f"{self.size} trainer ranks did not connect within {seconds(self.timeout)}: "
                f"{first_line(error)}"
            ) from error

    def close(self) -> None:
        """Ends the communicator, with what may be stuck in it; other ranks may still use theirs."""
        if self.closed:
            return
        self.closed = True
        if self._board is not None:
            self._lane.close()
        if self._gloo is not None:
            self._gloo.close()

    def check(self) -> None:
        """Raises the error that any rank has published, or what this one watches has met with;
        called during every wait, of this group's collectives too."""
        if self._board is not None:
            self._board.check()
        if self._watch is not None:
            self._watch()

    @contextlib.contextmanager
    def watching(self, watch: Check) -> Iterator[None]:
        """Has `check` call `watch`, too, in the block; it waits for nothing, and may raise."""
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    def begin(self) -> bool:
        """Says that errors are about this group's next update from now on.  False if the group is
        closed, or a rank has published an error about a former update, of whose end this one did
        not hear."""
        if self.closed:
            return False
        return self._board is None or self._board.begin()

    def fail(self, error: BaseException) -> _core.WsyncError:
        """Publishes `error` unless another rank was first; returns the error to raise.  Where the
        process of a rank on this host has ended, that is the error, not a closed connection."""
        if not isinstance(error, _core.WsyncError):
            error = _core.RemoteError(error_text(error))
        if self._board is None:
            return error
        if isinstance(error, _core.PeerClosedError):
            try:
                self._board.check_gone()
            except (RuntimeError, _core.WsyncError) as found:
                if rank_has_ended(found):
                    error = _has_ended(str(found))  # without the frames of `found`
        return self._board.publish(error)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank.  What all say in few bytes takes one collective."""
        if self.size == 1:
            return [data]
        first = len(data).to_bytes(_SIZE_NBYTES, "little") + data[:_SHORT_NBYTES]
        parts = self._gather(first, _SIZE_NBYTES + _SHORT_NBYTES)
        sizes = [int.from_bytes(part[:_SIZE_NBYTES], "little") for part in parts]
        widest = max(sizes)
        if widest > _SHORT_NBYTES:
            parts = self._gather(data, widest)
        else:
            parts = [part[_SIZE_NBYTES:] for part in parts]
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def gather_json(self, value: object) -> list[Any]:
        """Everybody's values, by rank, as JSON has them."""
        return [json.loads(data) for data in self.all_gather(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            self.finish(self._start("barrier"), self.timeout)

    def confirm(self) -> None:
        """A barrier, and a look at the board: one who was late may be let through a barrier that
        the others have given up."""
        self.barrier()
        if self._board is not None:
            self._board.check_now()

    def exchange(self, output: Any, data: Any, outputs: list[int], inputs: list[int]) -> Any:
        """Starts an all-to-all of contiguous uint8 tensors; `finish` waits for it."""
        return self._start("alltoall_base", output, data, outputs, inputs)

    def finish(self, work: Any, timeout: float, check: Check | None = None) -> None:
        """Waits for a collective until it is complete, its error, another's error or the deadline.
        `check` is called in place of this group's, which a caller's calls."""
        assert self._gloo is not None and self._board is not None
        self._gloo.finish(work, timeout, check or self.check, self._board.check_gone)

    def _start(self, name: str, *arguments: Any) -> Any:
        if self._gloo is None:
            raise _core.StateError("a group of one trainer rank has no collectives")
        assert self._board is not None
        try:
            return self._gloo.start(name, *arguments)
        except _core.PeerClosedError:
            self._board.check_gone()
            raise

    def _gather(self, data: bytes, width: int) -> list[bytes]:
        """So many bytes of each rank, the first of which are its data."""
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self.finish(self._start("allgather", [parts], [mine]), self.timeout)
        return [part.numpy().tobytes() for part in parts]


def rank_has_ended(error: BaseException) -> bool:
    """Whether it says that the process of a trainer rank on this host has ended."""
    return getattr(error, "origin", "") == _ENDED


def _has_ended(text: str) -> _core.PeerClosedError:
    error = _core.PeerClosedError(text)
    error.origin = _ENDED
    return error


def together(make: Callable[[], _T], *, timeout: float) -> _T:
    """What `make` returns; what it raises on any rank of the default group is raised on all.
    A rank that Ctrl-C interrupts raises that."""
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


class _Board:
    """The first published error, visible to all ranks.

    Calls of a store do not end while the process that hosts it is stopped, whatever their
    timeout.  They are made from a thread, and `check` looks at the answer to the last one.  Who
    needs an answer waits for it as long as for another rank, for that is what it waits for.
    """

    def __init__(self, store: Any, rank: int, lane: Lane, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._lane = lane
        self._timeout = timeout
        self._ranks = 0
        self._update = 0  # of this board's; ranks may have been in different numbers of groups
        self._looking: Future[str] | None = None

    def begin(self) -> bool:
        self._update += 1
        try:
            published = _result(self._lane.submit(self._look), self._timeout)
        except _core.WsyncError:
            return False
        return not published or int(json.loads(published)["update"]) >= self._update

    def check(self) -> None:
        looking = self._looking
        if looking is None or looking.done():
            self._looking = self._lane.submit(self._look)
        if looking is not None and looking.done():
            _raise(looking.result())

    def check_now(self) -> None:
        """Waits for the store's answer."""
        _raise(_result(self._lane.submit(self._look), self._timeout))

    def introduce(self, ranks: int) -> None:
        """Tells so many ranks which process this one is; waits for nobody."""
        self._ranks = ranks
        process = json.dumps([host_identity(), os.getpid()])
        self._lane.submit(lambda: self._store.set(f"process{self._rank}", process))

    def check_gone(self) -> None:
        """When a connection between ranks has broken: raises what any rank has published, or names
        the rank on this host whose process has ended."""
        names = [f"process{rank}" for rank in range(self._ranks)]
        asked = self._lane.submit(lambda: [json.loads(self._store.get(name)) for name in names])
        processes = _result(asked, self._timeout)
        deadline = Deadline(VERDICT_SECONDS)  # a process closes its sockets before it has ended
        while deadline.left:
            self.check_now()
            for rank, (host, pid) in enumerate(processes):
                if host == host_identity() and has_ended(pid):
                    raise _has_ended(f"trainer rank {rank} (pid {pid}) has ended")
            time.sleep(POLL_SECONDS)

    def publish(self, error: _core.WsyncError) -> _core.WsyncError:
        text = _encode_error(error, self._rank, self._update)
        writing = self._lane.submit(lambda: self._store.compare_set("error", "", text).decode())
        # nobody waits for a second deadline
        patience = _STORE_SECONDS if isinstance(error, _core.DeadlineError) else self._timeout
        try:
            first = _decode_error(_result(writing, min(patience, self._timeout)))
        except RuntimeError:
            # nobody can be told what was seen here: say what all ranks can see
            return _core.PeerClosedError(_STORE_GONE)
        except _core.DeadlineError:
            # how long each rank has waited for this is its own matter: all say the same
            return _core.DeadlineError(_STORE_SILENT)
        return error if (type(error), str(error)) == (type(first), str(first)) else first

    def _look(self) -> str:
        try:
            return _published(self._store)
        except RuntimeError as error:
            raise _core.PeerClosedError(_STORE_GONE) from error


def _published(store: Any) -> str:
    """What stands on the board in a store."""
    published: str = store.get("error").decode() if store.check(["error"]) else ""
    return published


def _meet(store: Any, rank: int, size: int, timeout: float) -> str:
    """Waits until all ranks have come; returns a name that no other meeting has.

    Whoever comes leaves a word under its rank, and rank 0 answers it once all have come or its
    time is over: ranks that were left in different numbers of meetings still find each other, and
    nobody asks twice.
    """
    if rank != 0:
        return _come(store, rank, timeout)
    callers = {other: f"rank{other}" for other in range(1, size)}
    name, absent = secrets.token_hex(8), list[int]()
    try:
        store.wait(list(callers.values()), timedelta(seconds=timeout))
    except RuntimeError:  # if it is because the store is gone, so are the next calls
        absent = [other for other, key in callers.items() if not store.check([key])]
    text = f"trainer ranks {absent} did not come within {seconds(timeout)}" if absent else ""
    keys = [key for other, key in callers.items() if other not in absent]
    for word in store.multi_get(keys) if store.has_extended_api() else map(store.get, keys):
        store.set(word.decode(), json.dumps([name, text]))
    if absent:
        raise _core.DeadlineError(text)
    return name


def _come(store: Any, rank: int, timeout: float) -> str:
    """Leaves a word and waits for the answer of rank 0."""
    key, word = f"rank{rank}", secrets.token_hex(8)
    store.set_timeout(timedelta(seconds=timeout + VERDICT_SECONDS))
    store.set(key, word)
    try:
        name, text = json.loads(store.get(word))
        store.delete_key(word)
    except RuntimeError as error:
        late = f"trainer rank 0 did not come within {seconds(timeout)}"
        raise _core.DeadlineError(late) from error
    finally:
        # before this rank can be missed in what follows: rank 0 will answer who comes next; raises
        # if the store is gone
        store.delete_key(key)
    if text:
        raise _core.DeadlineError(text)
    return str(name)


def _result(future: Future[_T], timeout: float) -> _T:
    """What a call of the store returns, or DeadlineError."""
    return result(future, Deadline(timeout), bool, f"{_STORE_SILENT}; no answer")


def _raise(published: str) -> None:
    if published:
        raise _decode_error(published)


def _encode_error(error: _core.WsyncError, rank: int, update: int) -> str:
    text = str(error)
    if not text.startswith("trainer rank "):
        text = f"trainer rank {rank}: {text}"
    facts = {"class": type(error).__name__, "ended": rank_has_ended(error), "text": text}
    return json.dumps({**facts, "update": update})


def _decode_error(text: str) -> _core.WsyncError:
    fields = json.loads(text)
    cls: type[_core.WsyncError] = getattr(_core, fields["class"], _core.RemoteError)
    return _has_ended(fields["text"]) if fields["ended"] else cls(fields["text"])
