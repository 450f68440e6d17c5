"""A handle that checks whether its engine is still the one that was paused for an update."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wsync._core import PeerClosedError, RemoteError, StateError
from wsync.handles.base import EngineHandle, send_control, show_drafts, who_answers
from wsync.handles.sglang_base import ApiHandle
from wsync.handles.worker_facts import worker_facts
from wsync.machine.deadline import Deadline
from wsync.messages.control import UPDATING, Control


class CheckedEngine:
    """A handle that checks its engine, for the updates of one connection.

    `pause` begins an update: it notes the engine's identity and the version that it reports.  An
    SGLang engine without wsync's loader is given the update's version only if both are unchanged.
    Before and after the engine continues, its identity must be unchanged, and it must report the
    version it was given.

    SGLang records the version of every request that has one.  The opening message and every bucket
    except the last carry a temporary version, so that a failed update cannot leave the old version
    in place.

    before: this engine's object of a failed update.

    Attributes:
        handle: the engine's handle.
        restarted: whether the engine may have been restarted, perhaps with other arguments, since
            the last successful update.
        unchecked: whether it may have been restarted since it was last compared with the trainer.
        stopped: whether the engine was asked to pause, and has not continued since.
        sent: whether the engine was sent weights since it paused, and may hold a part of an update.
        joined: whether its workers were asked to load an update since it paused; only they know
            whether they have written anything.
        paused_seconds: how long the engine did not generate: since the last update paused it, or
            since an earlier one did that failed and left it paused.
    """

    def __init__(self, engine: EngineHandle, before: CheckedEngine | None = None) -> None:
        self.handle = engine
        self.name = engine.name
        self.workers = engine.workers
        self.restarted = self.unchecked = True
        self.stopped: bool = before is not None and before.stopped
        self.sent: bool = before is not None and before.sent
        self.joined: bool = before is not None and before.joined
        self.paused_seconds = 0.0
        self._since: float = 0.0 if before is None else before._since  # when it was asked to pause
        self._during: Any = engine
        self._identity: dict[str, Any] = {}
        self._version: str | None = None  # that the engine must report
        self._before: str | None = None  # that it reported when it paused
        self._updating: str | None = None  # the temporary version, if the engine is given one
        self._shown = ""  # a session whose workers know the engine's drafts
        self._given_up = False
        # in the failed update: whether the engine was restarted before it, and its identity
        self._failed = (True, {}) if before is None else (before.restarted, before._identity)

    @property
    def unanswered(self) -> list[str]:
        """This update's requests without an answer, if the handle records them."""
        return getattr(self._during, "unanswered", [])

    @property
    def _told(self) -> Any:
        """The handle for this update's requests; raises StateError once the update is given up."""
        if self._given_up:
            raise StateError(f"engine {self.name}: not called, because its update was given up")
        return self._during

    def restarted_since(self, identity: object) -> bool:
        """Whether an engine that now has this identity was restarted since the last successful
        update."""
        restarted, known = self._failed
        return restarted or identity != known

    def give_up(self) -> None:
        """Keeps this update's threads from sending further requests.  The next update uses another
        object."""
        self._given_up = True
        if self._during is not self.handle and hasattr(type(self._during), "give_up"):
            self._during.give_up()

    def go_on(self, timeout: float) -> None:
        """Lets the engine continue after an update that was given up, unless it may hold a part of
        the update.

        Raises:
            RemoteError: another update has begun, and the engine may hold a part of its weights.
        """
        deadline, told = Deadline(timeout), self._for_one_update()
        version = str(self.handle.model_info(timeout).get("weight_version"))
        if (self._before or "").startswith(UPDATING) and self.joined:
            return  # an earlier update has failed halfway, perhaps another trainer's
        if version.startswith(UPDATING) and version != self._updating:
            raise RemoteError(f"engine {self.name}: another update has begun: {version}")
        if self.joined:
            said = worker_facts(self.handle, deadline.left)
            # SGLang drops weights that it rearranges when it makes them ready for loading
            if getattr(self.handle, "rearranging", False) or not all(w["consistent"] for w in said):
                return
            if self._updating is not None:  # SGLang has recorded it as the version
                worker_facts(self.handle, deadline.left, weight_version=self._before)
        told.resume(deadline.left)  # also ends the session that the update has begun
        self.stopped = self.joined = False

    def _for_one_update(self) -> Any:
        own: Any = self.handle
        return own.during() if hasattr(type(own), "during") else own

    def pause(self, mode: str, timeout: float) -> None:
        deadline, former, given = Deadline(timeout), self._identity, self._version
        self._during = self._for_one_update()
        # before the pause, which this would make longer
        self._identity, self._version = who_answers(self._told, deadline)
        self._before = self._version
        stock = "instance" not in self._identity and self._version is not None
        self._updating = f"{UPDATING}{secrets.token_hex(12)}" if stock else None
        self.restarted = self._identity != former or (stock and self._version != given)
        self.unchecked |= self.restarted
        if not self.stopped:
            self.stopped, self._since = True, time.perf_counter()
        self._told.pause(mode, deadline.left)

    def flush(self, timeout: float) -> None:
        self._told.flush(timeout)

    def update_weights(self, payloads: Callable[[], Sequence[bytes]], **request: Any) -> None:
        """Sends weights.  payloads: called to make the payloads, once the engine was checked."""
        checked = self._sending(**request)
        self._told.update_weights(payloads(), **checked)

    def send_control(self, messages: Sequence[Control], **request: Any) -> None:
        first = messages[0]
        if first.answer:  # it keeps its weights; SGLang records the version of every request
            request["weight_version"] = self._version
        joined = self.joined or not first.answer
        checked = self._sending(op=first.op, **request)
        self.joined = joined
        if first.op == "open" and first.drafts and first.session != self._shown:
            show_drafts(self._told, checked["timeout"])
            self._shown = first.session
        with contextlib.ExitStack() as stack:
            if first.answer and isinstance(self._told, ApiHandle):
                stack.enter_context(self._told.asking(checked["timeout"]))
            send_control(self._told, messages, **checked)

    def update_weights_from_disk(self, path: str, **request: Any) -> None:
        checked = self._sending(**request)
        self._told.update_weights_from_disk(path, **checked)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        if method == "update_weights_from_distributed":
            named = self._sending(arguments.get("weight_version"), timeout)
            timeout, version = named["timeout"], named["weight_version"]
            arguments = arguments if version is None else {**arguments, "weight_version": version}
        self._told.call(method, arguments, timeout)

    def verify(self, timeout: float) -> None:
        """Raises PeerClosedError if the engine is not the one that was paused, or does not report
        the version that it must report."""
        identity, version = who_answers(self._told, Deadline(timeout))
        for what, before in self._identity.items():
            if identity.get(what) != before:
                raise PeerClosedError(
                    f"engine {self.name}: it is not the engine that was paused for this update: "
                    f"its {what} was {before!r} and is now {identity.get(what)!r}"
                )
        if None not in (version, self._version) and version != self._version:
            raise PeerClosedError(
                f"engine {self.name}: it reports weight version {version}, not {self._version}: "
                "it was restarted during this update, or another trainer updates it"
            )

    def resume(self, timeout: float) -> None:
        """Lets the engine continue, then checks it again.  If the engine was restarted after the
        last check, it continues with the weights of its checkpoint."""
        deadline = Deadline(timeout)
        self._told.resume(deadline.left)
        self.paused_seconds = time.perf_counter() - self._since
        self.verify(deadline.left)
        self.stopped = self.sent = self.joined = False

    def _sending(
        self,
        weight_version: int | str | None,
        timeout: float,
        *,
        op: str = "",
        **others: Any,
    ) -> dict[str, Any]:
        """The arguments of a request that carries weights or makes workers take them.  A request
        without a version gets the temporary one.  The timeout is the time that is left.

        op: of a control message.  Closing messages come just after all workers have answered."""
        deadline = Deadline(timeout)
        if weight_version is None:
            weight_version = self._updating
        elif self._updating is not None and not op:
            self.verify(deadline.left)
        self.joined, self.sent = True, self.sent or op != "open"
        self._version = None if weight_version is None else str(weight_version)
        return {"weight_version": weight_version, "timeout": deadline.left, **others}
