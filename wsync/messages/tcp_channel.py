"""Frames over TCP between a trainer rank and an engine worker on another host.

A frame is a byte for its kind, the length of its content (8 bytes, little-endian) and the content.
The engine's API tells a worker the address, `<token>@<host>:<port>`.  The worker sends the 128-bit
token first; a connection without the token is closed.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import re
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Collection
from typing import Final

from wsync import _core
from wsync.checkpoints.safetensors_layout import system_calls
from wsync.machine.deadline import POLL_SECONDS, Check, Deadline, seconds
from wsync.machine.error_text import error_text

# contents of BEGIN and PREPARED
UPDATE: Final = struct.Struct("<QQ")
COUNTS: Final = struct.Struct("<QQQ")
# content of COMMIT if the exchange frees its memory until the next update
PARK: Final = b"park"

_HEADER: Final = struct.Struct("<BQ")
_ADDRESS: Final = re.compile(r"([0-9a-f]{32})@([0-9A-Za-z._:%-]{1,253}):([0-9]{1,5})")
_LAST_SECONDS: Final = 1.0  # to send the last error
_TOKEN_SECONDS: Final = 10.0  # to receive a token
_READ_NBYTES: Final = 1 << 20
_SAID_NBYTES: Final = 2000


class Frame(enum.IntEnum):
    """The kind of a frame.  Workers send HELLO, INTRODUCTION, BLOB and PREPARED; both sides send
    FAILED; trainer ranks send the others."""

    HELLO = 1  # the token
    BLOB = 2  # what the worker keeps; see Loader.blob
    MODEL = 3  # the address to come back to, a line feed, and a layout without shards
    PLAN = 4  # see wsync.exchange.remote_plan
    BEGIN = 5  # UPDATE: update and rounds
    PREPARED = 6  # COUNTS: tensors and bytes that were loaded, and ns of the audit
    COMMIT = 7  # PARK, or nothing
    FAILED = 8  # text
    INTRODUCTION = 9  # see wsync.exchange.introductions


# a firewall forgets connections that are silent between two updates, and a dead host says nothing:
# so there is a sign of life after a minute, and the connection ends after two
KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)


class Channel:
    """One end of a connection; `peer` is the other end's name in errors."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in KEEPALIVE:
            self._socket.setsockopt(level, option, value)
        self._buffer = bytearray()
        self._frames: deque[tuple[Frame, bytes]] = deque()
        self._ended = False
        self._torn = False  # whether a frame was sent in part; the peer would misread the next one

    @classmethod
    def connect(cls, address: str, timeout: float, *, peer: str = "trainer") -> Channel:
        """Connects to the Listener at an address.

        Raises:
            ProtocolError: `address` is malformed.
            PeerClosedError, DeadlineError: no Listener is there.
        """
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise _core.ProtocolError(
                f"address {address[33:120]!r} is not of the form <token>@<host>:<port>"
            )
        token, host, port = match.groups()
        where = f"{peer} at {host}:{port}"
        try:
            connection = socket.create_connection((host, int(port)), timeout)
        except TimeoutError as error:
            raise _core.DeadlineError(f"no answer of {where} within {seconds(timeout)}") from error
        except (OSError, OverflowError) as error:
            raise _core.PeerClosedError(f"cannot connect to {where}: {error}") from error
        channel = cls(connection, where)
        try:
            channel.send(Frame.HELLO, token.encode(), timeout)
        except BaseException:
            channel.close()
            raise
        return channel

    def send(self, kind: Frame, content: bytes, timeout: float, check: Check = bool) -> None:
        """Sends a frame.

        Raises:
            DeadlineError: the other side did not take the frame in time.
            PeerClosedError: the other side is gone.
            StateError: an earlier frame was sent only in part.
        """
        if self._torn:
            raise _core.StateError(
                f"{self.peer} was sent only a part of a message: close the connection"
            )
        deadline = Deadline(timeout)
        for part in (_HEADER.pack(kind, len(content)), content):
            left = memoryview(part)
            while left:
                try:
                    left = left[self._socket.send(left[:_READ_NBYTES]) :]
                    self._torn = True
                except BlockingIOError:
                    self._pause(select.POLLOUT, deadline, check, f"did not take {kind.name}")
                except OSError as error:
                    self.look()  # its last error says more
                    raise self._gone(error) from error
        self._torn = False

    def wait(
        self, wanted: Collection[Frame], timeout: float, check: Check = bool
    ) -> tuple[Frame, bytes]:
        """Returns the next frame, which must be of a wanted kind.

        Raises:
            RemoteError: the other side has failed, with this error.
            DeadlineError, PeerClosedError, ProtocolError: no frame came in time, none can come, or
                one of another kind came.
        """
        deadline = Deadline(timeout)
        names = " or ".join(kind.name for kind in wanted)
        while True:
            self.look()
            if self._frames:
                kind, content = self._frames.popleft()
                if kind not in wanted:
                    raise _core.ProtocolError(f"{self.peer} sent {kind.name} instead of {names}")
                return kind, content
            if self._ended:
                raise self._gone()
            self._pause(select.POLLIN, deadline, check, f"did not send {names}")

    def look(self) -> None:
        """If the other side has failed or is gone, raises an error that says so.  Waits for
        nothing."""
        self._read()
        for kind, content in self._frames:
            if kind == Frame.FAILED:
                raise _core.RemoteError(f"{self.peer}: {content.decode(errors='replace')}")
        if self._ended and not self._frames:
            raise self._gone()

    def fail(self, why: str | BaseException) -> None:
        """Sends this side's error, if the other side still listens."""
        text = error_text(why) if isinstance(why, BaseException) else why
        said = text.encode(errors="replace")[:_SAID_NBYTES]
        with contextlib.suppress(_core.WsyncError):
            self.send(Frame.FAILED, said, _LAST_SECONDS)

    def close(self) -> None:
        with contextlib.suppress(OSError, _core.WsyncError):
            self._read()  # unread bytes would reset the connection, and lose our last error
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        """Reads what has come."""
        while not self._ended:
            try:
                data = self._socket.recv(_READ_NBYTES)
            except BlockingIOError:
                return
            except OSError:  # reset; frames that came before it count
                data = b""
            self._ended = not data
            self._buffer += data
            while self._parse():
                pass

    def _parse(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        number, nbytes = _HEADER.unpack_from(self._buffer)
        last = _HEADER.size + nbytes
        if len(self._buffer) < last:
            return False
        self._frames.append((Frame(number), bytes(memoryview(self._buffer)[_HEADER.size : last])))
        del self._buffer[:last]
        return True

    def _pause(self, event: int, deadline: Deadline, check: Check, late: str) -> None:
        check()
        deadline.check(f"{self.peer} {late}")
        _poll(self._socket, event, deadline.left)

    def _gone(self, error: OSError | None = None) -> _core.PeerClosedError:
        why = f": {error.strerror}" if error is not None else ""
        text = f"{self.peer} is gone{why}: its process has ended or was restarted"
        return _core.PeerClosedError(text)


def _listen(host: str) -> socket.socket:
    """Listens at one address of this host.  If the host does not have that address (NAT), listens
    at all its addresses.  A token protects the socket.

    Raises:
        SystemCallError: the system refuses such a socket.
    """
    with system_calls(f"listening at {host}"):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", 0), family=family)


class Listener:
    """The place where one worker connects.

    host: an address of this host that the worker can reach; peer: the worker's name in errors.
    """

    def __init__(self, host: str, peer: str) -> None:
        self._peer = peer
        self._listener = _listen(host)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self.address = f"{self._token}@{host}:{self._listener.getsockname()[1]}"

    def accept(self, timeout: float, check: Check = bool) -> Channel:
        """Waits for the worker; any other connection is closed.

        Raises:
            DeadlineError: the worker did not come.
        """
        deadline = Deadline(timeout)
        while True:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection = self._listener.accept()[0]
                if self._shows_token(connection, deadline.left):
                    return Channel(connection, self._peer)
                connection.close()
            check()
            deadline.check(f"{self._peer} did not connect")
            _poll(self._listener, select.POLLIN, deadline.left)

    def close(self) -> None:
        self._listener.close()

    def _shows_token(self, connection: socket.socket, timeout: float) -> bool:
        """Whether a connection begins with the token, which must come at once."""
        deadline = Deadline(min(timeout, _TOKEN_SECONDS))
        hello, shown = _HEADER.pack(Frame.HELLO, 32) + self._token.encode(), b""
        with contextlib.suppress(OSError):
            connection.settimeout(deadline.left)
            while part := connection.recv(len(hello) - len(shown)):
                shown += part
                connection.settimeout(deadline.left)
        return hmac.compare_digest(shown, hello)


def is_remote(address: str) -> bool:
    """Whether an address is a Listener's, not that of a socket on this host."""
    return _ADDRESS.fullmatch(address) is not None


def _poll(waited: socket.socket, event: int, seconds: float) -> None:
    """Waits for a socket, at most until the next look around."""
    poll = select.poll()
    poll.register(waited, event)
    poll.poll(1e3 * min(seconds, POLL_SECONDS))
