"""Sessions between real processes: a trainer here, a worker in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.memory import shared_nbytes

from wsync import _core

PATIENCE = 60.0
SLOT = 4096

# Runs under `python -P -c` with the address as its argument; prints what a test compares.
PRELUDE = """
import os, sys
from wsync import _core
PATIENCE, SLOT = 60.0, 4096
worker = _core.Importer(sys.argv[1], b"layout of " + str(os.getpid()).encode(), PATIENCE)
def say(*words):
    print(*words, flush=True)
"""

LOADER = (
    PRELUDE
    + """
stream = _core.Stream()
for _ in range(3):
    update, rounds = worker.begin(PATIENCE)
    ring = memoryview(worker.ring)
    total = 0
    for k in range(rounds):
        worker.take(k, None, PATIENCE)
        slot = ring[k % 2 * SLOT : (k % 2 + 1) * SLOT]
        assert bytes(slot) == bytes([(update * 16 + k) % 256]) * SLOT, (update, k)
        total += _core.checksum(slot) % 1000
        worker.done(k, stream if k % 2 else None, PATIENCE)
    worker.prepared(rounds, rounds * SLOT, total, PATIENCE)
    worker.verdict(PATIENCE)
    say(update, rounds, worker.generation, worker.manifest.decode())
"""
)

Spawn = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[subprocess.Popen[str]] = []

    def start(script: str, address: str) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", script, address], stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def read_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def begin_round(exporter: _core.Exporter, ring: _core.Memory, stream: _core.Stream) -> None:
    """Attaches, begins an update of two rounds and posts the first."""
    exporter.attach(ring, b"", PATIENCE)
    exporter.begin(1, 2, PATIENCE)
    exporter.post(0, stream, PATIENCE)


def test_updates_through_a_ring_of_two_slots(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(LOADER, exporter.address)
    assert exporter.accept(PATIENCE) == f"layout of {child.pid}".encode()
    stream = _core.Stream()
    for update in range(3):
        rounds = 8 + update
        if update != 1:  # the second update uses the first one's ring
            ring = _core.Memory(2 * SLOT)
            exporter.attach(ring, f"manifest {update}".encode(), PATIENCE)
        exporter.begin(update, rounds, PATIENCE)
        total = 0
        for k in range(rounds):
            exporter.acquire(k - 2 if k >= 2 else -1, None, PATIENCE)
            slot = bytes([(update * 16 + k) % 256]) * SLOT
            memoryview(ring)[k % 2 * SLOT : (k % 2 + 1) * SLOT] = slot
            total += _core.checksum(slot) % 1000
            exporter.post(k, stream, PATIENCE)
        assert exporter.prepared(PATIENCE) == (rounds, rounds * SLOT, total)
        exporter.commit(PATIENCE)
    assert read_line(child) == "0 8 1 manifest 0"
    assert read_line(child) == "1 9 1 manifest 0"
    assert read_line(child) == "2 10 2 manifest 2"
    assert child.wait(PATIENCE) == 0


PARKER = (
    PRELUDE
    + """
kept = None
while True:
    try:
        update, rounds = worker.begin(PATIENCE)
    except _core.PeerClosedError:
        break
    where = worker.ring.address
    worker.take(0, None, PATIENCE)
    with memoryview(worker.ring) as ring:
        total = _core.checksum(ring) % 1000
    kept = memoryview(worker.ring) if update == 3 else None
    worker.done(0, None, PATIENCE)
    worker.prepared(rounds, worker.ring.nbytes, total, PATIENCE)
    worker.verdict(PATIENCE)
    say(update, worker.generation, worker.ring.address == where)
"""
)


def test_a_parked_ring_takes_no_memory_in_either_process(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(PARKER, exporter.address)
    exporter.accept(PATIENCE)
    stream = _core.Stream()
    before = shared_nbytes(os.getpid())
    ring = _core.Memory(1 << 20)
    address = ring.address
    exporter.attach(ring, b"", PATIENCE)
    for update in range(1, 6):
        exporter.begin(update, 1, PATIENCE)
        with memoryview(ring) as view:
            view[:] = os.urandom(len(view))
            total = _core.checksum(view) % 1000
        assert shared_nbytes(os.getpid()) >= before + (1 << 20)
        exporter.post(0, stream, PATIENCE)
        assert exporter.prepared(PATIENCE) == (1, 1 << 20, total)
        assert shared_nbytes(child.pid) >= 1 << 20
        exporter.commit(PATIENCE, park=True)
        if update == 3:  # the worker looks at its ring
            with pytest.raises(
                _core.PeerRefusedError,
                match="the worker keeps the ring: the memory cannot be parked: 1 view",
            ):
                exporter.park(PATIENCE)
            assert ring.fileno() >= 0
            assert shared_nbytes(child.pid) >= 1 << 20
        else:
            exporter.park(PATIENCE)
            assert shared_nbytes(os.getpid()) < before + (1 << 16)  # the control page
            assert shared_nbytes(child.pid) < 1 << 16
        assert ring.address == address
        assert read_line(child) == f"{update} 1 True"
    exporter.close()
    assert child.wait(PATIENCE) == 0


TAKER = (
    PRELUDE
    + """
worker.begin(PATIENCE)
worker.take(0, None, PATIENCE)
say("taken")
__import__("signal").pause()
"""
)


def test_a_killed_worker_is_an_error_that_names_it(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(TAKER, exporter.address)
    exporter.accept(PATIENCE)
    stream = _core.Stream()
    begin_round(exporter, _core.Memory(SLOT), stream)
    assert read_line(child) == "taken"
    child.kill()
    with pytest.raises(_core.PeerClosedError) as caught:
        exporter.acquire(0, None, PATIENCE)
    assert isinstance(caught.value, ConnectionError)
    assert str(caught.value) == (
        f"worker (pid {child.pid}) closed the connection while the end of round 0 was awaited"
    )
    with pytest.raises(_core.StateError, match="the session has ended: worker"):
        exporter.post(1, stream, PATIENCE)


def test_a_killed_worker_is_seen_in_waits_for_others(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(TAKER, exporter.address)
    exporter.accept(PATIENCE)
    exporter.look()  # it waits for a ring
    child.kill()
    child.wait()
    with pytest.raises(_core.PeerClosedError) as caught:
        exporter.look()
    assert str(caught.value) == (
        f"worker (pid {child.pid}) closed the connection while another process was awaited"
    )


STALLER = (
    PRELUDE
    + """
worker.begin(PATIENCE)
worker.take(0, None, PATIENCE)
say("taken")
os.kill(os.getpid(), __import__("signal").SIGSTOP)
worker.done(0, None, PATIENCE)
worker.take(1, None, PATIENCE)
"""
)


def test_a_stopped_worker_ends_the_wait_and_may_come_back(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(STALLER, exporter.address)
    exporter.accept(PATIENCE)
    stream = _core.Stream()
    begin_round(exporter, _core.Memory(SLOT), stream)
    assert read_line(child) == "taken"
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    with pytest.raises(_core.DeadlineError) as caught:
        exporter.acquire(0, None, 0.2)
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value) == (
        f"deadline passed while the end of round 0 of worker (pid {child.pid}) was awaited"
    )
    os.kill(child.pid, signal.SIGCONT)
    exporter.acquire(0, None, PATIENCE)
    exporter.post(1, stream, PATIENCE)
    assert child.wait(PATIENCE) == 0


def test_failures_carry_their_text_to_the_other_side(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    child = spawn(
        PRELUDE + "worker.begin(PATIENCE)\nworker.fail('lm_head.weight: ' + '\\u00e9' * 1000)",
        exporter.address,
    )
    exporter.accept(PATIENCE)
    with pytest.raises(_core.RemoteError) as caught:  # from whichever call comes first
        begin_round(exporter, _core.Memory(SLOT), _core.Stream())
        exporter.acquire(0, None, PATIENCE)
    assert f"worker (pid {child.pid}) failed: lm_head.weight: \u00e9\u00e9" in str(caught.value)

    exporter = _core.Exporter()
    child = spawn(
        PRELUDE
        + "worker.begin(PATIENCE)\n"
        + "try:\n    worker.take(0, None, PATIENCE)\nexcept _core.RemoteError as e:\n    say(e)",
        exporter.address,
    )
    exporter.accept(PATIENCE)
    exporter.attach(_core.Memory(SLOT), b"", PATIENCE)
    exporter.begin(1, 1, PATIENCE)
    exporter.abort("rank 3 ran out of memory")
    assert read_line(child) == f"trainer (pid {os.getpid()}) aborted: rank 3 ran out of memory"


def test_interrupts_reach_a_wait() -> None:
    script = (
        "import signal\n"
        "from wsync import _core\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs
        "exporter = _core.Exporter()\n"
        "try:\n"
        "    print('waiting', flush=True)\n"
        "    exporter.accept(600.0)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert read_line(child) == "waiting"
            child.send_signal(signal.SIGINT)
            assert read_line(child) == "interrupted"
            assert child.wait(PATIENCE) == 0
        finally:
            child.kill()


def test_bad_arguments() -> None:
    exporter = _core.Exporter()
    with pytest.raises(_core.InvalidArgumentError, match="hexadecimal"):
        _core.Importer("not an address", b"", PATIENCE)
    with pytest.raises(_core.InvalidArgumentError, match="the limit is 107"):
        _core.Exporter("/tmp/" + "a" * 120)
    with pytest.raises(_core.SystemCallError, match="No such file") as caught:
        _core.Exporter("/tmp/no/such/folder")
    assert caught.value.native != 0
    for update, rounds in ((-1, 1), (1, -1), (1, 2**32), (2**64, 1)):
        with pytest.raises(OverflowError):
            exporter.begin(update, rounds, PATIENCE)
    with pytest.raises(TypeError):
        exporter.attach(b"no memory", b"", PATIENCE)  # type: ignore[arg-type]


def test_checksum_depends_on_every_byte() -> None:
    data = bytearray(range(256)) * 3
    sums = {_core.checksum(data[:n]) for n in range(len(data) + 1)}
    assert len(sums) == len(data) + 1 and 0 not in sums
    assert _core.checksum(memoryview(data)) == _core.checksum(bytes(data))
    with pytest.raises(BufferError):
        _core.checksum(memoryview(data)[::2])
    with pytest.raises(TypeError):
        _core.checksum("text")
