"""The engine's side of an update: what an inference engine's process hosts.

`Receiver` takes part in updates on behalf of one worker.  Its loader puts the bytes where the model
keeps them: `RecordedLoader` learns that from the model's own load_weights.
"""

from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.receiver import Receiver

__all__ = ["Receiver", "RecordedLoader"]
