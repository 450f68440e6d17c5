"""Memory that trainers of this process are sending weights from.

An engine of the same process may have it, too, as after load_state_dict(assign=True), and is not to
try anything there.
"""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from wsync._core import Layout, LayoutError, TensorTable, checksum

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
    merged: list[tuple[int, int]] = []
    for start, end in sorted(_sent_spans()):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    starts = [start for start, _ in merged]

    def meets(address: int, nbytes: int) -> bool:
        before = bisect_right(starts, address + nbytes - 1)  # those that begin before its end
        return nbytes > 0 and before > 0 and merged[before - 1][1] > address

    return [meets(*span) for span in spans]


def _sent_spans() -> Iterator[tuple[int, int]]:
    for table in _tables():
        for index in range(len(table)):
            start, _, _, _, nbytes = table[index]
            if nbytes:
                yield start, start + nbytes


def sent() -> list[Sent]:
    """What updates of this process are sending."""
    return [each for found in list(_updates.values()) for each in list(found)]


def _tables() -> list[TensorTable]:
    return [table for _, table in sent()]
