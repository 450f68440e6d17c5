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
wsync.inspection).
"""

import json
from dataclasses import asdict, dataclass
from typing import Final

from wsync._core import ProtocolError

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
lends.  Then follow between commas how many segments it may hold
(wsync.machine.lendable.most_segments) and the places of what it reads, its own device first
(wsync.machine.lendable.place_of); a line feed, and what it asks for."""

PROTOCOL: Final = 1


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
        return Learnt(blob, **json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control message.

    op: "open", "close" or "inspect"; session: hex id of the session between one trainer rank and
    this worker; update: the update's number; deadline: seconds that the worker waits for any one
    thing; address: where the other side listens (`wsync._core.Exporter.address`, or that of a
    `wsync.messages.tcp_channel.Listener` for a worker on another host), "" in a close.
    """

    op: str
    session: str
    update: int
    deadline: float
    address: str = ""

    def __post_init__(self) -> None:
        if self.op not in ("open", "close", "inspect"):
            raise ProtocolError(f"control message: unknown op {self.op!r:.80}")

    def to_bytes(self) -> bytes:
        """The message as JSON."""
        fields = {"protocol": PROTOCOL, **asdict(self)}
        if self.op == "close":
            del fields["address"]
        return json.dumps(fields, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Control":
        """Parses a message; ProtocolError says what is wrong with it."""
        try:
            fields = json.loads(data)
            # first of all: another protocol may well have other fields
            if (protocol := fields.pop("protocol", None)) != PROTOCOL:
                raise ProtocolError(
                    f"control message of protocol {protocol!r:.80}, expected {PROTOCOL}; "
                    "use the same wsync on both sides"
                )
            return Control(**fields)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"control message: {error}") from None
