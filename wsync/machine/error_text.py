"""What an error is called in messages to others."""

from __future__ import annotations

from wsync._core import WsyncError


def error_text(error: BaseException) -> str:
    """An error's text, and before it the type of one that is not wsync's, as "KeyError: 'x'".  It
    can be encoded, and is there even if the error's own cannot be made."""
    try:
        text = str(error)
    except Exception as other:
        text = f"(no text: {type(other).__name__} when it was asked for)"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if isinstance(error, WsyncError) else f"{type(error).__name__}: {text}"
