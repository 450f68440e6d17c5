"""Memory of other processes that a payload names: files of /dev/shm, and descriptors.

torch names a segment by its file (torch/csrc/StorageSharing.cpp), or by an address from which
`multiprocessing.resource_sharer` passes a descriptor.  Whoever wrote the payload chose these names,
so only what the same user's torch makes is opened, and of that only what is as large as it is
said to be.  Its bytes are copied: a file that is mapped kills the process that reads beyond its
end, and its maker can cut it short at any time.
"""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import pickle
import re
import socket
import stat
import struct
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Final

import torch

from wsync import _core
from wsync._core import DeadlineError, ProtocolError
from wsync.machine.deadline import Deadline

SHM: Final = "/dev/shm"
HEADER_NBYTES: Final = 64  # of torch's RefcountedMapAllocator; begins with the count of users
_COUNT_NBYTES: Final = 4
_FILE_NAME: Final = re.compile(rb"/torch_[0-9]{1,20}(_[0-9]{1,20}){1,2}")
_SHARER: Final = re.compile(r"(/[^\0]*/pymp-[a-z0-9_]+)/(listener|sock)-[a-z0-9_]+")
_LENGTH: Final = struct.Struct("!i")
_CREDENTIALS: Final = struct.Struct("3i")


def open_file(name: bytes, nbytes: int) -> int:
    """A descriptor of a file of at least `nbytes` that this user's torch has made in /dev/shm.

    Raises OSError where there is none, ProtocolError for anything else.
    """
    if not _FILE_NAME.fullmatch(name):
        raise ProtocolError(f"payload: {name[:100]!r} is not a file of torch's in {SHM}")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    found = os.open(os.fsencode(SHM) + name, flags)
    try:
        _check(found, nbytes, f"{SHM}{name.decode()}")
    except BaseException:
        os.close(found)
        raise
    return found


def read_file(
    name: bytes, nbytes: int, copy: torch.UntypedStorage | None = None
) -> torch.UntypedStorage:
    """A copy of the segment in a file; the one given, where there is one already.  The reference
    that travels with each payload is dropped, but never its maker's: a payload that is read twice
    must not take the file from under it."""
    found = open_file(name, HEADER_NBYTES + nbytes)
    try:
        if copy is None:
            copy = _read(found, HEADER_NBYTES, nbytes, f"{SHM}{name.decode()}")
        # atomic, and so mapped: only a maker that cuts it short in this moment kills this process
        with (
            mmap.mmap(found, HEADER_NBYTES) as header,
            memoryview(header) as whole,
            whole[:_COUNT_NBYTES] as count,
        ):
            _core.count_down(count, 1)
        return copy
    finally:
        os.close(found)


def read_descriptor(identifier: object, nbytes: int, deadline: Deadline) -> torch.UntypedStorage:
    """A copy of what multiprocessing's DupFd passes: the address of its maker, and which of its
    descriptors.

    Raises:
        DeadlineError: the maker does not answer.
    """
    if not isinstance(identifier, tuple) or len(identifier) != 2 or type(identifier[1]) is not int:
        raise ProtocolError("payload: a descriptor is not (address, number)")
    address, number = identifier
    found = _take_descriptor(_sharer(address), number, deadline)
    try:
        what = f"the descriptor from {address}"
        _check(found, nbytes, what)
        return _read(found, 0, nbytes, what)
    finally:
        os.close(found)


def _read(descriptor: int, offset: int, nbytes: int, what: str) -> torch.UntypedStorage:
    """Bytes of a file that is large enough.  Where it has holes, the copy has them, too: a file
    may be said to be larger than memory."""
    if nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    copy = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    at, end = offset, offset + nbytes
    with memoryview(copy) as into:
        while at < end:
            try:
                at = os.lseek(descriptor, at, os.SEEK_DATA)
                hole = os.lseek(descriptor, at, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # there is no more data
            with into[at - offset : min(hole, end) - offset] as part:
                at += os.preadv(descriptor, [part], at)
    _check(descriptor, offset + nbytes, what)
    return torch.frombuffer(copy, dtype=torch.uint8).untyped_storage()


def _check(descriptor: int, nbytes: int, what: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ProtocolError(f"payload: {what} is no regular file of user {os.geteuid()}")
    if found.st_size < nbytes:
        raise ProtocolError(f"payload: {what} has {found.st_size} bytes instead of {nbytes}")


def _sharer(address: object) -> str:
    """The address, if multiprocessing has made it for a process of this user."""
    found = _SHARER.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        shown = repr(address[:100]) if isinstance(address, str) else f"a {type(address).__name__}"
        raise ProtocolError(f"payload: {shown} is no address of multiprocessing on this host")
    folder, line = os.lstat(found[1]), os.lstat(found[0])
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not private or not stat.S_ISSOCK(line.st_mode):
        raise ProtocolError(f"payload: {found[0]} is no socket in a private folder")
    if not folder.st_uid == line.st_uid == os.geteuid():
        raise ProtocolError(f"payload: {found[0]} is not of user {os.geteuid()}")
    return found[0]


def _take_descriptor(address: str, number: int, deadline: Deadline) -> int:
    """multiprocessing.resource_sharer's DupFd.detach, which would wait for ever."""
    line = _Line(deadline)
    key = bytes(multiprocessing.current_process().authkey)
    try:
        line.connect(address)
        answer_challenge(line, key)  # type: ignore[arg-type]
        deliver_challenge(line, key)  # type: ignore[arg-type]
        line.send_bytes(pickle.dumps((number, os.getpid())))
        return line.receive_descriptor()
    except TimeoutError:
        raise DeadlineError(f"payload: {address} passes no descriptor") from None
    finally:
        line.close()


class _Line:
    """What is needed of a multiprocessing.connection.Connection, with an end to every wait."""

    def __init__(self, deadline: Deadline) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._deadline = deadline

    def connect(self, address: str) -> None:
        self._limited().connect(address)
        option = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(option)
        if uid != os.geteuid():
            raise ProtocolError(f"payload: {address} is served by user {uid}")

    def send_bytes(self, data: bytes) -> None:
        self._limited().sendall(_LENGTH.pack(len(data)) + data)

    def recv_bytes(self, most: int) -> bytes:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if not 0 <= length <= most:
            raise ProtocolError(f"payload: a message of {length} bytes instead of a descriptor")
        return self._read(length)

    def receive_descriptor(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self._limited(), 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise ProtocolError("payload: the descriptor has been passed before")
        return descriptors[0]

    def close(self) -> None:
        self._socket.close()

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self._limited().recv(nbytes - len(data))
            if not part:
                raise EOFError("the maker of a descriptor hung up")
            data += part
        return data

    def _limited(self) -> socket.socket:
        left = self._deadline.left
        if not left:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._socket
