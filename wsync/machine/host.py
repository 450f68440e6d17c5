"""Facts about this host for other hosts: its address, and a text that identifies it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from wsync import _core

ADDRESS = "WSYNC_ADDRESS"


_SOMEWHERE = ("8.8.8.8", "2001:4860:4860::8888")  # find the default routes; nothing is sent there


def host_identity() -> str:
    """Returns a text that is equal for two processes exactly if they can share memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{socket.gethostname()} {boot.read().strip()}"


def has_ended(pid: int) -> bool:
    """Whether a process of this host has ended, even if its parent has not waited for it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):  # it ended before the open, or after it
        return True


def own_address(engines: Sequence[str]) -> str:
    """Returns the address of this host that engines (URLs, or other names) can reach.

    If the environment variable WSYNC_ADDRESS is set, it is the answer.  Otherwise the system says
    which of its addresses it would use to reach each engine; nothing is sent.  A loopback address
    is the answer only if all engines are known to be on this host, or if the host has no other
    address.  /etc/hosts may map a host's own name to a loopback address.
    """
    given = os.environ.get(ADDRESS, "").strip()
    if given:
        try:
            socket.getaddrinfo(given, None)
        except (OSError, ValueError) as error:
            raise _core.InvalidArgumentError(f"{ADDRESS}={given!r}: {error}") from None
        return given
    hosts, found = [_host(engine) for engine in engines], []
    for host, port in hosts:
        with contextlib.suppress(OSError, ValueError):
            found.append(_on_the_way(host, port))
    if not hosts or not all(map(_loopback, found)) or len(found) < len(hosts):
        for somewhere in _SOMEWHERE:
            with contextlib.suppress(OSError):
                found.append(_on_the_way(somewhere, 80))
        with contextlib.suppress(OSError):
            named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM)
            found += [str(address[0]) for *_, address in named]
    outer = [address for address in found if not _loopback(address)]
    return [*outer, *found, "127.0.0.1"][0]


def _host(engine: str) -> tuple[str, int]:
    """Returns a URL's host and port; for other names, a public address stands in."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(engine)
        return parts.hostname or _SOMEWHERE[0], parts.port or 80
    return _SOMEWHERE[0], 80


def is_elsewhere(engine: str) -> bool:
    """Whether an engine's name is a URL whose host is another machine: no socket of this
    machine can have one of its addresses.  False if the name does not resolve."""
    parts = urlsplit(engine)
    if not parts.scheme.endswith(("http", "https")) or not parts.hostname:
        return False
    try:
        found = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return False
    return True


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _on_the_way(host: str, port: int) -> str:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
