"""What is shown while the demo starts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Says what is done in this block; in a terminal, for how long already."""
    if not sys.stderr.isatty():
        print(what, flush=True)
        yield
        return
    done = threading.Event()
    with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False) as line:

        def move() -> None:
            while not done.wait(0.5):
                line.refresh()

        moving = threading.Thread(target=move, daemon=True)
        moving.start()
        try:
            yield
        finally:
            done.set()
            moving.join()
