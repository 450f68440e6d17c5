"""Collectives of a torch process group, polled so that a wait for one can be given up."""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import Any

from wsync import _core
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import LEAVE_SECONDS, POLL_SECONDS, Check, Deadline, look_around


class Collective:
    """A collective that was started.  `work`: torch's object, which keeps the group's connections.
    Nothing else refers to it, because an error's traceback keeps frames and all their locals."""

    def __init__(self, work: Any) -> None:
        self.work = work

    @property
    def is_over(self) -> bool:
        return self.work is None or bool(self.work.is_completed())


class Collectives:
    """The collectives that one member starts in a process group.

    Args:
        group: a backend of torch, which belongs to this object.
        timeout: seconds that a collective may take unless its caller says otherwise.
        whole: the name of all members in errors, for example "group g".
        member: the name of a lost member in errors, for example "a trainer rank".
        lingers: whether only the group's end can stop a collective that is stuck, as with NCCL.
    """

    def __init__(
        self, group: Any, *, timeout: float, whole: str, member: str, lingers: bool = False
    ) -> None:
        # `close` empties this list.  No frame may hold the group itself: a traceback may keep the
        # frame, and the thread that drops the traceback would wait in the group's destructor.
        self._held = [group]
        self.rank, self.size = int(group.rank()), int(group.size())
        self.timeout = timeout
        self._lingers = lingers
        self._whole, self._member = whole, member
        self._underway: set[Collective] = set()  # started, and not yet seen to end

    def start(self, name: str, *arguments: Any) -> Collective:
        """Starts the backend's collective of this name; `finish` waits for the collective.

        Raises:
            StateError: after close.
            PeerClosedError: a member is gone.
        """
        try:
            started = Collective(getattr(self._held[0], name)(*arguments))
        except IndexError:  # another thread may have closed the group
            raise self._closed() from None
        except RuntimeError as error:
            raise self._gone(error) from error
        self._underway.add(started)
        return started

    def exchange(self, output: Any, data: Any, outputs: list[int], inputs: list[int]) -> Collective:
        """Starts an all-to-all of contiguous uint8 tensors."""
        return self.start("alltoall_base", output, data, outputs, inputs)

    def finish(self, started: Collective, timeout: float, check: Check = bool) -> None:
        """Waits for a collective.  `check` is called about every 50 ms and may raise to end the
        wait.  When a member is gone, `check` may also raise the reason that other ranks gave.

        Raises:
            DeadlineError: it is not complete after `timeout` seconds.
            PeerClosedError: a member is gone.
            StateError: after close.
        """
        deadline, look, pause = Deadline(timeout), Deadline(POLL_SECONDS), 2e-5
        while not started.is_over:
            if not look.left:
                look = Deadline(POLL_SECONDS)
                check()
                deadline.check(f"a collective of {self._whole} did not end")
            time.sleep(pause)
            pause = min(pause * 1.1, 2e-3)  # a tenth of the wait so far
        # a failed collective has ended, too; it keeps a thread only of a backend that lingers
        self._underway.discard(started)
        work, started.work = started.work, None
        if work is None:
            raise self._closed()
        try:
            work.wait()
        except RuntimeError as error:
            look_around(check)
            raise self._gone(error) from error
        finally:
            del work

    def close(self) -> None:
        """Leaves the group, and starts a thread that ends it.  The caller waits a moment for that
        thread, or not at all if a collective is stuck."""
        held, self._held = self._held, []
        underway, lingers = list(self._underway), self._lingers
        ending = start("wsync-group", lambda: _end(held, underway, lingers))
        if not underway:
            wait([ending], LEAVE_SECONDS)

    def _closed(self) -> _core.StateError:
        return _core.StateError(f"the group of {self._whole} is closed")

    def _gone(self, error: RuntimeError) -> _core.PeerClosedError:
        return _core.PeerClosedError(f"{self._member} is gone: {first_line(error)}")


def _end(held: list[Any], underway: list[Collective], lingers: bool) -> None:
    """Frees a group and its collectives, after those under way have ended."""
    while not (lingers or all(each.is_over for each in underway)):
        time.sleep(POLL_SECONDS)
    for each in underway:
        each.work = None
    held.clear()


def first_line(error: BaseException) -> str:
    """Returns a backend's error text without the advice and the stack that follow it."""
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
