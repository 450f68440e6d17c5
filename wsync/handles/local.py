"""Engines reached by method calls: objects of this process, or Ray actors."""

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any

from wsync._core import DeadlineError, InvalidArgumentError, PeerClosedError, RemoteError
from wsync.handles.answers import check_answer, cut, refusal, seconds, translate
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.daemon_threads import start


class LocalHandle(ApiHandle):
    """An object in this process with slime's engine methods (pause_generation, flush_cache,
    continue_generation, update_weights_from_tensor).  Its attributes `name`, `workers` and
    `load_formats` are read where it has them.

    Each call runs in a thread of its own, so that a stalled engine costs its deadline only; the
    abandoned thread ends when the engine returns.
    """

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        super().__init__()
        self._engine: Any = engine
        self.name = str(getattr(engine, "name", None) or f"{type(engine).__qualname__} object")
        if workers is None:
            workers = getattr(engine, "workers", 1)
        self.workers = int(workers or 1)
        self.load_formats: tuple[str, ...] = tuple(getattr(engine, "load_formats", ()))

    def pause(self, mode: str, timeout: float) -> None:
        # slime's actors of 0.2.2 take no mode; abort is what they do
        arguments = {} if mode == "abort" else {"mode": mode}
        self._do("pause_generation", arguments, timeout)

    def _flush_once(self, timeout: float) -> str | None:
        return refusal(self._call("flush_cache", timeout))

    def _info(self, methods: tuple[str, ...], timeout: float) -> dict[str, Any]:
        method = next((method for method in methods if hasattr(self._engine, method)), None)
        if method is None:
            return {}
        answer = self._call(method, timeout)
        if not isinstance(answer, Mapping):
            raise RemoteError(f"engine {self.name}: {method}: {cut(repr(answer))}")
        return dict(answer)

    def model_info(self, timeout: float) -> dict[str, Any]:
        found = super().model_info(timeout)
        if not found and hasattr(self._engine, "get_weight_version"):
            return {"weight_version": self._call("get_weight_version", timeout)}
        return found

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        check_answer(self.name, method, self._call(method, timeout, **arguments))

    def _call(self, method: str, timeout: float, /, **arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._engine, method)
        return self._run(lambda: function(**arguments), method, timeout)

    def _run(self, function: Callable[[], Any], what: str, timeout: float) -> Any:
        where = f"engine {self.name}: {what}"
        call = start(where, function)
        if not wait([call], max(timeout, 0.0)).done:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}")
        error = call.exception()
        if error is not None:
            raise translate(where, error) from error
        return call.result()

    def _call_actor(self, method: str, timeout: float, arguments: Mapping[str, Any]) -> Any:
        """What a method of an engine answers that is a Ray actor."""
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
        except Exception as error:
            raise translate(where, error) from error


class RayHandle(LocalHandle):
    """A Ray actor with slime's engine methods."""

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        super().__init__(engine, workers=workers)
        self.name = str(engine)
        if workers is None:
            raise InvalidArgumentError(
                f"engine {self.name}: say how many workers a Ray actor's engine has (workers=)"
            )

    def _call(self, method: str, timeout: float, /, **arguments: Any) -> Any:
        return self._call_actor(method, timeout, arguments)
