"""Memory that trainers of this process are sending weights from.

An engine of the same process may have it, too, as after load_state_dict(assign=True), and is not to
try anything there.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from wsync._core import TensorTable

_updates = dict[int, list[TensorTable]]()  # those that run, by the ids of their lists


@contextlib.contextmanager
def sending() -> Iterator[list[TensorTable]]:
    """Around an update, which adds what it sends to the list before it tells engines anything."""
    tables: list[TensorTable] = []
    try:
        _updates[id(tables)] = tables
        yield tables
    finally:
        _updates.pop(id(tables), None)
        tables.clear()  # whoever still has the list does not keep the weights


def is_sent(spans: Iterable[tuple[int, int]]) -> list[bool]:
    """Whether a part of each span (address, bytes) is being sent."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(_sent()):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    starts = [start for start, _ in merged]

    def meets(address: int, nbytes: int) -> bool:
        before = bisect_right(starts, address + nbytes - 1)  # those that begin before its end
        return nbytes > 0 and before > 0 and merged[before - 1][1] > address

    return [meets(*span) for span in spans]


def _sent() -> Iterator[tuple[int, int]]:
    for tables in list(_updates.values()):
        for table in list(tables):
            for index in range(len(table)):
                start, _, _, _, nbytes = table[index]
                if nbytes:
                    yield start, start + nbytes
