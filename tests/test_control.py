import json

import pytest

from wsync._core import ProtocolError
from wsync.messages.control import Control

TOKEN = "0123456789abcdef" * 2
ADDRESS = TOKEN + "@/tmp/wsync-x/socket"
OPEN = {
    "protocol": 1,
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
        Control(op="close", session="a" * 64, update=2**63 - 1, deadline=60),
        Control(op="inspect", session="0", address=ADDRESS, update=0, deadline=1),
    ],
)
def test_a_message_survives_the_journey(message: Control) -> None:
    assert Control.from_bytes(message.to_bytes()) == message


def test_a_literal_message_is_understood() -> None:
    parsed = Control.from_bytes(json.dumps(OPEN).encode())
    assert parsed == Control(op="open", session="5f0c", address=ADDRESS, update=7, deadline=2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "commit"),
        ("op", ["open"]),
        ("session", ""),
        ("session", "ABC"),
        ("session", "f" * 65),
        ("session", 17),
        ("address", "nobody@/tmp/x"),
        ("address", TOKEN + "@relative/path"),
        ("address", TOKEN + "@/tmp/\n"),
        ("address", TOKEN + "@/" + "x" * 107),
        ("address", None),
        ("update", -1),
        ("update", True),
        ("update", 1.0),
        ("update", 2**63),
        ("deadline", 0),
        ("deadline", -1.0),
        ("deadline", True),
        ("deadline", "1"),
        ("deadline", float("inf")),
        ("deadline", float("nan")),
        ("deadline", 10**400),
        ("protocol", 2),
        ("protocol", True),
        ("surprise", 1),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"'{field}'"):
        Control.from_bytes(json.dumps({**OPEN, field: value}).encode())


@pytest.mark.parametrize("field", sorted(OPEN))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ProtocolError, match=f"'{field}'"):
        Control.from_bytes(json.dumps({k: v for k, v in OPEN.items() if k != field}).encode())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"[]", "list"),
        (b'{"op":"close","op":"open"}', "twice"),
        (json.dumps(OPEN).encode() + b" " * 4096, "at most 4096"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Control.from_bytes(data)


def test_a_close_has_no_address() -> None:
    with pytest.raises(ProtocolError, match="'address'"):
        Control.from_bytes(json.dumps({**OPEN, "op": "close"}).encode())
