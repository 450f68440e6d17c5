"""The receiver: one engine worker's part in updates, driven by control messages."""

from __future__ import annotations

import json
import logging
import time
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from wsync._core import (
    Device,
    Importer,
    Layout,
    PeerClosedError,
    ProtocolError,
    StateError,
    WsyncError,
    host,
)
from wsync.engine.ahead import Ahead
from wsync.engine.ring_loaders import Held, Loader, Receipt
from wsync.engine.update_state import UpdateState
from wsync.machine.device import await_torch, settle
from wsync.machine.error_text import error_text
from wsync.machine.lendable import most_segments, place_of, raise_descriptor_limit
from wsync.machine.trace import Trace
from wsync.messages import payload
from wsync.messages.control import BORROWS, LEARN, LOAD_FORMAT, TAKEN, Control, Learnt
from wsync.messages.tcp_channel import is_remote

if TYPE_CHECKING:
    from wsync.exchange.remote_session import RemoteImporter

    Session = Importer | RemoteImporter

_log = logging.getLogger(__name__)
_REFUSAL_SECONDS: Final = 10.0
_REASON_LIMIT: Final = 1000


class Receiver:
    """Takes part in updates on behalf of one worker.  Make the receiver and its loader in the
    process that answers requests: after a fork, the child has none of their threads.

    `answer` takes a worker's payload of a weight-update request, and `handle` the bytes of the
    control message in it.  Both return (success, text) when the update has been committed or has
    failed.  They do not raise for bad input or failed updates.
    The session with the trainer rank, its ring and its manifest stay attached between updates;
    a message with another session id replaces it.  If a closing message says so, a part of the next
    update comes before its opening message, while the engine generates.

    state: whether the weights are those of one update.
    """

    def __init__(self, loader: Loader, *, worker: int = 0) -> None:
        self.state = UpdateState()
        self._loader = loader
        self._worker = worker
        self._session = ""
        self._opened = 0  # the session's last update
        self._importer: Session | None = None
        self._learning: Session | None = None  # open until the next session has begun
        self._ahead: Ahead | None = None  # uses the session between two updates
        self._generation = -1
        self._rounds = self._ring_nbytes = 0  # of the last update
        self._trace = Trace.wanted("engine", worker)

    @property
    def trouble(self) -> str:
        """Why the engine must not generate, or ""."""
        return self.state.trouble

    def answer(self, content: object, *, version: int | str | None = None) -> tuple[bool, str]:
        """Carries out the control message in a payload; returns (success, text).

        content: the payload of wsync.EngineHandle.update_weights for this worker: its bytes, or the
        object that an engine unpickled.  version: the weight version of that request, if any.
        """
        try:
            if isinstance(content, bytes | bytearray | memoryview):
                content = payload.load(bytes(content))
            control = payload.control_bytes(content)
            if control is None:
                raise ProtocolError(
                    f"the payload is a {type(content).__name__}, not a control message: does the "
                    f"engine's handle list {LOAD_FORMAT!r} in load_formats?"
                )
        except WsyncError as error:
            return refused(self._worker, error)
        return self.handle(control, version=version)

    def handle(
        self,
        control: bytes | str,
        *,
        version: int | str | None = None,
    ) -> tuple[bool, str]:
        """Carries out a control message; returns (success, text).

        control: the message, as bytes or as text.
        version: the weight version of a closing request, if the engine passes it on.
        """
        try:
            message = Control.from_bytes(control.encode() if isinstance(control, str) else control)
            with self.state.only():
                if message.op == "open":
                    return self._open(message)
                if message.op == "close":
                    return self._close(message, None if version is None else str(version))
                if message.op == "send":
                    return self._send(message)
                return self._inspect(message)
        except WsyncError as error:
            return refused(self._worker, error)

    def close(self) -> None:
        """Ends the session."""
        self._end_learning()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        importer, self._importer, self._session = self._importer, None, ""
        if importer is not None:
            importer.close()
            self._loader.detach()

    def fail(self, message: Control, text: str) -> bool:
        """Ends a message's session with an error; returns False if that session is not open."""
        if self._importer is None or self._session != message.session:
            return False
        self._give_up(text)
        return True

    def _give_up(self, text: str) -> None:
        """Ends the session, if there is one, with an error."""
        if self._ahead is not None:
            self._ahead.close()  # first: it uses the session
        if self._importer is not None:
            self._importer.fail(text)
        self.close()

    def _close(self, message: Control, version: str | None) -> tuple[bool, str]:
        try:
            self.state.close(message.session, message.update, version)
        except StateError as error:
            # SGLang records the version anyway, so tell the trainer, which leaves it paused
            if message.update == self.state.update:
                self.fail(message, str(error))
            raise
        self._begin_ahead(message)
        return True, _nth(message.update)

    def _begin_ahead(self, message: Control) -> None:
        if message.ahead and self._importer is not None and self._ahead is None:
            self._ahead = Ahead(message.ahead, self._importer, self, message.deadline)

    def _inspect(self, message: Control) -> tuple[bool, str]:
        facts = {
            "worker": self._worker,
            "update": self.state.update,
            "consistent": not self.trouble,
            "inconsistency": self.trouble,
            "loader": type(self._loader).__name__,
            "rounds": self._rounds,
            "ring_nbytes": self._ring_nbytes,
            "verified": self.state.verified,
            **self._loader.facts(),
        }
        try:
            blob, device = json.dumps(facts).encode(), self._loader.device
            connect(message.address, blob, message.deadline, device).close()
        except Exception as error:
            return refused(self._worker, error)
        return True, "inspected"

    def _send(self, message: Control) -> tuple[bool, str]:
        """Fills another engine, together with the other workers."""
        from wsync.engine.sending import send  # with all that a trainer rank needs

        def look() -> tuple[Held, str]:
            self.state.check_whole()
            held = self._loader.held()
            if self.state.update is None:
                raise StateError("no trainer has updated this engine since it was started")
            return held, self.state.weight_version

        try:
            send(message, self._worker, look)
        except Exception as error:
            return refused(self._worker, error)
        return True, "sent"

    def _open(self, message: Control) -> tuple[bool, str]:
        # a comparison has the number of the update that it compares
        newest = self._opened - bool(message.answer)
        if self._session == message.session and message.update <= newest:
            raise StateError(f"{_nth(message.update)} has already begun: the request was repeated")
        try:
            self._run(message)
        except Exception as error:
            said = f"{_nth(message.update)}: {_text(error)}"
            text = f"worker {self._worker}: {said}"
            _log.warning("%s", text)
            self.fail(message, said)  # the trainer knows which worker this is
            if not self.state.consistent:
                self.state.lose(text)
            return False, text
        return True, _nth(message.update)

    def _run(self, message: Control) -> None:
        trace = self._trace = self._trace.anew()
        timeout = message.deadline
        with trace.span("join"):
            importer = self._connect(message)
            ahead = self._ahead
            begun = importer.begin(timeout) if ahead is None else ahead.join(timeout)
            self._ahead = None
        update, rounds = begun
        self._end_learning()
        if update != message.update:
            raise ProtocolError(
                f"this request is for update {message.update}, but the trainer "
                f"has begun {_nth(update)}"
            )
        if importer.generation != self._generation:
            self._generation = -1
            self._loader.attach(importer.ring, Layout.from_bytes(importer.manifest))
            self._generation = importer.generation
        self._rounds, self._ring_nbytes = rounds, importer.ring.nbytes
        self._loader.borrow(importer.bound)
        try:
            taken = ahead is not None and ahead.rounds
            if message.answer:
                receipt = self._compare(message, importer, rounds, taken=taken)
            else:
                receipt = self._load(importer, rounds, timeout, taken=taken)
            importer.prepared(receipt.tensors, receipt.nbytes, receipt.audit_ns, timeout)
            with trace.span("verdict"):
                importer.verdict(timeout)
        except BaseException:
            self._loader.abandon()
            raise
        if message.answer:
            self._begin_ahead(message)
            return
        self._loader.confirm()
        self.state.commit(message.session, update)
        trace.write(update)

    def _compare(self, message: Control, importer: Session, rounds: int, *, taken: bool) -> Receipt:
        """Takes all rounds, unless they are taken, compares them with the weights, and tells the
        trainer what differs."""
        loader, timeout = self._loader, message.deadline
        comparison, uncompared = None, loader.own_loading
        settle(loader.device, timeout)
        try:
            comparison = loader.comparison(timeout)
        except StateError as error:
            uncompared = str(error)
        for round in range(rounds):
            if not taken:
                importer.take(round, None, timeout)
            if comparison is not None:
                comparison.compare(round)
            if not taken:
                importer.done(round, None, timeout)
        loader.borrow(None)  # keeps the trainer's memory no longer
        found = {"tensors": 0, "nbytes": 0, "different": {}, "uncompared": uncompared}
        found |= {} if comparison is None else comparison.facts()
        blob = json.dumps(found).encode()
        connect(message.answer, blob, timeout, loader.device).close()
        self.state.verified = {"at": time.time(), "current": True, **found}
        manifest = Layout.from_bytes(importer.manifest)
        return Receipt(manifest.tensor_count, manifest.shard_nbytes)

    def _load(self, importer: Session, rounds: int, timeout: float, *, taken: bool) -> Receipt:
        """Takes all rounds, unless they are taken, and loads them.  If the loader has a stream, the
        stream waits for the data: this thread first hands it all rounds, and then checks that each
        one arrives in time."""
        trace = self._trace
        stream = self._loader.stream
        # after a fault a GPU sets no more events, here or in the trainer
        look = None if stream is None else stream.look
        # after a pause, a forward pass may still read the weights on another stream
        settle(self._loader.device, timeout, look or (lambda: None))
        self._loader.begin(rounds)
        await_torch(self._loader.device, timeout)
        if stream is not None:
            trace.watch(stream, rounds)
        for round in range(rounds):
            if not taken:
                with trace.span("take", round):
                    importer.take(round, stream, timeout, look)
            if round == 0:
                self.lose()
            with trace.span("load", round) if stream is None else nullcontext():
                self._loader.load(round)
            if not taken:
                importer.done(round, stream, timeout)
        if stream is not None and not taken:
            round = 0
            while round < rounds:
                with trace.span("take", round):
                    importer.wait(round, timeout, look)
                round = max(round + 1, importer.arrived)
        with trace.span("finish"):
            receipt = self._loader.finish(timeout)
            await_torch(self._loader.device, timeout)  # work that the loader gave to torch last
        if stream is not None:
            trace.take(stream)
        return receipt

    def _connect(self, message: Control) -> Session:
        importer = self._importer
        if importer is None or self._session != message.session:
            blob, device = self._loader.blob(), self._loader.device
            if self._ahead is not None and self._ahead.failed:
                self.close()  # frees the memory of a session that has ended
            # first: a late message of a trainer that is gone must not end another's session
            importer = connect(message.address, self._introduced(blob), message.deadline, device)
            self._give_up(TAKEN)
            self._importer, self._session = importer, message.session
            self._opened = message.update
            self._generation = -1
            if blob == LEARN:
                importer = self._learn(message, importer)
        self._opened = message.update
        return importer

    def lose(self) -> None:
        """Records that the weights are no longer those of one update."""
        self.state.lose(f"{_nth(self._opened)} is running")

    def _introduced(self, said: bytes) -> bytes:
        """Returns the worker's first message: the memory that it can read, if any, then `said`."""
        if not self._loader.borrows:
            return said
        device = self._loader.device
        places = [place_of(gpu, mps=device.mps) for gpu in (device.uuid, *device.peers)]
        raise_descriptor_limit()
        facts = ",".join([str(most_segments()), *places])
        return BORROWS + facts.encode() + b"\n" + said

    def _learn(self, message: Control, former: Session) -> Session:
        """Receives the trainer's list of tensors, learns which parts of them to keep, and connects
        again to ask for these."""
        former.begin(message.deadline)
        address, _, content = former.manifest.partition(b"\n")
        model = Layout.from_bytes(content)
        # as in _load: other streams may still use the weights, and learning writes to them
        settle(self._loader.device, message.deadline)
        receiver = weakref.ref(self)  # the loader keeps its callback, which must not keep this
        blob = self._loader.learn(model, lambda: _lose(receiver()))
        # the trainer watches the session for learning until the new one has connected
        self._learning = former
        following = address.decode("ascii", "replace")
        learnt = Learnt(blob, self._loader.own_loading[:_REASON_LIMIT]).to_bytes()
        said = self._introduced(learnt)  # learning may have chosen a loader with another device
        self._importer = connect(following, said, message.deadline, self._loader.device)
        return self._importer

    def _end_learning(self) -> None:
        former, self._learning = self._learning, None
        if former is not None:
            former.close()


def refuse(control: bytes | None, why: Exception) -> None:
    """Tells the trainer that sent an opening message why this worker takes no part.  Needed for
    engines that do not pass on a worker's answer."""
    try:
        message, text = Control.from_bytes(control or b""), _text(why)
        if message.op != "open":
            return
        timeout = min(message.deadline, _REFUSAL_SECONDS)
        session = connect(message.address, LEARN, timeout, host())
        try:
            session.fail(text)
        finally:
            session.close()
    except Exception as error:
        _log.warning("could not tell the trainer why this worker takes no part: %s", _text(error))


def refused(worker: int, error: Exception) -> tuple[bool, str]:
    """Returns a worker's answer to a message that it could not follow."""
    return False, f"worker {worker}: {_text(error)}"


def _lose(receiver: Receiver | None) -> None:
    if receiver is not None:
        receiver.lose()


def _text(error: Exception) -> str:
    # wsync's own errors say everything in their message
    return str(error) if isinstance(error, WsyncError) else error_text(error)


def _nth(update: int) -> str:
    """Names an update in messages.  Its version is known only when all workers are done."""
    return f"update {update} of this connection"


def connect(address: str, blob: bytes, timeout: float, device: Device) -> Session:
    """Opens a session with the trainer that listens at an address, on this host or on another.  The
    session's ring is made on `device`."""
    if is_remote(address):
        from wsync.exchange.remote_session import RemoteImporter

        return RemoteImporter(address, blob, timeout, device)
    try:
        return Importer(address, blob, timeout, device)
    except PeerClosedError as error:
        raise PeerClosedError(
            f"{error}: either the trainer has ended; or this engine was restarted after the "
            "trainer connected (call update again, which connects anew); or this process runs in "
            "another container and does not see the trainer's folder (set Options.directory)"
        ) from error
