"""Pickles of weight-update requests, read by SGLang's own unpickler and by wsync's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import pickletools
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import SGLANG_VERSIONS, SglangReceiver, engine_tree
from support.pickled_sender import send_pickled

from wsync import DeadlineError, InvalidArgumentError, NoMemoryError, ProtocolError, _core
from wsync.bucket import FlattenedTensorBucket
from wsync.messages import payload, torch_shm_reader
from wsync.trainer.sessions.stock import SharedRing

TENSORS = [
    ("model.embed.weight", torch.randn(5, 3).to(torch.bfloat16)),
    ("odd", torch.arange(7, dtype=torch.uint8)),
    ("scale", torch.tensor(0.5)),
    ("model.\u00fcnicode.weight", torch.randn(4, 4).to(torch.float8_e4m3fn)),
    ("bias", torch.randn(9, dtype=torch.float64)),
    ("none", torch.empty(0, 3)),
]


@pytest.fixture(scope="module", params=SGLANG_VERSIONS)
def sglang(request: pytest.FixtureRequest) -> Iterator[SglangReceiver]:
    receiver = SglangReceiver(engine_tree("sglang", request.param))
    yield receiver
    receiver.close()


CONTROL = payload.control(b"0123456789")


def digest(tensor: torch.Tensor) -> str:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return hashlib.sha256(data).hexdigest()


def rows(tensors: Any) -> list[list[object]]:
    return [[name, str(t.dtype), list(t.shape), digest(t)] for name, t in tensors]


# --- SGLang's unpickler ------------------------------------------------------------------------


def test_sglang_takes_a_bucket_in_a_shared_file(sglang: SglangReceiver) -> None:
    out = payload.shared_bytes(4096)
    bucket = FlattenedTensorBucket(TENSORS, out=out)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(TENSORS)}
    # the same memory, refilled: what a trainer does for every bucket
    changed = [(name, (t.to(torch.float32) + 1).to(t.dtype)) for name, t in TENSORS]
    bucket = FlattenedTensorBucket(changed, out=out)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(changed)}


def test_sglang_finds_a_rings_file_after_buckets_that_came_twice(sglang: SglangReceiver) -> None:
    """A gateway repeats requests; each reading counts down the users of the file."""
    before = segments()
    ring = SharedRing(4096, _core.host())
    (name,) = segments() - before
    for value in range(3):
        data, told = filled(ring, value)
        for _ in range(2):
            assert sglang(data) == told
    ring.close()
    assert name not in segments()


def test_a_rings_file_that_was_left_goes_with_its_last_reader(sglang: SglangReceiver) -> None:
    before = segments()
    ring = SharedRing(4096, _core.host())
    (name,) = segments() - before
    data, told = filled(ring, 1)
    assert sglang(data) == told
    late, told = filled(ring, 2)
    ring.leave()
    del ring
    gc.collect()
    assert sglang(late) == told
    assert name not in segments()


def test_a_rings_file_that_was_left_outlasts_requests_that_come_twice(
    sglang: SglangReceiver,
) -> None:
    before = segments()
    ring = SharedRing(4096, _core.host())
    (name,) = segments() - before
    data, told = filled(ring, 1)
    assert sglang(data) == told
    ring.leave()
    for _ in range(3):
        assert sglang(data) == told
    ring.remove()
    assert name not in segments()


@pytest.mark.parametrize("ended", ["removed", "freed"])
@pytest.mark.parametrize("readings", [1, 2, 3])
def test_a_ring_that_was_left_ends_whatever_was_read_twice(readings: int, ended: str) -> None:
    """Where torch finds no file to remove it ends the process."""
    code = (
        "import gc, os, sys\n"
        "from wsync import _core\n"
        "from wsync.bucket import metadata_at\n"
        "from wsync.messages import payload\n"
        "from wsync.trainer.sessions.stock import SharedRing\n"
        "ring = SharedRing(4096, _core.host())\n"
        "(name,) = [n for n in os.listdir('/dev/shm') if n.startswith(f'torch_{os.getpid()}_')]\n"
        "data = ring.payload(0, 16, [metadata_at(0, 'a', 'float32', (4,))])\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    payload.load(data)\n"
        "ring.leave()\n"
        "if sys.argv[2] == 'removed':\n"
        "    ring.remove()\n"
        "del ring\n"
        "gc.collect()\n"
        "print(name in os.listdir('/dev/shm'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(readings), ended],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def filled(ring: SharedRing, value: int) -> tuple[bytes, Any]:
    """A bucket of all that there is, and what SGLang finds there."""
    ctypes.memset(ring.address, value, ring.nbytes)
    held = torch.full((ring.nbytes,), value, dtype=torch.uint8).view(torch.float32)
    metadata = FlattenedTensorBucket([("w", held)]).get_metadata()
    return ring.payload(0, ring.nbytes, metadata), {"tensors": rows([("w", held)])}


def test_sglang_takes_a_bucket_of_ordinary_memory(sglang: SglangReceiver) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(TENSORS)}


def test_sglang_takes_a_bucket_by_value(sglang: SglangReceiver) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    assert sglang(payload.bucket(bucket, by_value=True)) == {"tensors": rows(TENSORS)}


def test_sglang_takes_named_tensors_and_control_bytes(sglang: SglangReceiver) -> None:
    assert sglang(payload.named_tensors(TENSORS)) == {"tensors": rows(TENSORS)}
    data = b'{"op": "open"}\x00\xff'
    expected = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert sglang(payload.control(data)) == {"tensors": rows([("__wsync__", expected)])}


def test_sglang_refuses_what_wsync_must_not_send(sglang: SglangReceiver) -> None:
    """The receiver of these tests is as strict as the real one."""
    answer = sglang(b"\x80\x04cwsync.bucket\nALIGNMENT\n.")
    assert "Blocked unsafe" in answer["error"]


# --- shared files ------------------------------------------------------------------------------


def segments() -> set[str]:
    """This process's own: torch names them by who made them."""
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_whoever_reads_a_senders_output_does_not_wait_for_its_receivers() -> None:
    code = (
        "from wsync.messages import payload\n"
        "from wsync.bucket import FlattenedTensorBucket as Bucket\n"
        "import sys, torch\n"
        "sent = payload.bucket(Bucket(named_tensors=[('a', torch.ones(3))]))\n"
        "print(sent.hex(), file=sys.stderr, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as sender:
        assert sender.stderr is not None
        received: Any = payload.load(bytes.fromhex(sender.stderr.readline()))
        _, rest = sender.communicate("go on\n", timeout=60)  # the manager lives as long as this
    assert (sender.returncode, rest) == (0, "")
    assert received["flattened_tensor"].view(torch.float32).tolist() == [1.0, 1.0, 1.0]


def test_no_copy_is_made_of_shared_bytes() -> None:
    out = payload.shared_bytes(4096)
    address, before = out.data_ptr(), segments()
    payload.bucket(FlattenedTensorBucket([("w", torch.ones(3))], out=out))
    assert out.data_ptr() == address
    assert segments() == before


def test_memory_that_torch_shared_in_another_way_is_left_alone() -> None:
    flat = torch.full((64,), 9, dtype=torch.uint8).share_memory_()
    address = flat.data_ptr()
    bucket = FlattenedTensorBucket([("w", torch.ones(3))], out=flat)
    value: Any = payload.load(payload.bucket(bucket))
    assert flat.data_ptr() == address
    assert torch.equal(value["flattened_tensor"], flat[:12])


def test_shared_files_go_with_their_processes() -> None:
    script = (
        "import sys, torch; from wsync.messages import payload; from wsync.bucket import *\n"
        "out = payload.shared_bytes(4096)\n"
        "payload.bucket(FlattenedTensorBucket([('w', torch.ones(3))], out=out))\n"
        "print(out.untyped_storage()._share_filename_cpu_()[1].decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip().lstrip("/")
    assert name.startswith("torch_")
    file = Path("/dev/shm") / name
    deadline = time.monotonic() + 30  # torch_shm_manager cleans up on its own time
    while file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not file.exists()


def test_what_ends_all_processes_of_a_job_leaves_the_manager_of_files() -> None:
    """Torch ends a process whose manager is gone."""
    kept = payload.shared_bytes(4096)
    (manager,) = payload._managers
    status = Path(f"/proc/{manager.pid}/status").read_text(encoding="ascii")
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    for number in (signal.SIGTERM, signal.SIGHUP):
        assert blocked & 1 << (number - 1)
        assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    payload.remove(kept)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(NoMemoryError, match=r"/dev/shm has [0-9]+ bytes left"):
        payload.shared_bytes(1 << 60)


def users(file: Path) -> int:
    """What torch counts at the start of a segment."""
    return int.from_bytes(file.read_bytes()[:4], "little")


def test_a_payload_that_comes_twice_does_not_take_the_file_from_its_maker() -> None:
    """torch counts down for each; what is then left over unlinks it, and ends the maker when that
    does the same."""
    before = segments()
    out = payload.shared_bytes(4096)
    bucket = FlattenedTensorBucket(TENSORS, out=out)
    data = payload.bucket(bucket)
    (name,) = segments() - before
    file = Path("/dev/shm") / name
    assert users(file) == 2
    for _ in range(3):
        value: Any = payload.load(data)
        assert rows(FlattenedTensorBucket(**value).reconstruct_tensors()) == rows(TENSORS)
        del value
        gc.collect()
        assert users(file) == 1
    del bucket, out
    gc.collect()
    assert not file.exists()


@pytest.mark.parametrize("nbytes", [4, 8])
def test_a_shared_counter_is_not_counted_below_its_least(nbytes: int) -> None:
    data = bytearray((1 << 31 if nbytes == 8 else 3).to_bytes(nbytes, "little"))
    assert _core.count_down(data, 1)
    assert int.from_bytes(data, "little") == (1 << 31) - 1 if nbytes == 8 else 2
    data[:] = (2).to_bytes(nbytes, "little")
    assert [_core.count_down(data, 1) for _ in range(3)] == [True, False, False]
    assert int.from_bytes(data, "little") == 1
    data[:] = (-5).to_bytes(nbytes, "little", signed=True)
    assert not _core.count_down(data, -5)


def test_what_is_no_counter_is_refused() -> None:
    with pytest.raises(ValueError, match="a counter of 3 bytes"):
        _core.count_down(bytearray(3), 0)
    with (
        pytest.raises(ValueError, match="a counter of 4 bytes at"),
        memoryview(bytearray(9)) as all,
    ):
        _core.count_down(all[1:5], 0)
    with pytest.raises((TypeError, BufferError)):
        _core.count_down(bytes(4), 0)  # type: ignore[arg-type]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A name in /dev/shm as torch gives them."""
    path = Path(f"/dev/shm/torch_{os.getpid()}_{secrets.randbits(31)}_0")
    yield path
    path.unlink(missing_ok=True)


def by_file(name: bytes, nbytes: int) -> bytes:
    call = reduce_to(
        "torch.multiprocessing.reductions", "rebuild_storage_filename", None, b"/x", name, nbytes
    )
    return b"\x80\x04" + call


@pytest.mark.parametrize(
    ("make", "nbytes", "text"),
    [
        (lambda path: path.write_bytes(bytes(64 + 4095)), 4096, "has 4159 bytes instead of 4160"),
        (lambda path: path.write_bytes(b""), 0, "has 0 bytes instead of 64"),
        (lambda path: path.write_bytes(bytes(100)), -1, "is not"),
        (lambda path: path.write_bytes(bytes(100)), 1 << 70, "has 100 bytes instead of"),
        (os.mkfifo, 1, "is no regular file of user"),
        (lambda path: path.symlink_to("/etc/passwd"), 1, "payload: OSError"),
        (lambda path: None, 1, "payload: FileNotFoundError"),
    ],
)
def test_a_shared_file_is_a_file_of_torchs_and_large_enough(
    make: Any, nbytes: int, text: str, shm: Path
) -> None:
    make(shm)
    with pytest.raises(ProtocolError, match=text):
        payload.load(by_file(f"/{shm.name}".encode(), nbytes))


def test_a_file_that_is_cut_short_once_it_was_read_is_no_harm(shm: Path) -> None:
    """Reading beyond the end of a mapped file would kill the process."""
    shm.write_bytes(bytes(64) + b"x" * 100_000)
    os.truncate(shm, 64 + 150_000)
    storage: Any = payload.load(by_file(f"/{shm.name}".encode(), 150_000))
    os.truncate(shm, 0)
    child = os.fork()
    if child == 0:
        os._exit(bytes(storage) != b"x" * 100_000 + bytes(50_000))
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def cut(descriptor: int, *more: Any) -> int:
        os.truncate(shm, 64 + 50_000)
        return read(descriptor, *more)

    shm.write_bytes(bytes(64 + 100_000))
    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(ProtocolError, match="has 50064 bytes instead of 100064"):
        payload.load(by_file(f"/{shm.name}".encode(), 100_000))


@pytest.mark.parametrize(
    "name",
    [
        b"/etc/passwd",
        b"/torch_1_2_3/../../etc/passwd",
        b"torch_1_2_3",
        b"/sem.torch_1_2_3",
        b"/torch_1_2_3\n",
        b"/torch_" + b"1" * 5000 + b"_1",
    ],
)
def test_other_files_are_not_opened(name: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not a file of torch's in /dev/shm"):
        payload.load(by_file(name, 1))


# --- descriptors -------------------------------------------------------------------------------


def by_descriptor(identifier: object, nbytes: int) -> bytes:
    """What torch writes for a storage that is passed by descriptor."""
    state = pickle.dumps({"_id": identifier}, 3)[2:-1]
    shared = b"cmultiprocessing.resource_sharer\nDupFd\n)\x81" + state + b"b"
    size = pickle.dumps(nbytes, 3)[2:-1]
    call = b"ctorch.multiprocessing.reductions\nrebuild_storage_fd\nN"
    return b"\x80\x04" + call + shared + size + b"\x87R."


@pytest.mark.parametrize(
    "address",
    [
        ("127.0.0.1", 9),
        "127.0.0.1",
        "/run/docker.sock",
        "\x00pymp-x/listener-x",
        "/tmp/pymp-x/../listener-x",
        "x" * 4000,
        None,
    ],
)
def test_addresses_of_others_are_not_called(address: object) -> None:
    with pytest.raises(ProtocolError, match=r"is no address of multiprocessing") as raised:
        payload.load(by_descriptor((address, 1), 8))
    assert len(str(raised.value)) < 300


@pytest.fixture
def folder() -> Iterator[Path]:
    """As multiprocessing makes one for its sockets."""
    with tempfile.TemporaryDirectory(prefix="pymp-") as name:
        yield Path(name)


def test_a_socket_lies_in_a_private_folder(folder: Path) -> None:
    path = folder / "listener-x"
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
        folder.chmod(0o755)
        with pytest.raises(ProtocolError, match="no socket in a private folder"):
            payload.load(by_descriptor((str(path), 1), 8))
    path.unlink()
    folder.chmod(0o700)
    path.write_text("")
    with pytest.raises(ProtocolError, match="no socket in a private folder"):
        payload.load(by_descriptor((str(path), 1), 8))


def test_a_process_that_passes_nothing_is_not_waited_for(folder: Path) -> None:
    path = folder / "listener-x"
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
        line.listen()
        with pytest.raises(DeadlineError, match="listener-x passes no descriptor"):
            payload.load(by_descriptor((str(path), 1), 8), timeout=0.1)


def test_a_process_that_passes_a_byte_at_a_time_is_not_waited_for(folder: Path) -> None:
    """One deadline ends all waits together; each of them would be short enough."""
    path, over = folder / "listener-x", threading.Event()

    def dribble(line: socket.socket) -> None:
        with contextlib.suppress(OSError), line.accept()[0] as peer:
            for byte in (40).to_bytes(4, "big") + b"#CHALLENGE#" + bytes(29):
                if over.wait(0.05):
                    break
                peer.sendall(bytes([byte]))

    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
        line.listen()
        server = threading.Thread(target=dribble, args=(line,), daemon=True)
        server.start()
        try:
            with pytest.raises(DeadlineError, match="listener-x passes no descriptor"):
                payload.load(by_descriptor((str(path), 1), 8), timeout=0.5)
        finally:
            over.set()
            server.join(60)


@pytest.mark.parametrize(
    ("kind", "nbytes", "text"),
    [
        ("file", 4097, "has 4096 bytes instead of 4097"),
        ("file", -1, "is not"),
        ("pipe", 1, "is no regular file of user"),
    ],
)
def test_a_descriptor_is_of_a_file_that_is_large_enough(kind: str, nbytes: int, text: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        ends = os.pipe()
        shared: Any = DupFd(file.fileno() if kind == "file" else ends[0])
        try:
            with pytest.raises(ProtocolError, match=text):
                payload.load(by_descriptor(shared._id, nbytes))
        finally:
            for end in ends:
                os.close(end)


# --- wsync's reader ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_value", [False, True])
def test_a_bucket_is_read_back(by_value: bool) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    value: Any = payload.load(payload.bucket(bucket, by_value=by_value))
    assert value["metadata"] == bucket.get_metadata()
    assert rows(FlattenedTensorBucket(**value).reconstruct_tensors()) == rows(TENSORS)


@pytest.mark.parametrize("by_value", [False, True])
def test_a_bucket_that_was_read_goes_with_its_last_user(by_value: bool) -> None:
    """And not when Python next collects garbage: it is as large as a trainer makes its buckets."""
    data = payload.bucket(FlattenedTensorBucket(TENSORS), by_value=by_value)
    gc.disable()
    try:
        value: Any = payload.load(data)
        flat = weakref.ref(value["flattened_tensor"])
        del value
        assert flat() is None
    finally:
        gc.enable()


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300))
def test_control_bytes_are_read_back(data: bytes) -> None:
    assert payload.control_bytes(payload.load(payload.control(data))) == data


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        [("w", torch.ones(3))],
        [("__wsync__", torch.ones(3))],
        [("__wsync__", torch.ones(1, 1, dtype=torch.uint8))],
        [("__wsync__", torch.ones(1, dtype=torch.uint8)), ("w", torch.ones(1))],
        ["__wsync__"],
    ],
)
def test_other_payloads_are_no_control(value: object) -> None:
    assert payload.control_bytes(value) is None


def test_tensors_that_torch_pickled_are_read() -> None:
    tensors = [("w", torch.nn.Parameter(torch.randn(3, 2))), ("t", torch.randn(4, 3).t()[1:])]
    assert rows(payload.load(pickle.dumps([(n, t.detach()) for n, t in tensors]))) == rows(tensors)
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        for name in ("file_descriptor", "file_system"):
            torch.multiprocessing.set_sharing_strategy(name)
            copies = [(n, t.detach().clone()) for n, t in tensors]
            data = io.BytesIO()
            ForkingPickler(data).dump([*copies, ("none", torch.empty(0))])
            assert rows(payload.load(data.getvalue()))[:2] == rows(copies)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def reduce_to(module: str, name: str, *arguments: object) -> bytes:
    """A pickle that calls a global."""
    data = pickle.dumps(arguments, 3)[2:-1]
    return f"c{module}\n{name}\n".encode() + data + b"R."


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (reduce_to("os", "system", "true"), r"global os\.system is not allowed"),
        (reduce_to("builtins", "eval", "1"), r"global builtins\.eval"),
        (reduce_to("builtins", "getattr", 1, "x"), r"global builtins\.getattr"),
        (reduce_to("torch", "load", "/etc/passwd"), r"global torch\.load"),
        (reduce_to("torch._utils", "_rebuild_tensor", 1), r"global torch\._utils\._rebuild_tensor"),
        (
            reduce_to("wsync.messages.payload", "control", b""),
            r"global wsync\.messages\.payload\.control",
        ),
        (reduce_to("torch", "Tensor", 3), "only named"),
        (reduce_to("torch", "Size", ("x",)), "not a shape"),
        (reduce_to("torch", "Size", (-1,)), "not a shape"),
        (reduce_to("torch", "float32"), "TypeError"),
        (b"\x80\x04ctorch\nTensor\nN}X\x01\x00\x00\x00aK\x01s\x86b.", "fills a function"),
        (b"\x80\x04X\x01\x00\x00\x00aQ.", "opcode 0x51 is not allowed"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "opcode 0x96"),
        (b"\x80\x04}))s.", "a tuple is the key of a dict"),
        (b"\x80\x04}())u.", "a tuple is the key of a dict"),
        (b"\x80\x04))a.", "fills a tuple"),
        (b"", "EOFError"),
        (b"\x80\x04]", "payload: "),
        (pickle.dumps([1, 2, 3])[:-1], "payload: "),
    ],
)
def test_everything_else_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        payload.load(data)


def test_few_bytes_take_little_memory() -> None:
    tracemalloc.start()
    try:
        assert payload.load(b"\x80\x04Nr\xff\xff\xff\x03.") is None  # a memo of 2^26 places
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_few_bytes_take_little_time() -> None:
    """Tuples of the same tuple twice: as text or as a key, each level takes twice as long."""
    nested = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(100))
    with pytest.raises(ProtocolError, match="is not a shape"):
        payload.load(nested + b"ctorch\nSize\nhd\x85R.")
    with pytest.raises(ProtocolError, match="key of a dict"):
        payload.load(nested + b"}hdNs.")


def test_a_tensor_that_was_read_cannot_be_moved() -> None:
    """torch.Tensor.__setstate__ would put it anywhere, and grow its storage."""
    data = CONTROL[:-1]
    with pytest.raises(ProtocolError, match="fills a list"):
        payload.load(data + b"}b.")
    built = pickle.dumps(torch.ones(3), 4)[:-1]
    with pytest.raises(ProtocolError, match="fills a Tensor"):
        payload.load(built + b"}b.")


def test_nothing_outside_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ProtocolError, match=r"trap_module\.x is not allowed"):
        payload.load(b"ctrap_module\nx\n.")
    assert "trap_module" not in sys.modules


def tamper(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


def test_a_tensor_cannot_reach_beyond_its_storage() -> None:
    """An unchecked rebuild would grow the storage, or read what lies behind a mapping."""
    flat = torch.arange(8, dtype=torch.uint8)
    bucket = FlattenedTensorBucket([("w", flat)])
    data = payload.bucket(bucket, by_value=True)
    larger = tamper(data, b"K\x00K\x08\x85", b"K\x00K\x09\x85")
    with pytest.raises(ProtocolError, match="needs 9 bytes of a storage of 8"):
        payload.load(larger)


def stored(
    count: int,
    data: bytes = b"",
    *,
    said: int | None = None,
    facts: bytes = b"\x80\x02}.",
    kind: tuple[str, str] = ("torch", "ByteStorage"),
) -> bytes:
    """A storage in torch's legacy format, whose count is announced as `said`."""
    announced = b"c%s\n%s\n" % (kind[0].encode(), kind[1].encode())
    size = pickle.dumps(count if said is None else said, 3)[2:-1]
    return (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(1001, 2)
        + facts
        + (b"\x80\x02(X\x07\x00\x00\x00storage" + announced)
        + (b"X\x01\x00\x00\x00kX\x03\x00\x00\x00cpu" + size + b"NtQ.")
        + b"\x80\x02]X\x01\x00\x00\x00ka."
        + (count.to_bytes(8, "little") + data)
    )


def from_bytes(data: bytes) -> bytes:
    return reduce_to("torch.storage", "_load_from_bytes", data)


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64),
        *(torch.uint16, torch.float8_e4m3fn),
    ],
)
def test_values_of_every_kind_of_storage_are_read(kind: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).t().to(kind)
    found: Any = payload.load(pickle.dumps(tensor, 4))
    assert rows([("t", found)]) == rows([("t", tensor)])
    assert found.stride() == tensor.stride()


NESTED = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(100))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (stored(1 << 33), r"8589934592 elements of 1 bytes has 0"),
        (stored(4, b"1234", said=1 << 62), r"4611686018427387904 elements of 1 bytes has 4"),
        (stored(4, b"12345"), r"4 elements of 1 bytes has 5"),
        (stored(4, b"1234", kind=("torch", "FloatStorage")), "4 elements of 4 bytes has 4"),
        (stored(4, b"1234", kind=("torch", "QUInt8Storage")), r"global torch\.QUInt8Storage"),
        (stored(4, b"1234", kind=("torch", "Tensor")), r"global torch\.Tensor"),
        (stored(0, facts=b"\x80\x04}" + NESTED + b"Ns."), "a tuple is the key of a dict"),
        (stored(0, facts=b"\x80\x02cos\ngetpid\n)R."), "opcode 0x52|global os.getpid"),
        (stored(0)[:-30], "payload: "),
        (b"PK\x03\x04" + bytes(30), "payload: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_storage_inside_is_no_more_than_its_bytes(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        payload.load(from_bytes(data))


def test_bytes_that_are_named_often_are_read_once() -> None:
    """Each time they would take their memory again."""
    call = b"ctorch.storage\n_load_from_bytes\n\x94" + pickle.dumps(stored(99, bytes(99)))[2:-1]
    with pytest.raises(ProtocolError, match="larger than the payload"):
        payload.load(b"\x80\x04(" + call + b"h\x00h\x01\x85R" * 50 + b"t.")


def test_a_file_that_is_named_often_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, read = [], torch_shm_reader._read
    monkeypatch.setattr(torch_shm_reader, "_read", lambda *a: copies.append(a[2]) or read(*a))
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        whole = torch.randn(64)
        data = io.BytesIO()
        ForkingPickler(data).dump([(f"t{n}", whole[n:]) for n in range(9)])
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    found = payload.load(data.getvalue())
    assert len(copies) == 1
    assert all(torch.equal(tensor, whole[n:]) for n, (_, tensor) in enumerate(found))


def test_only_a_tuple_is_taken_for_arguments() -> None:
    """A tensor of one byte may have any number of elements."""
    with pytest.raises(ProtocolError, match="a call with a Tensor"):
        payload.load(b"ctorch\nSize\n" + pickle.dumps(torch.ones(1), 4)[2:-1] + b"R.")


def test_elements_that_share_their_bytes_are_refused() -> None:
    """A copy of them would take as much memory as the payload says."""
    with pytest.raises(ProtocolError, match="more elements than its storage of 1 bytes"):
        payload.load(pickle.dumps(torch.zeros(1, dtype=torch.uint8).expand(1 << 40), 4))


@pytest.mark.parametrize("name", ["complex32", "quint8", "uint4", "bits8", "int1"])
def test_elements_that_are_no_bytes_of_their_own_are_refused(name: str) -> None:
    bytewise = pickle.dumps(torch.zeros(4, dtype=torch.uint16), 4)
    size = bytes((len(name),))
    with pytest.raises(ProtocolError, match=f"global torch.{name} is not allowed"):
        payload.load(tamper(bytewise, b"\x06uint16", size + name.encode())[2 + 9 :])


def test_no_part_of_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are, by their name."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(ProtocolError, match=r"global torch\._inductor is not allowed"):
        payload.load(b"ctorch\n_inductor\n.")
    assert asked == []


@pytest.mark.parametrize(
    "data",
    [
        # a large number 40,000 times
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b"\x94ctorch\nSize\n")
        + (b"(" + b"h\x00" * 40_000 + b"t\x85R."),
        # a storage, whose text has all its elements
        b"ctorch\nSize\n" + from_bytes(stored(100_000, bytes(100_000)))[:-1] + b"\x85\x85R.",
        # tuples of tuples
        (b"\x80\x04)\x94" + b"".join(b"(" + b"h%c" % i * 6 + b"t\x94" for i in range(9)))
        + b"ctorch\nSize\nh\x09\x85R.",
        (b"\x80\x04\x8c\x05torch\x8d" + (1 << 20).to_bytes(8, "little"))
        + (b"x" * (1 << 20) + b"\x93."),
        b"cx\n" + b"x" * (1 << 20) + b"\n.",
        b"ctorch\n" + b"x" * (1 << 20) + b"\n.",
        b"x" * (1 << 20),
        "\u00fc" * (1 << 20),
    ],
    ids=lambda value: str(len(value)),
)
def test_errors_are_short(data: bytes | str) -> None:
    with pytest.raises(ProtocolError) as raised:
        payload.load(data)
    assert len(str(raised.value)) < 1000


def test_a_name_comes_once() -> None:
    flat = torch.zeros(8, dtype=torch.uint8)
    entry = payload.FlattenedTensorMetadata("w", torch.Size((4,)), torch.uint8, 0, 4, 4)
    bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=[entry] * 40_000)
    with pytest.raises(ProtocolError, match="payload: 'w' comes twice"):
        payload.load(payload.bucket(bucket, by_value=True))


def test_metadata_is_a_list() -> None:
    with pytest.raises(ProtocolError, match="metadata is a str instead of a list"):
        payload.load(pickle.dumps({"flattened_tensor": None, "metadata": "w"}))


def test_a_storage_inside_is_read_strictly() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("unpickled",))

    inner = io.BytesIO()
    torch.save(Evil(), inner)
    with pytest.raises(ProtocolError, match="payload: "):
        payload.load(reduce_to("torch.storage", "_load_from_bytes", inner.getvalue()))


def test_metadata_must_be_metadata() -> None:
    with pytest.raises(ProtocolError, match="metadata is not a list of"):
        payload.load(pickle.dumps({"flattened_tensor": None, "metadata": [{"name": "w"}]}))
    data = payload.bucket(FlattenedTensorBucket([("w", torch.ones(2))]), by_value=True)
    with pytest.raises(ProtocolError, match="metadata"):
        payload.load(tamper(data, b"start_idx", b"start_odx"))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_payloads_never_escape(data: st.DataObject) -> None:
    """Each is either read or a ProtocolError."""
    whole = bytearray(CONTROL)
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        payload.load(bytes(whole))
    except ProtocolError:
        return


def test_only_plain_values_are_written() -> None:
    with pytest.raises(InvalidArgumentError, match="object cannot be written"):
        payload.values([object()])


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**80), 2**80)
        | st.text(max_size=20)
        | st.binary(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_the_writer_writes_pickles(value: object) -> None:
    data = payload.values(value)
    pickletools.dis(data, io.StringIO())
    assert pickle.loads(data) == value


def test_a_related_process_can_pass_a_descriptor() -> None:
    """SGLang's own serialiser between a parent and its child."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_pickled, args=(theirs,))
    process.start()
    try:
        assert ours.poll(120)
        value = payload.load(ours.recv_bytes(), timeout=120)
        assert rows(value) == rows([("w", torch.arange(6).reshape(2, 3))])
    finally:
        ours.send("done")
        process.join(30)
