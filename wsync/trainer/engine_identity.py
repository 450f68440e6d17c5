"""A handle that checks whether its engine is still the one that was paused for an update."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from wsync._core import RemoteError
from wsync.handles.answers import identity_of
from wsync.handles.base import EngineHandle, send_control
from wsync.machine.deadline import Deadline
from wsync.messages.control import Control


class CheckedEngine:
    """A handle that checks its engine, for the updates of one connection; an EngineHandle itself.

    `pause` begins an update.  It makes up an id, which goes with every request of the update to an
    engine that can tell by it what is late, repeated or another trainer's (handles with `during`).
    It also notes which engine this is, and the version that it reports.  A version is given only
    to the same engine, and only while it reports the same version; it is believed when the engine
    reports it.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self.name = engine.name
        self.workers = engine.workers
        self._engine = engine
        self._during: Any = engine  # what only some handles have is asked of it, too
        self._identity: dict[str, Any] = {}
        self._before: object = None  # the version that the engine had when it was paused
        self._version: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._during, name)  # what only some handles have

    @property
    def load_formats(self) -> tuple[str, ...]:
        return self._engine.load_formats

    def pause(self, mode: str, timeout: float) -> None:
        deadline = Deadline(timeout)
        during = getattr(self._engine, "during", None)
        update_id = secrets.token_hex(8)
        told = None if during is None else during(update_id)
        self._during = told or self._engine
        self._version = None
        self._during.pause(mode, timeout)
        self._identity, found = self._ask(deadline)
        self._before = found.get("weight_version")

    def flush(self, timeout: float) -> None:
        self._during.flush(timeout)

    def update_weights(self, payloads: Sequence[bytes], **request: Any) -> None:
        self._during.update_weights(payloads, **self._checked(**request))

    def send_control(self, messages: Sequence[Control], **request: Any) -> None:
        send_control(self._during, messages, **self._checked(**request))

    def update_weights_from_disk(self, path: str, **request: Any) -> None:
        self._during.update_weights_from_disk(path, **self._checked(**request))

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        request = self._checked(arguments.get("weight_version"), timeout)
        self._during.call(method, arguments, request["timeout"])

    def verify(self, timeout: float) -> None:
        """Before the engine goes on.

        Raises:
            RemoteError: it is not the one that took the update on, or does not have it.
        """
        info = self._check_identity(Deadline(timeout))
        if info.get("consistent") is False:
            raise RemoteError(f"engine {self.name}: {info.get('reason') or 'inconsistent'}")
        version = info.get("weight_version", self._version)
        if self._version is not None and str(version) != self._version:
            raise RemoteError(
                f"engine {self.name}: reports weight version {version} after it was given "
                f"{self._version}: it was restarted, or another trainer updates it"
            )

    def resume(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        self._during.resume(timeout)
        self._check_identity(deadline)

    def model_info(self, timeout: float) -> dict[str, Any]:
        info: dict[str, Any] = self._during.model_info(timeout)
        return info

    def _checked(
        self, weight_version: int | str | None, timeout: float, **others: Any
    ) -> dict[str, Any]:
        """What a request is made with, in the time that is left once the engine has been found to
        be one that may be given the version, where the request has one."""
        deadline = Deadline(timeout)
        if weight_version is not None:
            found = self._check_identity(deadline)
            now = found.get("weight_version")
            if self._version is None and None not in (now, self._before) and now != self._before:
                raise RemoteError(
                    f"engine {self.name}: reports weight version {now} and had {self._before} when "
                    "it was paused for this update: it was restarted, or another trainer updates it"
                )
            self._version = str(weight_version)
        return {"weight_version": weight_version, "timeout": deadline.left, **others}

    def _check_identity(self, deadline: Deadline) -> dict[str, Any]:
        """What the engine says of itself.  RemoteError if it is another one."""
        identity, found = self._ask(deadline)
        for what, before in self._identity.items():
            if identity.get(what) != before:
                raise RemoteError(
                    f"engine {self.name}: is not the one that was paused for this update: {what} "
                    f"was {before!r} and is {identity.get(what)!r}"
                )
        return found

    def _ask(self, deadline: Deadline) -> tuple[dict[str, Any], dict[str, Any]]:
        """Which engine this is, as far as it says, and its model_info; in one request where that
        tells its instance."""
        found: dict[str, Any] = self._during.model_info(deadline.left) or {}
        server: dict[str, Any] = {}
        if "instance" not in found and hasattr(type(self._during), "server_info"):
            server = self._during.server_info(deadline.left) or {}
        known = "instance" in found or server
        return identity_of({**found, **server}) if known else {}, found
