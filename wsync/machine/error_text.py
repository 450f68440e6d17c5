"""What an error is called in messages to others."""

from __future__ import annotations


def error_text(error: BaseException) -> str:
    """An error's type and text, as "KeyError: 'x'".  It can be encoded, and is there even if the
    error's own text cannot be made."""
    try:
        text = str(error)
    except Exception as other:
        text = f"(no text: {type(other).__name__} when it was asked for)"
    return f"{type(error).__name__}: {text}".encode("utf-8", "backslashreplace").decode()
