"""The text of an error in messages to other processes."""


def error_text(error: BaseException) -> str:
    """Returns an error's type and text, as in "KeyError: 'x'", in encodable characters."""
    return f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
