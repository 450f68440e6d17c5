"""Engines reached by method calls: objects of this process, or Ray actors."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.handles.answers import NotOfferedError, Setup, cut, other_draft, translate
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.deadline import Deadline, seconds
from wsync.machine.error_text import error_text


class LocalHandle(ApiHandle):
    """An object in this process with slime's engine methods (pause_generation, flush_cache,
    continue_generation, update_weights_from_tensor).  Its attributes `name`, `workers` and
    `load_formats` are used if it has them.
    """

    _serves = False
    _remote = False  # whether it is a Ray actor

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        super().__init__()
        self._engine: Any = engine
        self.name = str(getattr(engine, "name", None) or f"{type(engine).__qualname__} object")
        self.workers = int(workers or getattr(engine, "workers", None) or 1)
        self.load_formats: tuple[str, ...] = tuple(getattr(engine, "load_formats", ()))

    @property
    def in_process(self) -> bool:
        """Whether the engine is an object of this process."""
        return not self._remote

    def _info(self, method: str, timeout: float) -> dict[str, Any]:
        with contextlib.suppress(NotOfferedError):
            return super()._info(method, timeout)
        return {}

    def model_info(self, timeout: float) -> dict[str, Any]:
        found = super().model_info(timeout)
        if not found and hasattr(self._engine, "get_weight_version"):
            return {"weight_version": self._call("get_weight_version", timeout)}
        return found

    def pulls(self, timeout: float) -> bool:
        """Whether the engine has pull_weights."""
        return self._method("pull_weights") is not None

    def _method(self, name: str) -> Any:
        """Returns the engine's method of this name; None if it has none."""
        return getattr(self._engine, name, None)

    def _call(self, method: str, timeout: float, /, **arguments: Any) -> Any:
        if self._method(method) is None:
            raise NotOfferedError(f"engine {self.name}: it has no method {method}")
        if self._remote:
            with self._asks(method):
                return call_actor(self._engine, self.name, method, timeout, arguments)
        return self._result(lambda: self._invoke(method, timeout, arguments), method)

    def _invoke(self, method: str, timeout: float, arguments: dict[str, Any]) -> Any:
        return self._method(method)(**arguments)

    def _result(self, function: Callable[[], Any], method: str) -> Any:
        """Calls a function; converts the engine's errors to wsync's."""
        with self._asks(method) as where:
            try:
                return function()
            except Exception as error:
                raise translate(where, error) from error


class RayHandle(LocalHandle):
    """A Ray actor with slime's engine methods.

    Its server_info or get_server_info tells its workers and weight loaders.  If the actor lacks
    these methods, the caller says how many workers there are.  timeout: seconds that the actor has
    to answer.
    """

    _serves = _remote = True

    def __init__(self, engine: Any, *, workers: int | None = None, timeout: float) -> None:
        super().__init__(engine, workers=1)
        self.name = str(engine)  # with the actor's id
        started = self.server_info(timeout)
        if "tp_size" not in started and workers is None:
            raise InvalidArgumentError(
                f"engine {self.name}: the actor does not say how many workers its engine has (it "
                "has neither get_url nor server_info): give workers="
            )
        setup = Setup.of(self.name, {"tp_size": workers} | started)
        self.workers, self.load_formats, self._started = setup.workers, setup.loaders, started
        if draft := other_draft(started):
            raise UnsupportedError(
                f"engine {self.name}: it drafts tokens with another model, {draft}, which updates "
                "through the actor would reach, too: give the URL of the engine's server"
            )

    def model_info(self, timeout: float) -> dict[str, Any]:
        """What the actor reports, and its process: Ray may restart an actor without notice
        (max_restarts), and the new process has the weights from the start."""
        deadline = Deadline(timeout)
        found = super().model_info(timeout)
        if not hasattr(self._engine, "__ray_call__"):
            return found

        def worker(actor: object) -> str:  # pickled by value: the actor needs no wsync
            import ray

            return str(ray.get_runtime_context().get_worker_id())

        return {**found, "process": self._call("__ray_call__", deadline.left, fn=worker)}


def url_of(actor: Any, timeout: float) -> str | None:
    """The URL of the server that a Ray actor has started, if the actor tells it (slime's do)."""
    if not hasattr(actor, "get_url"):
        return None
    url: str | None = call_actor(actor, str(actor), "get_url", timeout, {})
    return url


def call_actor(
    actor: Any, name: str, method: str, timeout: float, arguments: Mapping[str, Any]
) -> Any:
    """Calls a method of an engine that is a Ray actor; errors name the engine.  Ray does not repeat
    the call if it restarts the actor, because the new process has lost the weights."""
    ray = importlib.import_module("ray")
    where = f"engine {name}: {method}"
    try:
        call = getattr(actor, method).options(max_task_retries=0)
        reference = call.remote(**arguments)
        return ray.get(reference, timeout=max(timeout, 0.0))
    except ray.exceptions.RayTaskError as error:  # also an instance of the engine's error
        raise RemoteError(f"{where}: {_raised(error, ray.exceptions.RayTaskError)}") from error
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"{where}: no answer within {seconds(timeout)}") from None
    except ray.exceptions.RayActorError as error:
        raise PeerClosedError(f"{where}: {cut(str(error))}") from error
    except Exception as error:
        raise translate(where, error) from error


def _raised(error: BaseException, wrapped: type[Any]) -> str:
    """The text of an actor's error, which may come from another actor that it called.  Ray's own
    text of a wrapped error is a coloured traceback."""
    while isinstance(error, wrapped) and isinstance(error.cause, BaseException):
        error = error.cause
    return cut(error_text(error))
