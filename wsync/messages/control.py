"""The few bytes that open and close an update inside an engine's own weight-update request.

A control message travels to each worker of an engine as a uint8 tensor named `__wsync__` (see
wsync.messages.payload.control).  Its bytes are one JSON object:

    {"protocol": 3, "op": "open", "session": "5f0c...", "address": "<token>@<path>",
     "update": 7, "deadline": 60.0}
    {"protocol": 3, "op": "close", "session": "5f0c...", "update": 7, "deadline": 60.0,
     "ahead": "rounds"}
    {"protocol": 3, "op": "inspect", "session": "0", "address": "<token>@<path>", "update": 0,
     "deadline": 60.0}
    {"protocol": 3, "op": "send", "session": "0", "address": "<host>:<port>", "update": 0,
     "deadline": 60.0, "orders": {...}}

`open` makes the worker take part in update number `update`; the worker answers when that update has
been committed or has failed.  In an SGLang engine with pipeline stages it answers at once, because
the next stage gets the message only then.  If `answer` is an address, the worker compares the
update with its weights instead of loading it, and connects there; its first message says in JSON
what it has found (see wsync.report.Verification).  Such an `open` may have the number of the `open`
before, and no `close` belongs to it.  `close` gives the weights the version of the request around
it.  It is refused unless the weights are those of that session's update number `update`.  `ahead`
says what the session then brings of the next update before its `open`.  `inspect` makes the worker
connect; its first message says in JSON what it keeps (see wsync.inspection).  `send` makes the
worker fill another engine, together with the other workers (see wsync.engine.sending); the address
is that of a torch.distributed.TCPStore.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from wsync._core import ProtocolError

LOAD_FORMAT: Final = "wsync.sglang.load_weights"
"""load_format of requests that carry a control message: the loader that SGLang imports."""

FLATTENED_BUCKET: Final = "flattened_bucket"
"""load_format of requests that carry an SGLang bucket (wsync.FlattenedTensorBucket)."""

UPDATING: Final = "updating-"
"""Prefix of the temporary version during an update, for engines that record the version of every
request (SGLang)."""

TENSOR_NAME: Final = "__wsync__"
"""Name of the uint8 tensor that holds the message."""

WHOLE: Final = b""
PIECES: Final = b"*"
LEARN: Final = b"?"
"""Requests of a joining worker, other than a layout.  WHOLE: every tensor in one piece, because the
engine's own load_weights reads them.  PIECES: every tensor, cut as wsync likes.  LEARN: the list of
tensors; the worker then asks again with a `Learnt`."""

BORROWS: Final = b"+"
"""First byte of a joining worker's message, if the worker can also copy out of memory that the
trainer lends.  Next, separated by commas, come the number of segments that it may hold
(wsync.machine.lendable.most_segments) and the places that it reads, beginning with its own device
(wsync.machine.lendable.place_of).  The message ends with a line feed and the worker's request."""

NOTHING: Final = ""
BEGIN: Final = "begin"
ROUNDS: Final = "rounds"
"""What a session sends of an update before the opening message: its begin, with the memory that the
trainer lends; or the begin and the rounds."""

TAKEN: Final = "another trainer has taken this engine over"
CHANGED: Final = "has changed since wsync learnt what its load_weights does"
"""This part of a worker's error shows that a second attempt may succeed, because it learns anew."""

PROTOCOL: Final = 3


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a worker asks for when it has learnt what it keeps.  As bytes: a line of JSON, and the
    blob.

    blob: the request; a layout, WHOLE or PIECES.  own_loading: the tensors that go through the
    engine's own load_weights, and why; "" if there are none.
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

    op: "open", "close", "inspect" or "send".  session: hex id of the session between one trainer
    rank and this worker.  update: number of the update.  deadline: seconds that the worker may wait
    for any one event.  address: where the other side listens; "" in a close.  It is the address of
    a `wsync._core.Exporter`, or of a `wsync.messages.tcp_channel.Listener` for another host.
    ahead: in an update's last message, what the session brings of the next update before its
    `open`.
    drafts: in an open, how many models that draft tokens with layers of the engine's model are
    updated with it.  answer: in an open that only compares, the address for what the worker finds.
    orders: in a send, see wsync.engine.sending.
    """

    op: str
    session: str
    update: int
    deadline: float
    address: str = ""
    ahead: str = NOTHING
    drafts: int = 0
    answer: str = ""
    orders: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in ("open", "close", "inspect", "send"):
            raise ProtocolError(f"control message: unknown op {self.op!r:.80}")

    def to_bytes(self) -> bytes:
        """The message as JSON, without empty fields."""
        fields = {name: value for name, value in asdict(self).items() if value or name == "update"}
        return json.dumps({"protocol": PROTOCOL, **fields}, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Control":
        """Parses a message; ProtocolError says what is wrong with it."""
        try:
            fields = json.loads(data)
            # first of all, because other protocols may have other fields
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
