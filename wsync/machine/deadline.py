"""Deadlines of waits, the check that runs during a wait, and time limits without an option."""

import time
from collections.abc import Callable
from typing import Any, Final

from wsync._core import DeadlineError, InvalidArgumentError

Check = Callable[[], object]
"""A function that a wait calls again and again; it raises an error to end the wait."""

MAX_DEADLINE: Final = 3600.0
"""The longest deadline that engines and trainers accept."""

POLL_SECONDS: Final = 0.05
"""Time between two checks in a wait."""

VERDICT_SECONDS: Final = 1.0
"""Time for a failure's reason to arrive after its effect was seen."""

PUNCTUAL: Final = 0.9
"""The fraction of a deadline after which a missing peer is reported, so that an error names it
before others give up at the deadline's end."""

LATER_SECONDS: Final = 2.0
"""Added to a deadline that only guards another one, whose error says more."""

LEAVE_SECONDS: Final = 1.0
"""Time for the remaining work of a failed or closing update to end."""


def check_seconds(name: str, value: Any) -> None:
    """Raises InvalidArgumentError if `value` is not a number of seconds that an option may have."""
    if not hasattr(value, "__float__") or isinstance(value, bool):  # numpy's numbers have it, too
        raise InvalidArgumentError(f"{name}={value!r} is not a number of seconds")
    if not 0 < value <= MAX_DEADLINE:
        text = f"over {seconds(MAX_DEADLINE)}" if value > 0 else "not positive"
        raise InvalidArgumentError(f"{name}={value!r} is {text}")


def seconds(timeout: float) -> str:
    """Formats a timeout for a person; the rest of a timeout has more digits than needed."""
    return f"{round(timeout, 2):g} s"


class Deadline:
    """The end of a wait, `seconds` from now; valid in every process of this host."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until the deadline; 0 after it."""
        return max(self._end - time.monotonic(), 0.0)

    def check(self, late: str) -> None:
        """Raises DeadlineError if the time is over; `late` says what did not happen in time."""
        if self.left == 0.0:
            raise DeadlineError(f"{late} within {seconds(self.seconds)}")


def look_around(check: Check) -> None:
    """Calls `check` for a second after a failure, so that it can raise a reason that comes late."""
    deadline = Deadline(VERDICT_SECONDS)
    while deadline.left:
        check()
        time.sleep(POLL_SECONDS)
