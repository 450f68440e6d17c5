"""One engine in a trainer's updates: whose they are, and whether it still is the one that took
them on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from wsync._core import RemoteError
from wsync.handles.base import EngineHandle
from wsync.machine.deadline import left


@runtime_checkable
class Knows(Protocol):
    """What a handle has beyond EngineHandle, as far as its engine offers it."""

    def identity(self, timeout: float) -> Mapping[str, Any]:
        """What another engine, or the same one started again, would say differently."""


class CheckedEngine:
    """An engine's handle, for the updates of one connection; an EngineHandle itself.

    `pause` begins an update.  It makes up an id, which goes with every request of the update to an
    engine that can tell by it what is late, repeated or another trainer's (handles with `during`);
    and it notes which engine this is.  A version is said to the same one alone, and is believed
    when the engine reports it.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self.name = engine.name
        self.workers = engine.workers
        self._engine = self._during = engine
        self._who: dict[str, Any] = {}
        self._version: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._during, name)  # what only some handles have

    @property
    def load_formats(self) -> tuple[str, ...]:
        return self._engine.load_formats

    def pause(self, mode: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        during: Callable[[str], EngineHandle] | None = getattr(self._engine, "during", None)
        told = None if during is None else during(secrets.token_hex(8))
        self._during = told or self._engine
        self._version = None
        self._during.pause(mode, timeout)
        self._who = self._identity(end)

    def flush(self, timeout: float) -> None:
        self._during.flush(timeout)

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        end = time.monotonic() + timeout
        self._say(weight_version, end)
        self._during.update_weights(
            payloads, load_format=load_format, weight_version=weight_version, timeout=left(end)
        )

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        end = time.monotonic() + timeout
        self._say(weight_version, end)
        during: Any = self._during
        during.update_weights_from_disk(path, weight_version=weight_version, timeout=left(end))

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        end = time.monotonic() + timeout
        self._say(arguments.get("weight_version"), end)
        during: Any = self._during
        during.call(method, arguments, left(end))

    def verify(self, timeout: float) -> None:
        """Before the engine goes on.

        Raises:
            RemoteError: it is not the one that took the update on, or does not have it.
        """
        end = time.monotonic() + timeout
        self._check_identity(end)
        info = self.model_info(left(end)) or {}
        if info.get("consistent") is False:
            raise RemoteError(f"engine {self.name}: {info.get('reason') or 'inconsistent'}")
        version = info.get("weight_version", self._version)
        if self._version is not None and str(version) != self._version:
            raise RemoteError(
                f"engine {self.name}: reports weight version {version} after it was given "
                f"{self._version}: it was restarted, or another trainer updates it"
            )

    def resume(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._during.resume(timeout)
        self._check_identity(end)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return self._during.model_info(timeout)

    def _say(self, version: int | str | None, end: float) -> None:
        if version is not None:
            self._version = str(version)
            self._check_identity(end)

    def _check_identity(self, end: float) -> None:
        now = self._identity(end)
        for what, before in self._who.items():
            if now.get(what) != before:
                raise RemoteError(
                    f"engine {self.name}: is not the one that was paused for this update: {what} "
                    f"was {before!r} and is {now.get(what)!r}"
                )

    def _identity(self, end: float) -> dict[str, Any]:
        engine = self._engine
        return dict(engine.identity(left(end)) or {}) if isinstance(engine, Knows) else {}


def checked_engines(engines: Sequence[EngineHandle]) -> list[CheckedEngine]:
    return [CheckedEngine(engine) for engine in engines]
