"""The engine's side of an update: what an inference engine's process hosts.

`Receiver` takes part in updates on behalf of one worker.  Its loader puts the bytes where the model
keeps them: `RecordedLoader` learns that from the model's own load_weights.  A handle whose engine
hosts receivers names LOAD_FORMAT in `load_formats`; without it the engine is sent SGLang's buckets.
"""

from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.receiver import Receiver
from wsync.messages.control import LOAD_FORMAT

__all__ = ["LOAD_FORMAT", "Receiver", "RecordedLoader"]
