"""What engines answer: success or refusal, in any of the shapes that SGLang uses, and texts of
errors for a person to read."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from wsync._core import DeadlineError, PeerClosedError, RemoteError

_FLUSH_RETRY_SECONDS: Final = 0.05
_TEXT_LIMIT: Final = 2000


def retry_flush(name: str, flush_once: Callable[[float], str | None], timeout: float) -> None:
    """Repeats flush_once (None: done, else why not) until it is done or `timeout` has passed."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        reason = flush_once(remaining)
        if reason is None:
            return
        if time.monotonic() + _FLUSH_RETRY_SECONDS >= deadline:
            raise DeadlineError(
                f"engine {name}: flush_cache: not idle after {seconds(timeout)}: {cut(reason)}"
            )
        time.sleep(_FLUSH_RETRY_SECONDS)


def refusal(answer: object) -> str | None:
    """The engine's text if its answer says that it failed, else None.

    SGLang answers {"success", "message"}, its in-process engine (success, message, ...).
    """
    if isinstance(answer, Mapping) and answer.get("success", True) is False:
        return str(answer.get("message", answer))
    if isinstance(answer, list | tuple) and len(answer) in (2, 3) and answer[0] is False:
        return str(answer[1])
    if answer is False:
        return "refused"
    return None


def check_answer(name: str, what: str, answer: object) -> None:
    """Raises RemoteError if an engine's answer to the call `what` says that it failed."""
    reason = refusal(answer)
    if reason is not None:
        raise RemoteError(f"engine {name}: {what}: {cut(reason)}")


def translate(where: str, error: BaseException) -> BaseException:
    """An error of an engine's own as one of wsync's."""
    if isinstance(error, TimeoutError):
        return DeadlineError(f"{where}: {cut(str(error))}")
    if isinstance(error, ConnectionError | EOFError):
        return PeerClosedError(f"{where}: {cut(str(error) or type(error).__name__)}")
    return RemoteError(f"{where}: {type(error).__name__}: {cut(str(error))}")


def json_or_text(text: str) -> Any:
    """What JSON a text is, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_text(text: str) -> str:
    """The message inside an engine's answer."""
    answer = json_or_text(text)
    for key in ("message", "detail", "error"):
        if isinstance(answer, Mapping) and answer.get(key):
            answer = answer[key]
    return cut(answer if isinstance(answer, str) else json.dumps(answer))


def cause(error: BaseException) -> str:
    """The innermost text of a requests error: what the system said."""
    seen = error
    while seen.args and isinstance(seen.args[0], BaseException):
        seen = seen.args[0]
    reason = getattr(seen, "reason", None)
    return cut(str(reason if isinstance(reason, BaseException) else seen))


def seconds(timeout: float) -> str:
    """A timeout for a person to read: what is left of one has more digits than anybody gave."""
    return f"{round(timeout, 2):g} s"


def cut(text: str, limit: int = _TEXT_LIMIT) -> str:
    """The beginning of a text, which may be a traceback of pages."""
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."
