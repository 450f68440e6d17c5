"""A handle that checks whether its engine is still the one that was paused for an update."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wsync._core import PeerClosedError, RemoteError, StateError
from wsync.handles.answers import identity_of
from wsync.handles.base import EngineHandle, send_control
from wsync.machine.deadline import Deadline
from wsync.messages.control import UPDATING, Control

_log = logging.getLogger(__name__)


class CheckedEngine:
    """A handle that checks its engine, for the updates of one connection; an EngineHandle itself.

    `pause` begins an update.  It notes which engine this is, and the version that it reports.  A
    version is given only to the same engine, and only while it reports the same version.  Before
    the engine goes on, and after, it has to report the version that it was given.

    SGLang records the version of any request that has one.  It is given a temporary version with
    the opening message and with every bucket but the last, so that an update that fails cannot
    leave the old version in place.

    before: its object in the connection before.

    Attributes:
        handle: the engine's own.
        restarted: whether it may have been restarted, perhaps with other arguments, since an update
            that ended well.
    """

    def __init__(self, engine: EngineHandle, before: CheckedEngine | None = None) -> None:
        self.handle = engine
        self.restarted = True
        self.name = engine.name
        self.workers = engine.workers
        self._during: Any = engine  # what only some handles have is asked of it, too
        self._identity: dict[str, Any] = {} if before is None else before._identity
        # it tells no instance
        self._asks_server: bool = before is not None and before._asks_server
        self._reported: object = None  # the version that the engine has to report
        self._version: str | None = None  # that the update has given
        self._given: str | None = None  # that the last update has, if it has ended well
        self._updating: str | None = None  # the temporary version, if the engine is given one
        self._given_up = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._during, name)  # what only some handles have

    @property
    def load_formats(self) -> tuple[str, ...]:
        return self.handle.load_formats

    @property
    def _told(self) -> Any:
        """The handle for what this update asks; StateError once the update has been given up."""
        if self._given_up:
            raise StateError(f"engine {self.name}: not asked, as its update has been given up")
        return self._during

    def give_up(self) -> None:
        """What threads of this update have not asked of the engine yet they ask no more.  The next
        update begins with another object."""
        self._given_up = True
        if self._during is not self.handle and hasattr(type(self._during), "give_up"):
            self._during.give_up()

    def go_on(self, timeout: float) -> None:
        """Has it go on after an update that was given up before it sent anything.

        Raises:
            RemoteError: another update has begun, whose weights it may hold a part of.
        """
        deadline = Deadline(timeout)
        version = str(self.handle.model_info(timeout).get("weight_version"))
        if version.startswith(UPDATING):
            raise RemoteError(f"engine {self.name}: another update has begun: {version}")
        self._for_one_update().resume(deadline.left)

    def _for_one_update(self) -> Any:
        during = getattr(self.handle, "during", None)
        return (None if during is None else during()) or self.handle

    def pause(self, mode: str, timeout: float) -> None:
        deadline = Deadline(timeout)
        self._during = self._for_one_update()
        self._version = None
        given, self._given = self._given, None
        self._told.pause(mode, timeout)
        identity, (self._identity, found) = self._identity, self._ask(deadline)
        self._reported = found.get("weight_version")
        stock = "instance" not in found and self._reported is not None
        self._updating = f"{UPDATING}{secrets.token_hex(12)}" if stock else None
        disturbed = stock and str(self._reported) != given
        self.restarted = disturbed or self._identity != identity
        if disturbed and given is not None:
            _log.warning(
                "engine %s: reports weight version %s, and the last update gave it %s: it was "
                "restarted, or somebody else has updated it",
                self.name,
                self._reported,
                given,
            )

    def look_anew(self, timeout: float) -> None:
        """Has the handle look whether an engine that was started again still is what it was."""
        look = getattr(self.handle, "look_anew", None)
        if look is not None:
            look(timeout)

    def flush(self, timeout: float) -> None:
        self._told.flush(timeout)

    def update_weights(
        self, payloads: Sequence[bytes] | Callable[[], Sequence[bytes]], **request: Any
    ) -> None:
        """payloads: a function makes them when the engine has been checked."""
        checked = self._named(**request)
        self._told.update_weights(payloads() if callable(payloads) else payloads, **checked)

    def send_control(self, messages: Sequence[Control], **request: Any) -> None:
        send_control(self._told, messages, **self._named(**request))

    def update_weights_from_disk(self, path: str, **request: Any) -> None:
        self._told.update_weights_from_disk(path, **self._checked(**request))

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        named = self._named if method == "update_weights_from_distributed" else self._checked
        request = named(arguments.get("weight_version"), timeout)
        timeout = request.pop("timeout")
        given = {name: value for name, value in request.items() if value is not None}
        self._told.call(method, {**arguments, **given}, timeout)

    def verify(self, timeout: float) -> None:
        """Before the engine goes on: PeerClosedError if it is not the one that took the update on,
        or has another version."""
        found = self._check_identity(Deadline(timeout))
        version = found.get("weight_version", self._version)
        if self._version is not None and str(version) != self._version:
            raise PeerClosedError(
                f"engine {self.name}: reports weight version {version} after it was given "
                f"{self._version}: it was restarted, or another trainer updates it"
            )

    def resume(self, timeout: float) -> None:
        """The engine may be started again between the check before this and its answer: it would
        go on with the weights of its checkpoint.  So it is asked once more, by a new connection."""
        deadline = Deadline(timeout)
        self._told.resume(deadline.left)
        self._during = self.handle
        self.verify(deadline.left)
        self._given = self._version

    def model_info(self, timeout: float) -> dict[str, Any]:
        info: dict[str, Any] = self._told.model_info(timeout)
        return info

    def _checked(
        self, weight_version: int | str | None, timeout: float, **others: Any
    ) -> dict[str, Any]:
        """The arguments of a request.  If it has a version, first checks that the engine may be
        given it, unless it checks that itself, by the session; the timeout is what is left."""
        deadline = Deadline(timeout)
        if weight_version is not None:
            if self._updating is not None:
                now = self._check_identity(deadline).get("weight_version")
                if None not in (now, self._reported) and str(now) != str(self._reported):
                    raise PeerClosedError(
                        f"engine {self.name}: reports weight version {now}, not {self._reported}: "
                        "it was restarted since it was paused for this update, or another trainer "
                        "updates it"
                    )
            self._reported = self._version = str(weight_version)
        return {"weight_version": weight_version, "timeout": deadline.left, **others}

    def _named(
        self, weight_version: int | str | None, timeout: float, **others: Any
    ) -> dict[str, Any]:
        """The same for a message or a bucket, which is given the temporary version if no other."""
        if weight_version is not None or self._updating is None:
            return self._checked(weight_version, timeout, **others)
        self._reported = self._updating
        return {"weight_version": self._updating, "timeout": timeout, **others}

    def _check_identity(self, deadline: Deadline) -> dict[str, Any]:
        """What the engine says of itself.  PeerClosedError if it is another one."""
        identity, found = self._ask(deadline)
        for what, before in self._identity.items():
            if identity.get(what) != before:
                raise PeerClosedError(
                    f"engine {self.name}: is not the one that was paused for this update: {what} "
                    f"was {before!r} and is {identity.get(what)!r}"
                )
        return found

    def _ask(self, deadline: Deadline) -> tuple[dict[str, Any], dict[str, Any]]:
        """Which engine this is, as far as it says, and its model_info; in one request where that
        tells its instance.  Where it does not, server_info comes first.  SGLang answers it when its
        scheduler has done what came before, so that a load from disk which was given up has ended
        when the next one begins: SGLang itself would take the one for the other."""
        server = self._server_info(deadline) if self._asks_server else {}
        found = self._told.model_info(deadline.left) or {}
        asks = "instance" not in found and hasattr(type(self._during), "server_info")
        if asks and not self._asks_server:
            self._asks_server, server = True, self._server_info(deadline)
        known = "instance" in found or "process" in found or server
        return identity_of({**found, **server}) if known else {}, found

    def _server_info(self, deadline: Deadline) -> dict[str, Any]:
        return self._told.server_info(deadline.left) or {}
