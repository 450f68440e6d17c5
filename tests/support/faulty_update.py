"""Run by tests/test_faults.py with support/faults.c preloaded: one whole update by the extension
alone, both sides in this process, and a plan with its exchange, with every allocation and system
call of them failing in turn.  Prints how many did, and which."""

import ctypes
import errno
import os
import sys

import torch

from wsync import _core
from wsync._core import (
    BufferTable,
    Exchange,
    Exporter,
    Importer,
    Layout,
    LayoutBuilder,
    Memory,
    Plan,
    Route,
    Stream,
    WsyncError,
    describe,
    pack,
)

SECONDS = 10.0
NBYTES = 64
# where the extension may go on without memory: for marks that a stream could not record, of which
# what they hold is let go with a later one, or the stream
TOLERATED = 1


def layout() -> Layout:
    builder = LayoutBuilder()
    builder.add_shard("w", "float32", [4, 4], [0, 0], [4, 4], 0, 0, [16, 4])
    return builder.build()


def update() -> None:
    manifest = layout()
    ring, out, stream = Memory(NBYTES), Memory(NBYTES), Stream()
    exporter = Exporter()
    importer = Importer(exporter.address, b"*", SECONDS)
    try:
        memoryview(ring)[:] = bytes(range(NBYTES))
        assert exporter.accept(SECONDS) == b"*"
        exporter.attach(ring, manifest.to_bytes(), SECONDS)
        exporter.begin(1, 1, SECONDS)
        assert importer.begin(SECONDS) == (1, 1)
        exporter.post(0, stream, SECONDS)
        importer.take(0, stream, SECONDS)
        mapped = importer.ring
        route = Route(Layout.from_bytes(importer.manifest), manifest)
        sources = BufferTable([(mapped.address, mapped.nbytes)], mapped)
        stream.copy(route, 0, 0, sources, BufferTable([(out.address, out.nbytes)], out))
        importer.done(0, stream, SECONDS)
        importer.prepared(1, NBYTES, 0, SECONDS)
        assert exporter.prepared(SECONDS) == (1, NBYTES, 0)
        exporter.commit(SECONDS)
        importer.verdict(SECONDS)
        assert bytes(memoryview(out)) == bytes(range(NBYTES))
    finally:
        stream.abandon()
        importer.close()
        exporter.close()
        stream.close()


def gather() -> None:
    """What a trainer rank does before a round is posted: describe, plan, exchange, pack."""
    weight = torch.arange(16, dtype=torch.float32).view(4, 4)
    table, wanted = describe([weight]), layout()
    plan = Plan(wanted, [(wanted, True)], [(0, 0)], [0], 0)
    ring, packed, stream = Memory(plan.ring_nbytes(0)), Memory(NBYTES), Stream()
    exchange = Exchange.shared(0, 1, NBYTES)
    try:
        pack(table, packed.address, NBYTES, [0])
        exchange.connect([exchange.address], SECONDS)
        exchange.begin(plan)
        exchange.acquire(0, SECONDS)
        exchange.spans(0)
        exchange.post(0, stream)
        exchange.wait(0, stream, SECONDS)
        exchange.release(0, stream)
        slots = BufferTable([(ring.address, ring.nbytes)], ring)
        stream.copy(plan, 0, _core.LOCAL, BufferTable.of(table, weight), slots)
        stream.synchronize(SECONDS)
        expected = weight.numpy().tobytes()
        assert bytes(memoryview(packed)) == expected == bytes(memoryview(ring))[:NBYTES]
    finally:
        stream.abandon()
        exchange.close()
        stream.close()


def place() -> tuple[int, int]:
    """Where the extension's code lies."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(str(_core.__file__)) and " r-xp " in line:
                begin, end = line.split()[0].split("-")
                return int(begin, 16), int(end, 16)
    raise AssertionError(f"{_core.__file__} is not mapped")


def main() -> None:
    shim = ctypes.CDLL(sys.argv[1])
    shim.faults_place.argtypes = [ctypes.c_size_t] * 2
    shim.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int]
    shim.faults_disarm.restype = ctypes.c_char_p
    shim.faults_struck_at.restype = ctypes.c_size_t
    shim.faults_place(*place())
    update()
    gather()
    seen: set[str] = set()
    tolerated: set[int] = set()
    for k in range(10_000):
        before = len(os.listdir("/proc/self/fd"))
        failure: Exception | None = None
        shim.faults_arm(k, errno.ENOMEM)
        try:
            update()
            gather()
        except Exception as error:
            failure = error
        struck = shim.faults_disarm()
        if failure is not None:
            failure.__traceback__ = None  # it holds the objects of the update
        assert len(os.listdir("/proc/self/fd")) == before, (k, struck, failure)
        if struck is None:
            assert failure is None, failure
            print(k, *sorted(seen))
            return
        seen.add(struck.decode())
        if failure is None:
            tolerated.add(shim.faults_struck_at())  # both have looked at the bytes
            assert len(tolerated) <= TOLERATED, (k, struck, tolerated)
            continue
        assert isinstance(failure, WsyncError | MemoryError | OSError), (k, struck, failure)


main()
