"""An engine whose workers are threads of this process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

from wsync._core import RemoteError
from wsync.engine.receiver import Receiver
from wsync.engine.ring_loaders import Loader
from wsync.messages.control import LOAD_FORMAT


class ThreadEngine:
    """One worker a loader."""

    name = "threads"
    load_formats = (LOAD_FORMAT,)

    def __init__(self, loaders: Sequence[Loader]) -> None:
        self.receivers = [Receiver(loader, worker=i) for i, loader in enumerate(loaders)]
        self.workers = len(self.receivers)
        self.version: int | str | None = None

    def pause(self, mode: str, timeout: float) -> None: ...
    def flush(self, timeout: float) -> None: ...
    def resume(self, timeout: float) -> None: ...

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        answers: list[tuple[bool, str]] = [(False, "no answer")] * self.workers

        def run(worker: int) -> None:
            content = pickle.loads(payloads[worker])
            answers[worker] = self.receivers[worker].answer(content)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        for success, text in answers:
            if not success:
                raise RemoteError(text)
        if weight_version is not None:
            self.version = weight_version

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {"weight_version": self.version}
