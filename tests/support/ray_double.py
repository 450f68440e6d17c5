"""What wsync uses of Ray, in this process: actors whose methods run in threads of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any

import pytest

from wsync.machine.daemon_threads import start


class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


class GetTimeoutError(TimeoutError):
    pass


class _Method:
    def __init__(self, actor: Actor, call: Callable[..., Any]) -> None:
        self._actor = actor
        self._call = call

    def options(self, *, max_task_retries: int) -> _Method:
        assert max_task_retries == 0
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        raise TypeError("Actor methods cannot be called directly")

    def remote(self, *arguments: Any, **named: Any) -> Future[Any]:
        def run() -> Any:
            if self._actor.dead:
                raise RayActorError("the actor is dead")
            try:
                return self._call(*arguments, **named)
            except Exception as error:
                raise RayTaskError(error) from error

        return start("actor", run)


class Actor:
    """An actor's handle: it has the object's methods, and nothing else of it."""

    def __init__(self, instance: object) -> None:
        self.dead = False
        self._instance = instance

    def __getattr__(self, name: str) -> _Method:
        method = None if name.startswith("_") else getattr(self._instance, name, None)
        if not callable(method):
            raise AttributeError(f"this actor has no method {name}")
        return _Method(self, method)

    def __repr__(self) -> str:
        return f"Actor({type(self._instance).__name__}, {id(self._instance):x})"


def get(references: Any, timeout: float | None = None) -> Any:
    if isinstance(references, list):
        return [get(reference, timeout) for reference in references]
    try:
        return references.result(timeout)
    except FutureTimeout:
        if references.done():
            raise
        raise GetTimeoutError("no answer") from None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `import ray` find this."""
    errors = {"RayActorError": RayActorError, "RayTaskError": RayTaskError}
    exceptions = SimpleNamespace(GetTimeoutError=GetTimeoutError, **errors)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=exceptions))
