"""SGLang's endpoints in front of an engine's handle, in this process."""

from __future__ import annotations

import base64
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from socketserver import ThreadingTCPServer
from typing import Any

from wsync.demo.engines.server import EngineServer, _Requests
from wsync.messages.control import LOAD_FORMAT

_PATIENCE = 60.0


class Front(EngineServer):
    """pauses: how often it was paused.  on_open: called when a request with weights begins."""

    def __init__(self, engine: Any) -> None:
        self.pauses, self.on_open = 0, lambda: None

        def update(
            serialized_named_tensors: Sequence[str],
            load_format: str,
            weight_version: str | None = None,
        ) -> None:
            self.on_open()
            data = [base64.b64decode(text) for text in serialized_named_tensors]
            known: Any = {"load_format": load_format, "weight_version": weight_version}
            engine.update_weights(data, timeout=_PATIENCE, **known)

        def pause() -> None:
            self.pauses += 1
            engine.pause("abort", _PATIENCE)

        started = {"tp_size": engine.workers, "custom_weight_loader": [LOAD_FORMAT]}
        calls: dict[str, Callable[..., Any]] = {
            "server_info": lambda: {**started, "instance": id(engine)},
            "model_info": lambda: engine.model_info(_PATIENCE),
            "pause_generation": pause,
            "flush_cache": lambda: "Cache flushed.",
            "continue_generation": lambda: engine.resume(_PATIENCE),
            "update_weights_from_tensor": update,
        }
        self._calls = {n: (call, inspect.signature(call).parameters) for n, call in calls.items()}
        ThreadingTCPServer.__init__(self, ("127.0.0.1", 0), _Requests)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def served(engine: Any) -> Iterator[Front]:
    with Front(engine) as front:
        threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True).start()
        yield front
        front.shutdown()
