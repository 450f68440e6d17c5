"""Collectives of a torch process group: polled, so that each can be given up, and left alone."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any, Final

from wsync import _core
from wsync.machine.deadline import LEAVE_SECONDS, POLL_SECONDS, Check, Deadline


class Collective:
    """One that was started.  `work`: torch's, which keeps the group's connections; nobody else has
    it, because an error keeps the frames that it has passed, and all that these hold."""

    def __init__(self, work: Any) -> None:
        self.work = work


class Collectives:
    """The collectives that one member starts in a process group.

    Args:
        group: a backend of torch, which belongs to this object.
        whole: what errors call all members, for example "4 trainer ranks".
        member: what they call one that is gone, for example "a trainer rank".
        lingers: whether only the group's end gives up a collective that is stuck, as NCCL's does.
    """

    def __init__(self, group: Any, *, whole: str, member: str, lingers: bool = False) -> None:
        # In a list, which `close` takes.  No frame holds the group itself: the traceback of an
        # interrupt keeps frames, and whoever drops it would wait in the group's destructor.
        self._held = [group]
        self._lingers = lingers
        self._whole, self._member = whole, member
        self._underway: set[Collective] = set()  # what was started, and not seen to end

    def start(self, name: str, *arguments: Any) -> Collective:
        """Starts the backend's collective of that name; `finish` waits for it.

        Raises:
            StateError: after close.
            PeerClosedError: a member is gone.
        """
        try:
            started = Collective(getattr(self._held[0], name)(*arguments))
        except IndexError:  # another thread may have closed it
            raise self._closed() from None
        except RuntimeError as error:
            raise self._gone(error) from error
        self._underway.add(started)
        return started

    def _closed(self) -> _core.StateError:
        return _core.StateError(f"the group of {self._whole} is closed")

    def finish(
        self,
        started: Collective,
        timeout: float,
        check: Check | None = None,
        verdict: Check | None = None,
    ) -> None:
        """Waits for a collective; `check` is called about every 50 ms, and may raise to end that.
        `verdict` is called when a member is gone, and may raise what others know about it.

        Raises:
            DeadlineError: it is not complete after `timeout` seconds.
            PeerClosedError: a member is gone.
            StateError: after close.
        """
        deadline, look, pause = Deadline(timeout), Deadline(POLL_SECONDS), 2e-5
        while not _is_over(started.work):
            if not look.left:
                look = Deadline(POLL_SECONDS)
                if check is not None:
                    check()
                deadline.check(f"a collective of {self._whole} did not end")
            time.sleep(pause)
            pause = min(pause * 1.1, 2e-3)  # a tenth of the wait so far
        # a failed one has ended as well, and keeps no thread of a backend that does not linger
        self._underway.discard(started)
        work, started.work = started.work, None
        if work is None:
            raise self._closed()
        try:
            work.wait()
        except RuntimeError as error:
            if verdict is not None:
                verdict()
            raise self._gone(error) from error
        finally:
            del work

    def _gone(self, error: RuntimeError) -> _core.PeerClosedError:
        return _core.PeerClosedError(f"{self._member} is gone: {first_line(error)}")

    def close(self) -> None:
        """Leaves the group.  Its end, which is waited for for a moment, or not at all where it
        waits for a collective that is stuck, keeps nobody but a thread."""
        held, self._held = self._held, []
        underway = list(self._underway)
        # only its end gives up what is stuck in a group that lingers
        before = [] if self._lingers else underway
        ending = threading.Thread(
            target=_end, args=(held, before, underway), daemon=True, name="wsync-group"
        )
        ending.start()
        if not underway:
            ending.join(LEAVE_SECONDS)


_turn: Final = threading.Lock()
_ending: Final = set[threading.Thread]()


def _end(held: list[Any], before: list[Collective], underway: list[Collective]) -> None:
    """Lets a group go, after some of the collectives that are under way, and all of these."""
    while not all(_is_over(each.work) for each in before):
        time.sleep(POLL_SECONDS)
    with _turn:
        _ending.add(threading.current_thread())
    for each in underway:
        each.work = None
    held.clear()
    _ending.discard(threading.current_thread())


def _is_over(work: Any) -> bool:
    return work is None or bool(work.is_completed())


@atexit.register
def _keep() -> None:
    """Torch aborts a process whose interpreter ends while a daemon thread is in a group's
    destructor: groups that are left now are kept."""
    _turn.acquire()
    deadline = Deadline(LEAVE_SECONDS)
    for thread in list(_ending):
        thread.join(deadline.left)


def first_line(error: BaseException) -> str:
    """What a backend's error says, without the advice and the stack that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
