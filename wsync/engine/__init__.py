"""The engine's side of an update, which runs in an inference engine's process.

`Receiver` takes part in updates on behalf of one worker.  Its loader puts the bytes into the
model's tensors; `RecordedLoader` learns their places from the model's own load_weights.  If an
engine hosts receivers, its handle lists LOAD_FORMAT in `load_formats`.  Otherwise the engine is
sent SGLang's buckets.
"""

from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.receiver import Receiver
from wsync.messages.control import LOAD_FORMAT

__all__ = ["LOAD_FORMAT", "Receiver", "RecordedLoader"]
