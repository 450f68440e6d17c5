"""Calls a load_weights that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from wsync.engine.learn.attribute_watch import unwatched
from wsync.engine.learn.thread_state import of_this_thread
from wsync.engine.learn.time_limit import is_over
from wsync.machine.deadline import LATER_SECONDS, POLL_SECONDS, Deadline

_GRACE: Final = LATER_SECONDS / 2  # the trainer hears of it before it gives up


class NotEndedError(Exception):
    """load_weights, which was tried, still runs."""


def bounded(act: Callable[[], object]) -> None:
    """Does something in a thread of its own, as this one would, and gives that thread up where
    learning has taken too long and it does not notice.

    Raises:
        NotEndedError: it still runs.
    """
    given, raised = [act], list[BaseException]()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu, as_here = torch.cuda.current_device() if initialized else None, of_this_thread()
    del act

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            as_here(given.pop())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="wsync-load-weights", daemon=True)
    with unwatched():
        thread.start()
    later: Deadline | None = None
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if later is None and is_over():
            later = Deadline(_GRACE)
        if later is not None and not later.left and thread.is_alive():
            raise NotEndedError(
                "load_weights, tried on made-up tensors, has not ended in the time there is to "
                "learn, and still runs or waits: nothing is loaded by that; make the engine anew, "
                "and where it is slow, the trainer's Options(deadline=) gives more"
            )
    if raised:
        raise raised.pop()
