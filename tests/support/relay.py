"""A network between a trainer rank and a worker that can cease to carry anything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from wsync.messages.tcp_channel import Listener


class Relay:
    """Forwards connections to an address, both ways, until `stalled` is set.

    What the ends send after that is taken by the system as far as its buffers go, and stays there;
    their connections stay open.
    """

    def __init__(self, host: str, port: int, stalled: threading.Event) -> None:
        self._target = (host, port)
        self._stalled = stalled
        self._ended = False
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._serve)

    def close(self) -> None:
        self._ended = True
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target, 10)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += [near, far]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self._read(source):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _read(self, source: socket.socket) -> bytes:
        """What has come, once it may pass."""
        source.settimeout(None)
        data = source.recv(1 << 16, socket.MSG_PEEK)
        while self._stalled.is_set() and not self._ended:
            time.sleep(0.01)
        return data and source.recv(len(data))

    def _start(self, what: Any, *arguments: Any) -> None:
        threading.Thread(target=what, args=arguments, daemon=True, name="relay").start()


class RelayedListener(Listener):
    """A listener that workers reach through a relay."""

    stalled: threading.Event
    relays: list[Relay]

    def __init__(self, host: str, peer: str) -> None:
        super().__init__(host, peer)
        token, _, where = self.address.partition("@")
        relay = Relay(host, int(where.rpartition(":")[2]), self.stalled)
        self.relays.append(relay)
        self.address = f"{token}@127.0.0.1:{relay.port}"
