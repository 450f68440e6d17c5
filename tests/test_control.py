import json

import pytest

from wsync._core import ProtocolError
from wsync.messages.control import Control

TOKEN = "0123456789abcdef" * 2
ADDRESS = TOKEN + "@/tmp/wsync-x/socket"
OPEN = {
    "protocol": 3,
    "op": "open",
    "session": "5f0c",
    "address": ADDRESS,
    "update": 7,
    "deadline": 2.5,
}


@pytest.mark.parametrize(
    "message",
    [
        Control(op="open", session="5f0c", address=ADDRESS, update=7, deadline=2.5),
        Control(op="close", session="a" * 64, update=2**62, deadline=60),
        Control(op="inspect", session="0", address=ADDRESS, update=0, deadline=1),
        Control(op="send", session="0", update=0, deadline=1, orders={"target": "http://h"}),
    ],
)
def test_a_message_survives_the_journey(message: Control) -> None:
    assert Control.from_bytes(message.to_bytes()) == message


def test_a_literal_message_is_understood() -> None:
    parsed = Control.from_bytes(json.dumps(OPEN).encode())
    assert parsed == Control(op="open", session="5f0c", address=ADDRESS, update=7, deadline=2.5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"op": "commit"}, "unknown op 'commit'"),
        ({"protocol": 1, "op": "other"}, "protocol 1, expected 3; use the same wsync on both"),
        ({"surprise": 1}, "'surprise'"),
    ],
)
def test_what_another_wsync_says_is_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Control.from_bytes(json.dumps(OPEN | changes).encode())


@pytest.mark.parametrize("field", sorted(OPEN.keys() - {"address"}))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        Control.from_bytes(json.dumps({k: v for k, v in OPEN.items() if k != field}).encode())


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"1"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="control message: "):
        Control.from_bytes(data)
