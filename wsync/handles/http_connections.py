"""HTTP connections to one server, without proxies, redirects and second tries."""

import functools
import json
import os
import select
import ssl
import time
import weakref
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPSConnection, IncompleteRead
from typing import Final
from urllib.parse import unquote, urlsplit

from wsync.messages.tcp_channel import KEEPALIVE

_CERTIFICATES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # else the system's
_SHORTEST_SECONDS: Final = 0.001  # none at all is refused
# A server may end a connection just when the next request is sent by it: uvicorn does after 5 s.
_IDLE_SECONDS: Final = 1.0


class NotConnected(OSError):
    """Nobody was there to take a request."""


class Connections:
    """Connections to a server, for requests of several threads.

    url: where the server's paths begin; it may have a user and a password.
    headers: of every request.
    kept: whether requests share connections; else each has one of its own.

    Raises:
        ValueError: what is no URL with a host.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, kept: bool = False) -> None:
        place = urlsplit(url)
        if not place.hostname:
            raise ValueError("no host in this URL")
        self._host, self._port, self._root = place.hostname, place.port, place.path
        self._secure = place.scheme == "https"
        self._headers = dict(headers)
        if not kept:
            self._headers["Connection"] = "close"
        if place.username is not None:
            user = f"{unquote(place.username)}:{unquote(place.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode('latin1')).decode()}"
        self._idle: list[tuple[HTTPConnection, float]] = []  # and since when
        weakref.finalize(self, _close, self._idle)  # after an update that has failed

    def close(self) -> None:
        """Ends those that no request uses."""
        _close(self._idle)

    def request(
        self, method: str, path: str, body: object, timeout: float, most: int
    ) -> tuple[int, bytes]:
        """(status, content) of one exchange; of a content that is longer, so many bytes.

        timeout: of each read, in seconds.

        Raises:
            NotConnected: nobody was there.
            TimeoutError, OSError, HTTPException: the request may have been taken.
        """
        connection = self._idle_one() or self._connect(timeout)
        headers = self._headers
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            connection.sock.settimeout(max(timeout, _SHORTEST_SECONDS))
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._root + path, data, headers)
            answer = connection.getresponse()
            content = answer.read(most)
            if answer.length and len(content) < most:
                raise IncompleteRead(content, answer.length)
        except BaseException:
            connection.close()
            raise
        if answer.isclosed() and not answer.will_close:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()
        return answer.status, content

    def _idle_one(self) -> HTTPConnection | None:
        while self._idle:
            connection, since = self._idle.pop()
            if time.monotonic() < since + _IDLE_SECONDS and not _has_ended(connection):
                return connection
            connection.close()
        return None

    def _connect(self, timeout: float) -> HTTPConnection:
        """A new one, which notices where the other end is gone for good."""
        where = (self._host, self._port)
        timeout = max(timeout, _SHORTEST_SECONDS)
        made = (
            HTTPSConnection(*where, timeout=timeout, context=_trusting(_certificates()))
            if self._secure
            else HTTPConnection(*where, timeout=timeout)
        )
        try:
            made.connect()
            for option in KEEPALIVE:
                made.sock.setsockopt(*option)
        except TimeoutError:
            raise
        except OSError as error:
            made.close()
            raise NotConnected(*error.args) from error
        return made


def _close(idle: list[tuple[HTTPConnection, float]]) -> None:
    while idle:
        idle.pop()[0].close()


def _has_ended(connection: HTTPConnection) -> bool:
    """Whether an idle connection can be read from, which its end is."""
    looking = select.poll()
    looking.register(connection.sock, select.POLLIN)
    return bool(looking.poll(0))


def _certificates() -> str | None:
    return next(filter(None, map(os.environ.get, _CERTIFICATES)), None)


@functools.cache
def _trusting(certificates: str | None) -> ssl.SSLContext:
    """Trusts a file or a folder of certificates, or, for None, the system's."""
    try:
        if certificates and os.path.isdir(certificates):
            return ssl.create_default_context(capath=certificates)
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:  # which does not name it
        raise OSError(error.errno, error.strerror, certificates) from error
