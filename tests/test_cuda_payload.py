"""Buckets on a GPU for engines without wsync: against torch's own pickles and SGLang's unpickler,
and between processes on tests/fakecuda."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.engines import SGLANG_VERSIONS, SglangReceiver, engine_tree
from support.fakecuda import fake_driver, fake_environment, fake_nvrtc
from support.gpu_reader import load
from support.peer import Peer, PeerError
from support.sglang_receiver import add_packages, digest

from wsync import ProtocolError
from wsync.bucket import FlattenedTensorBucket
from wsync.messages import gpu_payload, payload
from wsync.messages.gpu_payload import GpuTensor

UUID = "fafafafa-fafa-fafa-fafa-fafafafafa00"  # of the fake's first GPU
OTHER = UUID[:-1] + "1"  # of its second
ABSENT = UUID[:-1] + "2"
TWO = {"WSYNC_FAKE_CUDA_DEVICES": "2"}
GRAIN = 2 << 20
TENSOR = GpuTensor(UUID, bytes(range(64)), 512, 200, (b"/torch_7_8_9", 3))
FIRST = "first.payload(0, 64, [])"
CENSUS = """
library = ctypes.CDLL(path)
counts = (ctypes.c_long * 6)()  # fakecuda_census_t
library.fakecuda_census(counts)
list(counts)
"""
PRELUDE = """
import ctypes, os, time
import torch
from support.gpu_reader import count_down, load, new_ring, open_tensor
from support.played_gpu import reach
from wsync import _core
from wsync.messages import gpu_payload, payload
from wsync.messages.gpu_payload import GpuTensor

def never(): pass
def write(ring, offset, data): ctypes.memmove(reach(ring.address + offset), data, len(data))
def read(opened): return ctypes.string_at(reach(opened.address), opened.nbytes)
"""


@pytest.fixture(params=SGLANG_VERSIONS)
def tree(request: pytest.FixtureRequest) -> Path:
    return engine_tree("sglang", request.param)


@contextlib.contextmanager
def started(**environment: str) -> Iterator[Peer]:
    with Peer(fake_environment(**TWO, **environment)) as peer:
        peer(PRELUDE)
        yield peer


@pytest.fixture(scope="module")
def owner() -> Iterator[Peer]:
    """Tests leave no ring behind that is held."""
    with started(WSYNC_NVRTC_LIB=fake_nvrtc()) as peer:
        yield peer


@pytest.fixture(scope="module")
def reader() -> Iterator[Peer]:
    with started() as peer:
        yield peer


def raises(text: str) -> Any:
    return pytest.raises(PeerError, match=text)


@contextlib.contextmanager
def on_gpu(tensor: GpuTensor, device: str | int) -> Iterator[torch.Tensor]:
    """A tensor that torch takes for one on a GPU; of its exporter, only `_share_cuda_`, which asks
    the driver, is not its own."""
    shared = (device, b"\x02c" + tensor.handle, tensor.nbytes, tensor.offset, *tensor.counter)
    with (
        mock.patch.object(torch.UntypedStorage, "device", torch.device("cuda:0"), create=True),
        mock.patch.object(
            torch.UntypedStorage, "_share_cuda_", lambda _: (*shared, bytes(64), False), create=True
        ),
    ):
        yield torch.zeros(tensor.nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("count", [1, 3, 400])
def test_a_bucket_is_what_torch_would_pickle(tree: Path, count: int) -> None:
    """SGLang's sender is ForkingPickler on this object; its patch_torch puts the UUID in."""
    with mock.patch.dict(sys.modules), on_gpu(TENSOR, UUID) as flat:
        add_packages(tree)
        module = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
        metadata = [
            module.FlattenedTensorMetadata(
                f"w{i}", torch.Size([i, 2]), torch.bfloat16, 4 * i, 4 * i + 4, 1000 * i
            )
            for i in range(count)
        ]
        data = io.BytesIO()
        ForkingPickler(data, 4).dump({"flattened_tensor": flat, "metadata": metadata})
    assert gpu_payload.bucket(TENSOR, metadata) == data.getvalue()


def test_sglang_opens_what_was_exported(tree: Path, owner: Peer) -> None:
    """Its unpickler, its patch_torch and torch's rebuild; one slot of memory, twice."""
    owner("ring = new_ring(8192, uuid)", uuid=OTHER)
    with mock.patch.dict(os.environ, fake_environment(**TWO)):
        engine = SglangReceiver(tree, UUID, OTHER)
    try:
        for round in range(2):
            flat = torch.arange(16, dtype=torch.float32).reshape(4, 4) + round
            metadata = FlattenedTensorBucket([("w", flat)]).get_metadata()
            owner("write(ring, 4096, data)", data=flat.numpy().tobytes())
            sent, handle, file = owner(
                "(ring.payload(4096, 64, metadata), ring._handle, ring._file)",
                metadata=metadata,
            )
            assert owner("ring.held(4096, 1)")
            exported = [1, b"\x02c" + handle, 64, 4096, file, 0, bytes(64), False]
            assert engine(sent) == {
                "tensors": [["w", "torch.float32", [4, 4], digest(flat)]],
                "opened": [[v.hex() if isinstance(v, bytes) else v for v in exported]],
            }
            owner("ring.acquire(4096, 64, 60, never)")
        owner("ring.close()")
        assert owner("gpu_payload.collect()") == 0
    finally:
        engine.close()


def test_payloads_are_read_back() -> None:
    metadata = FlattenedTensorBucket([("w", torch.ones(5))]).get_metadata()
    data = gpu_payload.bucket(TENSOR, metadata)
    assert load(data) == {"flattened_tensor": TENSOR, "metadata": metadata}


def test_engines_of_the_host_refuse_them() -> None:
    with pytest.raises(ProtocolError, match="rebuild_cuda_tensor is not allowed"):
        payload.load(gpu_payload.bucket(TENSOR, []))


def test_another_process_reads_a_bucket(owner: Peer, reader: Peer) -> None:
    data = bytes(i % 251 for i in range(3000))
    owner(f"ring = new_ring(8192, '{UUID}'); write(ring, 1024, data)", data=data)
    bucket = owner("ring.payload(1024, 3000, [])")
    read = reader("tensor = load(data)['flattened_tensor']; tensor", data=bucket)
    assert read.nbytes == 3000 and read.offset == 1024
    assert reader("opened = open_tensor(tensor); read(opened)") == data
    assert owner("ring.held(), ring.held(0, 1024), ring.held(4023, 1), ring.held(4024, 1)") == (
        *(True, False, True, False),
    )
    reader("opened.close(); opened.close()")  # counts once
    owner("ring.acquire(0, 8192, 60, never)")
    assert owner("tensor = ring.export(0, 10); tensor.counter[1]") == 0  # and may be used again
    owner("count_down(*tensor.counter)")


def test_a_consumer_that_does_not_let_go_holds_nobody_up(owner: Peer, reader: Peer) -> None:
    """The next ring is fresh memory; the first is freed when it may be."""
    owner(f"first = new_ring(64, '{UUID}')")
    reader(
        "opened = open_tensor(load(data)['flattened_tensor'])",
        data=owner(FIRST),
    )
    with raises(
        f"DeadlineError: 64 bytes of GPU {UUID} were not released within 0.05 s; .*/dev/shm/t"
    ):
        owner("first.acquire(0, 64, 0.05, never)")
    with raises("ZeroDivisionError"):
        owner("first.acquire(0, 64, 60, lambda: 1 / 0)")
    owner(f"first.close(); second = new_ring(64, '{UUID}')")
    assert owner("gpu_payload.collect(), first.address != second.address") == (64, True)
    with raises("StateError: the ring is closed"):
        owner("first.export(0, 64)")
    reader("opened.close()")
    assert owner("gpu_payload.collect()") == 0


@pytest.mark.parametrize(("how", "held"), [("not asked", 0), ("refused", 64), ("cut off", 64)])
def test_what_has_reached_no_engine_is_not_waited_for(owner: Peer, how: str, held: int) -> None:
    left = owner(
        "from support.stock_on_gpu import left_by\nleft_by(how); left = gpu_payload.collect()\n"
        "for ring, _ in gpu_payload.retired_rings: ring._counters.zero_()\nleft",
        how=how,
    )
    assert left == held
    assert owner("gpu_payload.collect()") == 0


def test_memory_that_engines_hold_is_named_when_there_is_no_more() -> None:
    with started(WSYNC_FAKE_CUDA_MEMORY=str(3 * GRAIN)) as owner:
        owner(f"first = new_ring({2 * GRAIN}, '{UUID}')\n{FIRST}\nfirst.close()")
        with raises(f"NoMemoryError: .*engines still hold {2 * GRAIN} bytes of earlier buckets"):
            owner(f"new_ring({2 * GRAIN}, '{UUID}')")


def test_what_cannot_be_opened_says_why(reader: Peer) -> None:
    with started() as owner:
        refusals(owner, reader)


def refusals(owner: Peer, reader: Peer) -> None:
    owner(f"ring = new_ring(64, '{UUID}')")
    tensor = owner("ring.export(0, 64)")
    with raises(f"UnsupportedError: GPU {ABSENT} is none of {UUID}"):
        reader("open_tensor(tensor)", tensor=dataclasses.replace(tensor, uuid=ABSENT))
    with raises(f"ProtocolError: payload: storage of {GRAIN} bytes at 1 of {GRAIN} bytes"):
        reader(
            "open_tensor(tensor)",
            tensor=dataclasses.replace(tensor, offset=1, nbytes=GRAIN),
        )
    with raises("UnsupportedError: GPU 2 does not exist in this process: it sees 2 GPUs"):
        reader("_core.IpcMemory(2, 64)")
    reader("opened = open_tensor(tensor)", tensor=tensor)
    owner.kill()
    reader("opened.close()")  # the file of counters may be gone
    with raises("DeviceError: cuIpcOpenMemHandle"):
        reader("open_tensor(tensor)")
    assert reader(CENSUS, path=fake_driver())[3] == 0  # allocated


def test_a_stock_engine_is_updated_through_gpu_memory(tree: Path, owner: Peer) -> None:
    """Buckets that share slots of a ring, for two workers, in two updates."""
    right, opened, free = owner(
        "from support.stock_on_gpu import update_twice\nupdate_twice(tree, uuid)",
        tree=tree,
        uuid=UUID,
    )
    assert right == [True, True] and free
    assert len({call[1] for call in opened}) == 1  # one allocation
    assert len(opened) == 2 * 2 * 5 and len({call[3] for call in opened}) < 5


def test_a_stock_engine_that_holds_a_bucket_fails_the_update(owner: Peer) -> None:
    owner(
        "from types import SimpleNamespace\nfrom wsync.trainer.sessions.stock import StockSession\n"
        "from support.stock_on_gpu import OneSlot, gpu\n"
        "engine = SimpleNamespace(name='E', workers=1, update_weights=lambda made, **k: made())\n"
        "session = StockSession(0, engine, timeout=5, on_gpu=True)\n"
        "session.make_ring(OneSlot(), gpu()); session.attach(OneSlot(), gpu(), 5, never)\n"
        "session.begin(1, '7', 5, never)\n"
        "stream = _core.Stream()\n"
        "session.acquire(0, stream, 5, never); session.post(0, stream, 5, never)"
    )
    with raises("DeadlineError: engine E: 16 bytes of GPU .* were not released"):
        owner("session.acquire(1, stream, 0.5, never)")
    owner("session.close()")
