"""Pickles of weight-update requests, read by SGLang's own unpickler and by wsync's."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import io
import os
import pickle
import pickletools
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import SGLANG_VERSIONS, SglangReceiver, engine_tree

from wsync import ProtocolError, _core
from wsync.bucket import FlattenedTensorBucket
from wsync.messages import payload
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


def digest(tensor: torch.Tensor) -> str:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return hashlib.sha256(data).hexdigest()


def rows(tensors: Any) -> list[list[object]]:
    return [[name, str(t.dtype), list(t.shape), digest(t)] for name, t in tensors]


def test_sglang_takes_a_bucket_in_a_shared_file(sglang: SglangReceiver) -> None:
    out = payload.shared_bytes(4096)
    bucket = FlattenedTensorBucket(TENSORS, out=out)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(TENSORS)}
    # the same memory, refilled: what a trainer does for every bucket
    changed = [(name, (t.to(torch.float32) + 1).to(t.dtype)) for name, t in TENSORS]
    bucket = FlattenedTensorBucket(changed, out=out)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(changed)}


def test_a_rings_file_that_was_left_can_be_read_until_it_is_removed(sglang: SglangReceiver) -> None:
    before = segments()
    ring = SharedRing(4096, _core.host())
    (name,) = segments() - before
    data, told = filled(ring, 1)
    assert sglang(data) == told
    late, told = filled(ring, 2)
    ring.leave("E")
    assert sglang(late) == told
    SharedRing(64, _core.host()).leave("other")
    assert name in segments()
    following = SharedRing(64, _core.host())
    following.leave("E")  # one for each engine
    assert name not in segments()
    following.close()


def test_a_rings_bucket_is_pickled_once_and_every_reader_is_counted() -> None:
    ring = SharedRing(64, _core.host())
    metadata = FlattenedTensorBucket([("w", torch.ones(16))]).get_metadata()
    users = ctypes.c_int32.from_address(ring.address - 64)
    before = users.value
    first, *others = [ring.payload(0, 64, metadata) for _ in range(3)]
    assert users.value == before + 3
    assert all(data is first for data in others)
    ring.close()


def filled(ring: SharedRing, value: int) -> tuple[bytes, Any]:
    """A bucket of all that there is, and what SGLang finds there."""
    ctypes.memset(ring.address, value, ring.nbytes)
    held = torch.full((ring.nbytes,), value, dtype=torch.uint8).view(torch.float32)
    metadata = FlattenedTensorBucket([("w", held)]).get_metadata()
    return ring.payload(0, ring.nbytes, metadata), {"tensors": rows([("w", held)])}


def test_sglang_takes_a_bucket_of_ordinary_memory(sglang: SglangReceiver) -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    assert sglang(payload.bucket(bucket)) == {"tensors": rows(TENSORS)}


def test_sglang_takes_named_tensors_and_control_bytes(sglang: SglangReceiver) -> None:
    assert sglang(payload.named_tensors(TENSORS)) == {"tensors": rows(TENSORS)}
    data = b'{"op": "open"}\x00\xff'
    expected = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert sglang(payload.control(data)) == {"tensors": rows([("__wsync__", expected)])}


def test_sglang_refuses_what_wsync_must_not_send(sglang: SglangReceiver) -> None:
    """The receiver of these tests is as strict as the real one."""
    answer = sglang(b"\x80\x04cwsync.bucket\nALIGNMENT\n.")
    assert "Blocked unsafe" in answer["error"]


def segments() -> set[str]:
    """This process's own: torch names them by who made them."""
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_no_copy_is_made_of_shared_bytes() -> None:
    out = payload.shared_bytes(4096)
    address, before = out.data_ptr(), segments()
    payload.bucket(FlattenedTensorBucket([("w", torch.ones(3))], out=out))
    assert out.data_ptr() == address
    assert segments() == before


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


def test_a_bucket_is_read_back() -> None:
    bucket = FlattenedTensorBucket(TENSORS)
    value: Any = payload.load(payload.bucket(bucket))
    assert value["metadata"] == bucket.get_metadata()
    assert rows(FlattenedTensorBucket(**value).reconstruct_tensors()) == rows(TENSORS)


def test_a_bucket_that_was_read_goes_with_its_last_user() -> None:
    """And not when Python next collects garbage: it is as large as a trainer makes its buckets."""
    data = payload.bucket(FlattenedTensorBucket(TENSORS))
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
        [("w", torch.ones(3))],
        [("__wsync__", torch.ones(3))],
        [("__wsync__", torch.ones(1, dtype=torch.uint8)), ("w", torch.ones(1))],
    ],
)
def test_other_payloads_are_no_control(value: object) -> None:
    assert payload.control_bytes(value) is None


def reduce_to(module: str, name: str, *arguments: object) -> bytes:
    """A pickle that calls a global."""
    data = pickle.dumps(arguments, 3)[2:-1]
    return f"c{module}\n{name}\n".encode() + data + b"R."


def by_value_of(data: bytes) -> bytes:
    """A pickle that loads a storage from these bytes."""
    return payload.values(payload.called("torch.storage", "_load_from_bytes", data))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (reduce_to("os", "system", "true"), r"global os\.system is not allowed"),
        (reduce_to("builtins", "eval", "1"), r"global builtins\.eval"),
        (reduce_to("torch", "float32"), "TypeError"),
        (by_value_of(reduce_to("os", "system", "true")), "Weights only load failed"),
        (b"", "EOFError"),
        (pickle.dumps([1, 2, 3])[:-1], "payload: "),
    ],
)
def test_everything_else_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        payload.load(data)


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
