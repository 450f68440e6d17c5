"""When a wait ends, what is looked at meanwhile, and the time limits that nobody chooses."""

import time
from collections.abc import Callable
from typing import Any, Final

from wsync._core import DeadlineError, InvalidArgumentError

Check = Callable[[], object]
"""What a wait calls again and again: it raises what ends the wait."""

MAX_DEADLINE: Final = 3600.0
"""The longest deadline that engines and trainers accept."""

POLL_SECONDS: Final = 0.05
"""Between two looks at what else may end a wait."""

VERDICT_SECONDS: Final = 1.0
"""For the reason of a failure to arrive, after its effect was seen elsewhere."""

PUNCTUAL: Final = 0.9
"""The fraction of a deadline after which a missing peer is reported, so that it is named before
others give up at the deadline's end."""

LATER_SECONDS: Final = 2.0
"""How much later a deadline ends that only guards another one, whose error says more."""

LEAVE_SECONDS: Final = 1.0
"""For work that a failed or closing update has left under way to end."""


def check_seconds(name: str, value: Any) -> None:
    """Raises InvalidArgumentError for what is no time that anybody may choose to wait."""
    if not hasattr(value, "__float__") or isinstance(value, bool):  # numpy's have it, too
        raise InvalidArgumentError(f"{name}={value!r} is no number of seconds")
    if not 0 < value <= MAX_DEADLINE:
        text = f"over {seconds(MAX_DEADLINE)}" if value > 0 else "not positive"
        raise InvalidArgumentError(f"{name}={value!r} is {text}")


def seconds(timeout: float) -> str:
    """A timeout for a person to read: what is left of one has more digits than anybody gave."""
    return f"{round(timeout, 2):g} s"


class Deadline:
    """The end of a wait, `seconds` from now; the same in every process of this host."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(self._end - time.monotonic(), 0.0)

    def check(self, late: str) -> None:
        """Raises DeadlineError once it has passed; `late` says what did not happen in time."""
        if self.left == 0.0:
            raise DeadlineError(f"{late} within {seconds(self.seconds)}")


def look_around(check: Check) -> None:
    """After a failure was seen: has `check` raise its reason, which may be on its way."""
    deadline = Deadline(VERDICT_SECONDS)
    while deadline.left:
        check()
        time.sleep(POLL_SECONDS)
