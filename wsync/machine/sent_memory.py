"""Memory that trainers of this process are sending weights from.

An engine of the same process may have it, too, as after load_state_dict(assign=True), and is not to
try anything there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator

from wsync._core import BufferTable, Layout, LayoutError, TensorTable, checksum

Sent = tuple[Layout, TensorTable]  # which tensors the buffers have, and where these are

_updates = dict[int, list[Sent]]()  # those that run, by the ids of their lists


class WrittenError(LayoutError):
    """Something was tried in memory that a trainer sends from."""


@contextlib.contextmanager
def sending() -> Iterator[list[Sent]]:
    """Around an update, which adds what it sends to the list before it tells engines anything."""
    found: list[Sent] = []
    try:
        _updates[id(found)] = found
        yield found
    finally:
        _updates.pop(id(found), None)
        found.clear()  # whoever still has the list does not keep the weights


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Raises WrittenError where the block has written to memory that is being sent: a module may
    reach it by ways that its tensors do not tell, as a list or an array of numpy.  Of updates that
    have ended meanwhile, and of tables with tensors on a GPU, nothing is known."""
    before = [(table, _checksums(table)) for table in _tables() if table.gpu is None]
    try:
        yield
    finally:
        known = {id(table) for table in _tables()}
        if any(id(table) in known and _checksums(table) != sums for table, sums in before):
            raise WrittenError(
                "learning what load_weights does has written to the weights of a trainer of this "
                "process, which are lost: have the engine load into a copy (copy.deepcopy)"
            )


def _checksums(table: TensorTable) -> list[int]:
    rows = (table[index] for index in range(len(table)))
    return [
        checksum((ctypes.c_char * nbytes).from_address(start))
        for start, _, _, _, nbytes in rows
        if nbytes
    ]


def is_sent(spans: Iterable[tuple[int, int]]) -> list[bool]:
    """Whether a part of each span (address, bytes) is being sent."""
    found = [(address, nbytes if address else 0) for address, nbytes in spans]
    numbers = sent_buffers(BufferTable(found)) if sent() else set[int]()
    return [number in numbers for number in range(len(found))]


def sent_buffers(buffers: BufferTable) -> set[int]:
    """The buffers of which a part is being sent, by number."""
    return {number for table in _tables() for number in buffers.meeting(table)}


def sent() -> list[Sent]:
    """What updates of this process are sending."""
    return [each for found in list(_updates.values()) for each in list(found)]


def _tables() -> list[TensorTable]:
    return [table for _, table in sent()]
