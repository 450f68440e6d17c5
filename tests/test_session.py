"""Sessions between real processes: a trainer here, a worker in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
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


def test_nobody_can_look_at_a_parked_ring(spawn: Spawn) -> None:
    torch = pytest.importorskip("torch")
    exporter = _core.Exporter()
    child = spawn(PARKER, exporter.address)
    exporter.accept(PATIENCE)
    ring = _core.Memory(SLOT)
    pool = _core.ViewPool(ring)
    view = pool.view(torch.Tensor, "uint8", (8,), 0)
    exporter.attach(ring, b"", PATIENCE)
    exporter.begin(1, 1, PATIENCE)
    exporter.post(0, _core.Stream(), PATIENCE)
    exporter.prepared(PATIENCE)
    exporter.commit(PATIENCE, park=True)
    with pytest.raises(_core.PeerRefusedError, match="the trainer keeps its side"):
        exporter.park(PATIENCE)
    view[:] = 5
    del view
    exporter.begin(2, 1, PATIENCE)
    exporter.post(0, _core.Stream(), PATIENCE)
    exporter.prepared(PATIENCE)
    exporter.commit(PATIENCE, park=True)
    exporter.park(PATIENCE)
    with pytest.raises(BufferError, match="parked"):
        memoryview(ring)
    with pytest.raises(_core.StateError, match="parked"):
        pool.view(torch.Tensor, "uint8", (8,), 0)
    with pytest.raises(_core.StateError, match="parked"):
        ring.fileno()
    with pytest.raises(_core.StateError, match="parked"):
        exporter.attach(ring, b"", PATIENCE)
    child.kill()


@pytest.mark.parametrize("parked", [False, True])
def test_a_worker_killed_after_the_commit_leaves_no_memory_behind(
    spawn: Spawn, parked: bool
) -> None:
    exporter = _core.Exporter()
    child = spawn(PARKER, exporter.address)
    exporter.accept(PATIENCE)
    before = shared_nbytes(os.getpid())
    ring = _core.Memory(1 << 20)
    exporter.attach(ring, b"", PATIENCE)
    exporter.begin(1, 1, PATIENCE)
    exporter.post(0, _core.Stream(), PATIENCE)
    exporter.prepared(PATIENCE)
    if parked:
        exporter.commit(PATIENCE, park=True)
        exporter.park(PATIENCE)
        os.kill(child.pid, signal.SIGKILL)
    else:
        os.kill(child.pid, signal.SIGSTOP)  # it will not read the commit
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        exporter.commit(PATIENCE, park=True)
        with pytest.raises(_core.DeadlineError, match="the parking of the ring of worker"):
            exporter.park(0.1)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(_core.PeerClosedError):
            exporter.park(PATIENCE)
    child.wait()
    assert shared_nbytes(os.getpid()) < before + (1 << 16)  # the control page
    with pytest.raises((_core.PeerClosedError, _core.StateError), match="closed the connection"):
        exporter.begin(2, 1, PATIENCE)


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


def test_a_wrong_token_is_ignored(spawn: Spawn) -> None:
    exporter = _core.Exporter()
    token, path = exporter.address.split("@")
    wrong = _core.Importer("0" * len(token) + "@" + path, b"stranger", PATIENCE)
    with pytest.raises(_core.DeadlineError, match="nobody with the right token"):
        exporter.accept(0.1)
    with pytest.raises(_core.PeerClosedError):
        wrong.begin(PATIENCE)
    right = _core.Importer(exporter.address, b"worker", PATIENCE)
    assert exporter.accept(PATIENCE) == b"worker"
    right.close()


def test_sockets_do_not_outlive_what_they_are_for() -> None:
    exporter = _core.Exporter()
    path = exporter.address.split("@")[1]
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    worker = _core.Importer(exporter.address, b"", PATIENCE)
    exporter.accept(PATIENCE)
    assert not os.path.exists(os.path.dirname(path))
    with pytest.raises(_core.PeerClosedError, match="nobody listens at"):
        _core.Importer(exporter.address, b"", PATIENCE)
    worker.close()
    exporter.close()


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


def test_a_check_can_end_a_wait_but_not_use_the_object() -> None:
    exporter = _core.Exporter()
    seen: list[str] = []

    def check() -> None:
        with pytest.raises(_core.StateError, match="in use by another call") as caught:
            exporter.close()
        seen.append(str(caught.value))
        raise LookupError("rank 2 failed")

    with pytest.raises(LookupError, match="rank 2 failed"):
        exporter.accept(PATIENCE, check)
    assert seen == ["Exporter is in use by another call"]
    exporter.close()
    exporter.close()
    exporter.abort("too late to matter")
    with pytest.raises(_core.StateError, match="Exporter is closed"):
        exporter.accept(PATIENCE)


def test_two_threads_cannot_use_one_exporter() -> None:
    exporter = _core.Exporter()
    waiting = threading.Event()
    stop = threading.Event()

    def check() -> None:
        waiting.set()
        if stop.is_set():
            raise InterruptedError

    def wait() -> None:
        with pytest.raises(InterruptedError):
            exporter.accept(PATIENCE, check)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(PATIENCE)
    with pytest.raises(_core.StateError, match="in use"):
        exporter.accept(0.0)
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_no_thread_closes_an_importer_that_takes_a_new_ring() -> None:
    """Letting go of the old ring takes a while, and lets other threads run."""
    exporter = _core.Exporter()
    worker = _core.Importer(exporter.address, b"", PATIENCE)
    exporter.accept(PATIENCE)
    exporter.attach(_core.Memory(32 << 20), b"", PATIENCE)
    exporter.begin(0, 0, PATIENCE)
    worker.begin(PATIENCE)
    worker.prepared(0, 0, 0, PATIENCE)
    exporter.prepared(PATIENCE)
    exporter.commit(PATIENCE)
    worker.verdict(PATIENCE)
    waiting = threading.Event()

    def close() -> None:
        assert waiting.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:  # as soon as it may
            with contextlib.suppress(_core.StateError):
                worker.close()
                return

    def update() -> None:
        assert waiting.wait(PATIENCE)
        exporter.attach(_core.Memory(SLOT), b"", PATIENCE)
        exporter.begin(1, 0, PATIENCE)

    threads = [threading.Thread(target=close), threading.Thread(target=update)]
    for thread in threads:
        thread.start()
    assert worker.begin(PATIENCE, waiting.set) == (1, 0)
    for thread in threads:
        thread.join(PATIENCE)
    assert [thread.is_alive() for thread in threads] == [False, False]
    assert worker.ring.nbytes == SLOT
    exporter.close()


def test_a_ring_outlives_its_session_and_its_successor() -> None:
    exporter = _core.Exporter()
    worker = _core.Importer(exporter.address, b"", PATIENCE)
    exporter.accept(PATIENCE)
    with pytest.raises(_core.StateError, match="no update has begun"):
        _ = worker.ring
    rings = []
    for update in range(2):
        ring = _core.Memory(SLOT)
        memoryview(ring)[:] = bytes([update + 1]) * SLOT
        exporter.attach(ring, b"%d" % update, PATIENCE)
        exporter.begin(update, 0, PATIENCE)
        assert worker.begin(PATIENCE) == (update, 0)
        assert worker.generation == update + 1
        assert worker.manifest == b"%d" % update
        rings.append(memoryview(worker.ring))
        worker.prepared(0, 0, 0, PATIENCE)
        exporter.prepared(PATIENCE)
        exporter.commit(PATIENCE)
        worker.verdict(PATIENCE)
        del ring
    worker.close()
    exporter.close()
    assert bytes(rings[0]) == b"\x01" * SLOT
    assert bytes(rings[1]) == b"\x02" * SLOT
    assert worker.manifest == b"1"
    assert bytes(memoryview(worker.ring)) == b"\x02" * SLOT


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
