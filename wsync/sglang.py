"""SGLang's side: `--custom-weight-loader wsync.sglang.load_weights`.

SGLang imports the function in every worker process and calls it with the model of that process
and the tensors of each update request whose load_format is this function's name.
"""

import threading
from typing import Any

from wsync import payload
from wsync.engine.loaders import Loader, ModuleLoader
from wsync.engine.receiver import Receiver
from wsync.engine.recorded import RecordedLoader

_receivers: dict[int, tuple[Any, Receiver]] = {}
_lock = threading.Lock()


def load_weights(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Takes part in an update.  The model's own load_weights is learnt from, and is used itself
    where it cannot be replaced.

    Never raises: SGLang ends the server when a loader does.  What fails is told to the trainer
    through the session, and is logged; SGLang itself ignores what a loader returns.
    """
    with _lock:
        # the model is kept, so that its id stays its own
        entry = _receivers.get(id(model))
        if entry is None:
            entry = _receivers[id(model)] = (model, Receiver(_loader(model)))
    entry[1].handle(payload.control_bytes(named_tensors))


def _loader(model: Any) -> Loader:
    return RecordedLoader(model) if hasattr(model, "load_weights") else ModuleLoader(model)
