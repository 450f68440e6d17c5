"""Pickles of weight-update requests, read by SGLang's own unpickler and by wsync's."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import pickle
import pickletools
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import SGLANG_VERSIONS, SglangReceiver, engine_tree
from support.pickled_sender import send_pickled

from wsync import InvalidArgumentError, NoMemoryError, ProtocolError, payload
from wsync.bucket import FlattenedTensorBucket

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
    assert sglang(payload.to_text(payload.bucket(bucket))) == {"tensors": rows(TENSORS)}
    # the same memory, refilled: what a trainer does for every bucket
    changed = [(name, (t.to(torch.float32) + 1).to(t.dtype)) for name, t in TENSORS]
    bucket = FlattenedTensorBucket(changed, out=out)
    assert sglang(payload.to_text(payload.bucket(bucket))) == {"tensors": rows(changed)}


def test_sglang_takes_a_bucket_of_ordinary_memory(sglang: SglangReceiver) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    assert sglang(payload.to_text(payload.bucket(bucket))) == {"tensors": rows(TENSORS)}


def test_sglang_takes_a_bucket_by_value(sglang: SglangReceiver) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    assert sglang(payload.to_text(payload.bucket(bucket, by_value=True))) == {
        "tensors": rows(TENSORS)
    }


def test_sglang_takes_named_tensors_and_control_bytes(sglang: SglangReceiver) -> None:
    assert sglang(payload.to_text(payload.named_tensors(TENSORS))) == {"tensors": rows(TENSORS)}
    data = b'{"op": "open"}\x00\xff'
    expected = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert sglang(payload.to_text(payload.control(data))) == {
        "tensors": rows([("__wsync__", expected)])
    }


def test_sglang_refuses_what_wsync_must_not_send(sglang: SglangReceiver) -> None:
    """The receiver of these tests is as strict as the real one."""
    answer = sglang(payload.to_text(b"\x80\x04cwsync.bucket\nALIGNMENT\n."))
    assert "Blocked unsafe" in answer["error"]


# --- shared files ------------------------------------------------------------------------------


def segments() -> set[str]:
    """This process's own: torch names them by who made them."""
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


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
        "import sys, torch; from wsync import payload; from wsync.bucket import *\n"
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


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(NoMemoryError, match=r"/dev/shm has [0-9]+ bytes left"):
        payload.shared_bytes(1 << 60)


# --- wsync's reader ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_value", [False, True])
def test_a_bucket_is_read_back(by_value: bool) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    for data in (
        payload.bucket(bucket, by_value=by_value),
        payload.to_text(payload.bucket(bucket, by_value=by_value)),
    ):
        value: Any = payload.load(data)
        assert value["metadata"] == bucket.get_metadata()
        assert rows(FlattenedTensorBucket(**value).reconstruct_tensors()) == rows(TENSORS)


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
        (reduce_to("wsync.payload", "control", b""), r"global wsync\.payload\.control"),
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
        ("not base64!", "not base64"),
        (pickle.dumps([1, 2, 3])[:-1], "payload: "),
    ],
)
def test_everything_else_is_refused(data: bytes | str, text: str) -> None:
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
        value = payload.load(ours.recv_bytes())
        assert rows(value) == rows([("w", torch.arange(6).reshape(2, 3))])
    finally:
        ours.send("done")
        process.join(30)
