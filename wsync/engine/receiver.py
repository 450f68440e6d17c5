"""The receiver: one engine worker's part in updates, driven by control messages."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wsync._core import Device, Importer, Layout, ProtocolError, StateError, WsyncError, host
from wsync.engine.buckets import Buckets
from wsync.engine.learn.deadline import learning
from wsync.engine.loaders import Confirms, Describes, Learner, Loader, Receipt
from wsync.machine.device import await_torch, follow_torch
from wsync.machine.trace import Trace
from wsync.messages.channel import is_remote
from wsync.messages.control import LEARN, Control

if TYPE_CHECKING:
    from wsync.engine.remote import RemoteImporter

    Session = Importer | RemoteImporter

_log = logging.getLogger(__name__)
_REFUSAL_SECONDS: Final = 10.0


class Receiver:
    """Takes part in updates on behalf of one worker.

    `handle` is given the bytes of a control message and returns (success, text) when the update
    has been committed or has failed; it raises neither for bad input nor for failed updates.
    The session with the trainer rank, its ring and its manifest stay attached between updates;
    a message with another session id replaces it.

    consistent: False from the first byte loaded until the update commits; a worker whose update
    failed stays inconsistent, `reason` says why, until a later update commits.
    trouble: why an engine must not generate, or ""; also between an update's commit and the closing
    message, whose request says which version the weights are.
    update: number of the last committed update, or None.
    buckets: for weights that come in requests of their own.
    request: what an engine calls the request that it has this worker carry out; weights: the
    request that last replaced all weights, which tells whether the workers of one engine hold
    the same.
    """

    def __init__(self, loader: Loader, *, worker: int = 0) -> None:
        self._loader = loader
        self._worker = worker
        self._session = self._committed = ""
        self._importer: Session | None = None
        self._teacher: Session | None = None  # until the session that came of it is under way
        self._generation = -1
        self._busy = threading.Lock()
        self._ways = {"open": self._open, "close": self._close, "inspect": self._inspect}
        self._trace = Trace.wanted("engine", worker)
        self.buckets = Buckets(self)
        self.consistent = True
        self.reason = ""
        self._unnamed = ""
        self.update: int | None = None
        self.request = self.weights = 0
        self.receipt: Receipt | None = None

    @property
    def trouble(self) -> str:
        if self.consistent:
            return self._unnamed
        return self.reason or "the weights are inconsistent"

    def handle(self, control: bytes | None) -> tuple[bool, str]:
        """Does what a control message says; (success, text).  None, which is what
        wsync.messages.payload.control_bytes makes of other payloads, is refused."""
        if control is None:
            return False, f"worker {self._worker}: the payload is not a control message"
        try:
            message = Control.from_bytes(control)
        except ProtocolError as error:
            return False, f"worker {self._worker}: {error}"
        if not self._busy.acquire(blocking=False):
            return False, f"worker {self._worker}: another update is running"
        try:
            return self._ways[message.op](message)
        finally:
            self._busy.release()

    def restored(self, unnamed: str = "") -> None:
        """Says that every weight has been replaced; `unnamed`, that they have no version yet."""
        self._committed, self._unnamed = "", unnamed
        self.consistent, self.reason, self.weights = True, "", self.request

    def lose(self, why: str) -> None:
        """Says that the weights are not those of one update any more."""
        self.consistent, self.reason = False, f"the weights are inconsistent: {why}"

    @contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """Around the replacement of every weight by other means than an update; if the block
        fails the worker is inconsistent.  StateError while an update runs."""
        self.buckets.forget()
        with self.writing(what):
            yield
            self.restored()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around what writes to some of the weights: the worker is inconsistent until `restored`.
        StateError while an update runs."""
        if not self._busy.acquire(blocking=False):
            raise StateError(f"worker {self._worker}: another update is running")
        try:
            self.lose(what)
            yield
        except BaseException as error:
            self.reason += f": {error}"
            raise
        finally:
            self._busy.release()

    def close(self) -> None:
        """Gives up the session."""
        self._forget_teacher()
        importer, self._importer, self._session = self._importer, None, ""
        if importer is not None:
            importer.close()

    def fail(self, message: Control, text: str) -> bool:
        """Ends the session of a message with an error; False where it has none yet."""
        if self._importer is None or self._session != message.session:
            return False
        self._importer.fail(text)
        self.close()
        return True

    def _close(self, message: Control) -> tuple[bool, str]:
        """The request around a close carries the weight version: refusing it keeps an engine
        from taking on the version of an update that it does not have."""
        if not self.consistent:
            return False, f"worker {self._worker}: {self.reason}"
        if self.update != message.update:
            last = "none" if self.update is None else self.update
            return False, (
                f"worker {self._worker}: {_nth(message.update)} was not committed here, "
                f"the last one is {last}"
            )
        if self._committed != message.session:
            # trainers count from 1: a late word of one that is gone would fit another's update
            return False, (
                f"worker {self._worker}: the weights have been replaced by others after "
                f"{_nth(message.update)}"
            )
        self._unnamed = ""
        return True, _nth(message.update)

    def _inspect(self, message: Control) -> tuple[bool, str]:
        learnt = self._loader.facts() if isinstance(self._loader, Describes) else {}
        facts = {
            "worker": self._worker,
            "update": self.update,
            "consistent": not self.trouble,
            "inconsistency": self.trouble,
            "loader": type(self._loader).__name__,
            **learnt,
        }
        try:
            blob, device = json.dumps(facts).encode(), self._loader.device
            connect(message.address, blob, message.deadline, device).close()
        except Exception as error:
            return False, f"worker {self._worker}: {_text(error)}"
        return True, "inspected"

    def _open(self, message: Control) -> tuple[bool, str]:
        self.buckets.forget()
        try:
            self._run(message)
        except Exception as error:
            said = f"{_nth(message.update)}: {_text(error)}"
            text = f"worker {self._worker}: {said}"
            _log.warning("%s", text)
            if self._importer is not None:
                self._importer.fail(said)  # the trainer knows who it is
            self.close()
            if not self.consistent:
                self.reason = f"the weights are inconsistent: {text}"
            return False, text
        return True, _nth(message.update)

    def _run(self, message: Control) -> None:
        importer = self._connect(message)
        timeout = message.deadline
        update, rounds = importer.begin(timeout)
        self._forget_teacher()
        if update != message.update:
            raise ProtocolError(f"the trainer has begun {_nth(update)}, not {message.update}")
        if importer.generation != self._generation:
            self._generation = -1
            self._loader.attach(importer.ring, Layout.from_bytes(importer.manifest))
            self._generation = importer.generation
        try:
            receipt = self._load(importer, update, rounds, timeout)
        except BaseException:
            self._loader.abandon()
            raise
        importer.prepared(receipt.tensors, receipt.nbytes, receipt.checksum, timeout)
        importer.verdict(timeout)
        if isinstance(self._loader, Confirms):
            self._loader.confirm()
        self.restored(f"update {update} is complete, but nobody has said its version yet")
        self.update, self.receipt, self._committed = update, receipt, message.session

    def _load(self, importer: Session, update: int, rounds: int, timeout: float) -> Receipt:
        """Takes all rounds.  A loader's stream waits for the data itself: this thread hands it
        round after round, and then sees to it that each one comes in time."""
        self._loader.begin(rounds)
        stream = self._loader.stream
        if stream is not None:
            follow_torch(stream)  # which may still read the weights
        if self._trace is not None:
            self._trace.start()
            if stream is not None:
                stream.trace(rounds)
        for round in range(rounds):
            importer.take(round, stream, timeout)
            self.lose(f"{_nth(update)} is running")
            if self._trace is not None and stream is None:
                with self._trace.span("load", round):
                    self._loader.load(round)
            else:
                self._loader.load(round)
            importer.done(round, stream, timeout)
        if stream is not None:
            for round in range(rounds):
                importer.wait(round, timeout)
        receipt = self._loader.finish(timeout)
        await_torch(self._loader.device, timeout)  # what loaders do last
        if self._trace is not None:
            if stream is not None:
                self._trace.take(stream)
            self._trace.write(update)
        return receipt

    def _connect(self, message: Control) -> Session:
        if self._importer is None or self._session != message.session:
            if self._importer is not None:
                self._importer.fail("another trainer has taken over")
            self.close()
            self._generation = -1
            blob, device = self._loader.blob(), self._loader.device
            self._importer = connect(message.address, blob, message.deadline, device)
            if blob == LEARN:
                self._learn(message)
            self._session = message.session
        return self._importer

    def _learn(self, message: Control) -> None:
        """Is told what tensors the trainer has, learns what to keep of them, and connects again
        with that."""
        teacher = self._importer
        assert teacher is not None and isinstance(self._loader, Learner)
        teacher.begin(message.deadline)
        address, _, model = teacher.manifest.partition(b"\n")
        with learning(message.deadline):
            blob = self._loader.learn(
                Layout.from_bytes(model), lambda: self.lose(f"{_nth(message.update)} is running")
            )
        # the trainer listens to the teacher's session until this one has come
        self._teacher = teacher
        door = address.decode("ascii", "replace")
        self._importer = connect(door, blob, message.deadline, self._loader.device)

    def _forget_teacher(self) -> None:
        teacher, self._teacher = self._teacher, None
        if teacher is not None:
            teacher.close()


def refuse(control: bytes | None, text: str, receiver: Receiver | None = None) -> None:
    """Tells the trainer of an opening message that this worker takes no part, and why: for
    engines that keep to themselves what a worker answers."""
    try:
        message = Control.from_bytes(control or b"")
        if message.op != "open":
            return
        if receiver is not None and receiver.fail(message, text):
            return
        timeout = min(message.deadline, _REFUSAL_SECONDS)
        session = connect(message.address, LEARN, timeout, host())
        try:
            session.fail(text)
        finally:
            session.close()
    except Exception as error:
        _log.warning("the trainer could not be told: %s", _text(error))


def _nth(update: int) -> str:
    """An update, for messages; its version comes when all workers are done."""
    return f"update {update} since the trainer connected"


def connect(address: str, blob: bytes, timeout: float, device: Device) -> Session:
    """A session with the trainer that listens at an address, on this host or on another, whose
    ring is to lie on a device."""
    if is_remote(address):
        from wsync.engine.remote import RemoteImporter

        return RemoteImporter(address, blob, timeout, device)
    return Importer(address, blob, timeout, device)


def _text(error: Exception) -> str:
    # wsync's own errors say everything in their message
    return str(error) if isinstance(error, WsyncError) else f"{type(error).__name__}: {error}"
