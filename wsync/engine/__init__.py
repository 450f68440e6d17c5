"""The engine's side of an update: what an inference engine's process hosts.

`Receiver` takes part in updates on behalf of one worker.  Its loader puts the bytes where the model
keeps them: `RecordedLoader` learns that from the model's own load_weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsync.engine.learn.recorded_loader import RecordedLoader as RecordedLoader
    from wsync.engine.receiver import Receiver as Receiver

_HOMES = {
    "Receiver": "wsync.engine.receiver",
    "RecordedLoader": "wsync.engine.learn.recorded_loader",
}
__all__ = ["Receiver", "RecordedLoader"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wsync.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
