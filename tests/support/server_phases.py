"""Places of an update of SGLang's server at which something happens to a process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from support.fault_points import TRAINER
from support.server_models import PATIENCE

from wsync.handles.sglang_http import HttpHandle

# before which of the trainer's requests
_REQUESTS = {
    "pause": "/pause_generation",
    "flush": "/flush_cache",
    "begin": "/begin_weight_update",
    "tensors": "/update_weights_from_tensor",  # the first: others may run in several threads
    "end": "/end_weight_update",
    "continue": "/continue_generation",
}
# as wsync's loader takes an update
LOADER = (
    *("pause", "flush", "begin", "tensors", "round", "done", "prepared", "commit", "close"),
    *("end", "continue"),
)
# as SGLang itself takes buckets
STOCK = ("pause", "flush", "begin", "tensors", "end", "continue")


@contextlib.contextmanager
def before(phase: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Has this process act before the phase of its next update, and notes that it has; leaves when
    it has acted, in whatever thread."""
    owner, name = (HttpHandle, "request") if phase in _REQUESTS else TRAINER[phase]
    original, struck, acted = getattr(owner, name), list[str](), threading.Event()

    def acting(target: Any, *arguments: Any, **named: Any) -> Any:
        wanted = phase not in _REQUESTS or arguments[1] == _REQUESTS[phase]
        if wanted and not struck:
            struck.append(phase)
            try:
                act()
            finally:
                acted.set()
        return original(target, *arguments, **named)

    setattr(owner, name, acting)
    try:
        yield struck
    finally:
        setattr(owner, name, original)
        assert not struck or acted.wait(PATIENCE)
