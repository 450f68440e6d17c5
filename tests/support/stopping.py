"""A worker that is stopped in the middle of an answer."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from wsync.demo.engines.weights_only_engine import BareWorker


class Stopping(BareWorker):
    """Stops itself when it has sent the beginning of an answer."""

    def answer(self, what: str, argument: Any) -> Any:
        answer = super().answer(what, argument)
        if what == "weights":
            send: Any = Connection._send  # type: ignore[attr-defined]

            def half(pipe: Connection, data: bytes, *more: Any) -> None:
                Connection._send = send  # type: ignore[attr-defined]
                send(pipe, data[:100], *more)
                os.kill(os.getpid(), signal.SIGSTOP)
                send(pipe, data[100:], *more)

            Connection._send = half  # type: ignore[attr-defined]
        return answer
