"""The few bytes that open and close an update inside an engine's own weight-update request.

A control message travels to each tensor-parallel worker of an engine as a uint8 tensor named
`__wsync__` (see wsync.messages.payload.control).  Its bytes are one JSON object:

    {"protocol": 1, "op": "open", "session": "5f0c...", "address": "<token>@<path>",
     "update": 7, "deadline": 60.0}
    {"protocol": 1, "op": "close", "session": "5f0c...", "update": 7, "deadline": 60.0}
    {"protocol": 1, "op": "inspect", "session": "0", "address": "<token>@<path>", "update": 0,
     "deadline": 60.0}

`open` makes the worker take part in update number `update` and is answered when that update has
been committed or has failed; `close` gives the weights the version that the request around it
carries, and is refused where they are not those of that session's update number `update`; `inspect`
has the worker connect and say in its first message, which is JSON, what it has learnt (see
wsync.inspection).  Whoever can reach the engine's API can send these bytes, so they are parsed as
hostile: every field is checked and nothing else is accepted.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from wsync._core import ProtocolError
from wsync.machine.deadline import MAX_DEADLINE

LOAD_FORMAT: Final = "wsync.sglang.load_weights"
"""load_format of the requests that carry a control message: the loader that SGLang imports."""

FLATTENED_BUCKET: Final = "flattened_bucket"
"""load_format of the requests that carry a bucket of SGLang's (wsync.FlattenedTensorBucket)."""

UPDATING: Final = "updating-"
"""Prefix of the temporary version that, during an update, is given to engines that record the
version of every request (SGLang)."""

TENSOR_NAME: Final = "__wsync__"
"""Name of the uint8 tensor that holds the message."""

WHOLE: Final = b""
PIECES: Final = b"*"
LEARN: Final = b"?"
"""What a worker asks for when it joins, where that is no layout: every tensor in one piece (a
load_weights of the engine's own reads them), every tensor in pieces as small as is good, or to be
told first what tensors there are.  What it asks for then is in a `Learnt`."""

BORROWS: Final = b"+"
"""Begins what a worker says when it joins, if it can also copy out of memory that the trainer
lends.  Then follow between commas how many segments it may hold unasked
(wsync.machine.process_maps.most_segments) and the places of what it reads, its own device first
(wsync.machine.gpu_allocations.place_of); a line feed, and what it asks for."""

PROTOCOL: Final = 1
MAX_NBYTES: Final = 4096
_MAX_UPDATE: Final = 2**63 - 1
_SESSION = re.compile(r"[0-9a-f]{1,64}")
# 128-bit token, and a path that fits sockaddr_un with its terminating zero
_ADDRESS = re.compile(r"[0-9a-f]{32}@(/[^\x00-\x1f\x7f]{1,106}|[0-9A-Za-z._:%-]{1,253}:[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a worker says that has learnt: in bytes, a line of JSON and the blob.

    blob: what it asks for; a layout, WHOLE or PIECES.  own_loading: which tensors go through a
    load_weights of the engine's own, and why; "" for none.
    """

    blob: bytes
    own_loading: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps({"own_loading": self.own_loading}).encode() + b"\n" + self.blob

    @staticmethod
    def from_bytes(data: bytes) -> "Learnt":
        line, _, blob = data.partition(b"\n")
        try:
            (own_loading,) = json.loads(line).values()
        except (ValueError, AttributeError, RecursionError):
            own_loading = None
        if not isinstance(own_loading, str):
            raise ProtocolError(
                "a worker that has learnt says something else: use the same wsync on both sides"
            )
        return Learnt(blob, own_loading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control message.

    op: "open", "close" or "inspect"; session: hex id of the session between one trainer rank and
    this worker; update: the update's number; deadline: seconds that the worker waits for any one
    thing; address: where the other side listens (`wsync._core.Exporter.address`, or that of a
    `wsync.messages.tcp_channel.Listener` for a worker on another host), "" in a close.
    Construction checks every field and raises ProtocolError that names the bad one.
    """

    op: str
    session: str
    update: int
    deadline: float
    address: str = ""

    def __post_init__(self) -> None:
        if self.op not in ("open", "close", "inspect"):
            raise _bad("op", self.op, '"open", "close" or "inspect"')
        if not isinstance(self.session, str) or not _SESSION.fullmatch(self.session):
            raise _bad("session", self.session, "1 to 64 lower-case hex digits")
        if type(self.update) is not int or not 0 <= self.update <= _MAX_UPDATE:
            raise _bad("update", self.update, f"an integer from 0 to {_MAX_UPDATE}")
        if type(self.deadline) not in (int, float) or not 0 < self.deadline <= MAX_DEADLINE:
            raise _bad("deadline", self.deadline, f"seconds, above 0 and at most {MAX_DEADLINE}")
        if self.op == "close":
            if self.address != "":
                raise _bad("address", self.address, "absent in a close")
        elif not isinstance(self.address, str) or not _ADDRESS.fullmatch(self.address):
            raise _bad(
                "address", self.address, '"<32 hex digits>@<absolute socket path or host:port>"'
            )

    def to_bytes(self) -> bytes:
        """The message as JSON, at most MAX_NBYTES long."""
        fields = {"protocol": PROTOCOL, **asdict(self), "deadline": float(self.deadline)}
        if self.op == "close":
            del fields["address"]
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Control":
        """Parses a message; ProtocolError says what is wrong with it and in which field."""
        if len(data) > MAX_NBYTES:
            raise ProtocolError(f"control message: {len(data)} bytes, at most {MAX_NBYTES}")
        try:
            fields = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ProtocolError):
                raise
            if data[:1] == b"\x80":  # as pickles begin, and no text
                error = ValueError("a pickled payload, which Receiver.answer takes")
            raise ProtocolError(f"control message: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ProtocolError(
                f"control message: a JSON {type(fields).__name__} instead of an object"
            )
        # first of all: another protocol may well have other fields
        protocol = fields.pop("protocol", None)
        if type(protocol) is not int or protocol != PROTOCOL:
            raise _bad("protocol", protocol, f"{PROTOCOL}; use the same wsync on both sides")
        wanted = {"op", "session", "update", "deadline"}
        if fields.get("op") != "close":
            wanted.add("address")
        for name in sorted(wanted - fields.keys()):
            raise ProtocolError(f"control message: field {name!r} is missing")
        for name in sorted(fields.keys() - wanted):
            raise ProtocolError(f"control message: unknown field {_short(name)}")
        return Control(**fields)


def agree(messages: Sequence[bytes | None]) -> None:
    """Raises ProtocolError unless the messages in one request, one for each worker, are about one
    step of one update."""
    parsed = [Control.from_bytes(message) for message in messages if message is not None]
    said = [f"{message.op} of update {message.update}" for message in parsed]
    for number, text in enumerate(said):
        if text != said[0]:
            raise ProtocolError(f"one request: {said[0]} for worker 0, {text} for worker {number}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ProtocolError("control message: a field appears twice")
    return fields


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bad(field: str, value: object, wanted: str) -> ProtocolError:
    return ProtocolError(f"control message: field {field!r}: {_short(value)}, expected {wanted}")
