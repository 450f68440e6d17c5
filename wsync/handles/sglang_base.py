"""SGLang's update methods, which engines offer as HTTP endpoints, as methods, or by Ray."""

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from wsync._core import DeadlineError, InvalidArgumentError
from wsync.handles.answers import cut, seconds
from wsync.machine.deadline import Deadline

_FLUSH_RETRY_SECONDS = 0.05


class ApiHandle(ABC):
    """What the handles of such engines have in common (see wsync.handles.base.EngineHandle).
    Subclasses say how one method is called."""

    name: str
    workers: int

    @abstractmethod
    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> object:
        """Calls a method; raises where the engine refuses or does not answer."""

    @abstractmethod
    def _flush_once(self, timeout: float) -> str | None:
        """Empties the cache; why that cannot be done yet, or None."""

    @abstractmethod
    def _info(self, methods: tuple[str, ...], timeout: float) -> dict[str, Any]:
        """What the first of these methods that the engine has answers."""

    def flush(self, timeout: float) -> None:
        """Asks again until the engine is idle."""
        deadline = Deadline(timeout)
        reason: str | None = None
        while reason is None or deadline.left:
            try:
                reason = self._flush_once(deadline.left)
            except DeadlineError:  # of a later request, which had little time left
                if reason is None:
                    raise
                break
            if reason is None:
                return
            time.sleep(min(_FLUSH_RETRY_SECONDS, deadline.left))
        raise DeadlineError(
            f"engine {self.name}: flush_cache: not idle after {seconds(timeout)}: {cut(reason)}"
        )

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        check_payloads(self.name, self.workers, payloads)
        # SGLang's own flush inside an update asserts that the engine is idle, and the assertion
        # ends the server
        settings = {"load_format": load_format, "flush_cache": False, **_version(weight_version)}
        self._update(payloads, settings, timeout)

    def _update(self, payloads: Sequence[bytes], settings: dict[str, Any], timeout: float) -> None:
        texts = [base64.b64encode(data).decode() for data in payloads]
        arguments = {"serialized_named_tensors": texts, **settings}
        self._do("update_weights_from_tensor", arguments, timeout)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        arguments = {"model_path": path, **_version(weight_version)}
        self._do("update_weights_from_disk", arguments, timeout)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Another of SGLang's update methods, by name."""
        self._do(method, arguments, timeout)

    def resume(self, timeout: float) -> None:
        self._do("continue_generation", {}, timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return self._info(("model_info", "get_model_info"), timeout)

    def server_info(self, timeout: float) -> dict[str, Any]:
        """How the engine was started."""
        return self._info(("server_info", "get_server_info"), timeout)


def check_payloads(name: str, workers: int, payloads: Sequence[bytes]) -> None:
    """InvalidArgumentError unless there is one for each worker of the engine."""
    if len(payloads) != workers:
        raise InvalidArgumentError(
            f"engine {name}: {len(payloads)} payloads for {workers} workers, one each is needed"
        )


def _version(version: int | str | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}
