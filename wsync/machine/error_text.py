"""What an error is called in messages to others."""


def error_text(error: BaseException) -> str:
    """An error's type and text, as "KeyError: 'x'", which can be encoded."""
    return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
