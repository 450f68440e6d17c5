"""Engines reached by method calls: objects of this process, or Ray actors."""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
)
from wsync.handles.answers import (
    check_answer,
    cut,
    refusal,
    retry_flush,
    seconds,
    translate,
)
from wsync.handles.arguments import IDENTITY, check_payloads, disk_arguments, update_arguments


class LocalHandle:
    """An object in this process with slime's engine methods (pause_generation, flush_cache,
    continue_generation, update_weights_from_tensor).  Its attributes `name`, `workers` and
    `load_formats` are read where it has them.

    Each call runs in a thread of its own, so that a stalled engine costs its deadline only; the
    abandoned thread ends when the engine returns.
    """

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        self._engine = engine
        self.name = str(getattr(engine, "name", None) or f"{type(engine).__qualname__} object")
        if workers is None:
            workers = getattr(engine, "workers", 1)
        self.workers = int(workers or 1)
        self.load_formats: tuple[str, ...] = tuple(getattr(engine, "load_formats", ()))

    def pause(self, mode: str, timeout: float) -> None:
        # slime's actors of 0.2.2 take no mode; abort is what they do
        arguments = {} if mode == "abort" else {"mode": mode}
        self._checked("pause_generation", timeout, **arguments)

    def flush(self, timeout: float) -> None:
        def flush_once(remaining: float) -> str | None:
            answer = self._call("flush_cache", remaining)
            return refusal(answer)

        retry_flush(self.name, flush_once, timeout)

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        check_payloads(self.name, self.workers, payloads)
        arguments = update_arguments(payloads, load_format, weight_version)
        self._checked("update_weights_from_tensor", timeout, **arguments)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        arguments = disk_arguments(path, weight_version)
        self._checked("update_weights_from_disk", timeout, **arguments)

    def identity(self, timeout: float) -> dict[str, Any]:
        """As HttpHandle.identity, where the engine says it."""
        for method in ("server_info", "get_server_info"):
            if hasattr(self._engine, method):
                found = self._call(method, timeout)
                if isinstance(found, Mapping):
                    return {name: found[name] for name in IDENTITY if name in found}
        return {}

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Another of slime's update methods, by name."""
        self._checked(method, timeout, **arguments)

    def resume(self, timeout: float) -> None:
        self._checked("continue_generation", timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        for method in ("model_info", "get_model_info"):
            if hasattr(self._engine, method):
                answer = self._call(method, timeout)
                if not isinstance(answer, Mapping):
                    raise RemoteError(f"engine {self.name}: {method}: {cut(repr(answer))}")
                return dict(answer)
        if hasattr(self._engine, "get_weight_version"):
            return {"weight_version": self._call("get_weight_version", timeout)}
        return {}

    def _checked(self, method: str, timeout: float, **arguments: Any) -> None:
        check_answer(self.name, method, self._call(method, timeout, **arguments))

    def _call(self, method: str, timeout: float, **arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._engine, method)
        return self._run(lambda: function(**arguments), method, timeout)

    def _run(self, function: Callable[[], Any], what: str, timeout: float) -> Any:
        where = f"engine {self.name}: {what}"
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name=where, daemon=True)
        thread.start()
        thread.join(max(timeout, 0.0))
        if failure:
            raise translate(where, failure[0]) from failure[0]
        if not outcome:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}")
        return outcome[0]


class RayHandle(LocalHandle):
    """A Ray actor with slime's engine methods."""

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        super().__init__(engine, workers=workers)
        self.name = str(engine)
        if workers is None:
            raise InvalidArgumentError(
                f"engine {self.name}: say how many workers a Ray actor's engine has (workers=)"
            )

    def _call(self, method: str, timeout: float, **arguments: Any) -> Any:
        ray = importlib.import_module("ray")
        where = f"engine {self.name}: {method}"
        try:
            reference = getattr(self._engine, method).remote(**arguments)
            return ray.get(reference, timeout=max(timeout, 0.0))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}") from None
        except ray.exceptions.RayActorError as error:
            raise PeerClosedError(f"{where}: {cut(str(error))}") from error
        except ray.exceptions.RayTaskError as error:
            raise RemoteError(f"{where}: {cut(str(error))}") from error
