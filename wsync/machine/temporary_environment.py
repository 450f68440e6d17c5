"""Environment variables for other libraries."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable in the block, and restores its old value afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
