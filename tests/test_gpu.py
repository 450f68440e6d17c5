"""What a real GPU alone can show, as far as one process pair on one GPU goes.

`pytest -m gpu tests/test_gpu.py` on a machine that has one.  With WSYNC_GPU_DRY_RUN=1 and the
stand-in for the driver (test_cuda_update.py does so) all of it runs that needs no torch on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
from support import fused
from support.gpu_engine import FusedEngine, GpuEngine, dry, module, slow, where
from support.gpu_mapping import Mapping, descriptor
from support.gpu_stock import StockEngine
from support.workers import ThreadEngine

import wsync
from wsync import _core
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.machine import device
from wsync.messages import gpu_payload

pytestmark = pytest.mark.gpu

OPTIONS = wsync.Options(
    deadline=60.0,
    progress=False,
    round_nbytes=1 << 18,
    delivery="wsync",  # by rounds
)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8")
CASTS = (("float32", "bfloat16"), ("bfloat16", "float32"))


@pytest.fixture
def torch_cuda() -> None:
    if dry():
        pytest.skip("needs torch on the GPU, this is a dry run")


def draw(seed: int, shapes: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    """Random bytes of these shapes and dtypes, where the tests' weights are."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, dtype) in shapes.items():
        kind = getattr(torch, dtype)
        if dtype == "uint8" or (kind.is_floating_point and kind.itemsize == 1):
            data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(kind)
        elif kind.is_floating_point:
            data = torch.randn(shape, generator=generator).to(kind)
        else:
            data = torch.randint(-(2**62), 2**62, shape, dtype=kind, generator=generator)
        found[name] = data.to(where())
    return found


DENSE = {f"{d}-{len(shape)}": (shape, d) for d in DTYPES for shape in ((301, 96), (7,))}
LARGE = {"large": ((1000, 1024), "float32")}


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ, by their bytes on the host."""
    host = {name: tensor.detach().cpu() for name, tensor in expected.items()}
    return fused.differing(found, host)


def test_every_byte_arrives_whatever_the_dtype() -> None:
    weights = draw(1, DENSE)
    with GpuEngine(weights) as engine:
        engine.fill(0xA5)
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            for seed in (1, 2):
                weights = draw(seed, DENSE)
                sync.update(weights)
                assert wrong(engine.weights(), weights) == []


def test_transposed_and_sliced_tensors_are_read_where_they_lie() -> None:
    whole = draw(3, {"a": ((130, 257), "bfloat16"), "b": ((64, 33), "float8_e4m3fn")})
    weights = {"t": whole["a"].t(), "s": whole["a"][:, 3:90], "f": whole["b"].t()}
    with GpuEngine(weights) as engine:
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            sync.update()
        assert wrong(engine.weights(), weights) == []


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_round_as_torch_does(source: str, target: str) -> None:
    weights = draw(4, {"a": ((311, 65), source)})
    kind = getattr(torch, target)
    with GpuEngine(weights, a=kind) as engine:
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            sync.update()
        assert wrong(engine.weights(), {"a": weights["a"].to(kind)}) == []


@pytest.mark.parametrize("pinned", [True, False])
def test_backups_in_host_memory_are_read_from_there(pinned: bool) -> None:
    if pinned and dry():
        pytest.skip("torch cannot pin memory in a dry run")
    weights = {name: tensor.cpu() for name, tensor in draw(5, {**DENSE, **LARGE}).items()}
    if pinned:
        weights = {name: tensor.pin_memory() for name, tensor in weights.items()}
    with GpuEngine(weights) as engine:
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            for byte in (0xA5, 0x5A):
                engine.fill(byte)
                sync.update()
                assert wrong(engine.weights(), weights) == []


def test_a_thousand_rounds_through_two_slots_keep_their_order() -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=4096, ring_nbytes=8192)
    weights = draw(6, LARGE)
    with GpuEngine(weights) as engine:
        with wsync.connect(weights, [engine], options=options) as sync:
            for byte in (0xA5, 0x5A):
                engine.fill(byte)
                report = sync.update()
                assert wrong(engine.weights(), weights) == []
    assert report.rounds >= 1000
    assert report.ring_nbytes == 8192


def test_weights_are_copied_out_of_torch_s_own_memory() -> None:
    options = dataclasses.replace(OPTIONS, delivery="direct")
    weights = draw(17, {**DENSE, **LARGE})
    with (
        GpuEngine(weights) as engine,
        wsync.connect(weights, [engine], options=options) as sync,
    ):
        for seed in (18, 19, 20):
            for name, tensor in draw(seed, {**DENSE, **LARGE}).items():
                weights[name].copy_(tensor)
            report = sync.update()
            assert wrong(engine.weights(), weights) == []
    assert dry() or set(report.paths.values()) == {"direct"}


def test_later_updates_take_no_memory_of_the_gpu(torch_cuda: None) -> None:
    weights = draw(7, LARGE)
    with GpuEngine(weights) as engine:
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            sync.update()
            sync.update()
            torch.cuda.synchronize()
            before, _ = torch.cuda.mem_get_info()
            for _ in range(10):
                sync.update()
            after, _ = torch.cuda.mem_get_info()
    assert before - after <= 0


# kind, reciprocal, rows and columns of a block
METHODS = (
    ("fp8_block", True, 128, 128),
    ("fp8_block", False, 64, 96),
    ("fp8_ue8m0", True, 128, 128),
    ("fp8_tensor", False, 0, 0),
    ("int4", False, 1, 32),
    ("int4", False, 1, 128),
    ("int4_slime", False, 1, 64),
    ("mxfp8", False, 1, 32),
    ("nvfp4", False, 1, 16),
)
SHAPE = (300, 456)  # a last block of fewer rows and columns


def quantiser(dtype: str, method: tuple[str, bool, int, int], cuts: list[int]) -> Any:
    """Of a tensor whose columns lie in one buffer between each two cuts."""
    builder = _core.LayoutBuilder()
    size = getattr(torch, dtype).itemsize
    for buffer, (begin, end) in enumerate(itertools.pairwise(cuts)):
        extent = (SHAPE[0], end - begin)
        strides = (extent[1] * size, size)
        builder.add_shard("w", dtype, SHAPE, (0, begin), extent, buffer, 0, strides)
    names = ("w.codes", "w.scale", "w.scale_2" if method[0] == "nvfp4" else None, None)
    rules = [("w", *method, *names, 0, 0)]
    return _core.Quantiser(builder.build(), 0, len(cuts) - 1, rules)


def quantised(
    made: Any, parts: list[torch.Tensor], stream: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Image and table of amaxes, on the host."""
    near = parts[0].device
    image = torch.zeros(made.image_nbytes, dtype=torch.uint8, device=near)
    amaxes = torch.zeros(made.amax_count, device=near)
    results = _core.describe([image, amaxes], ["image", "amaxes"], gpu=True)
    weights = _core.describe(parts, [str(index) for index in range(len(parts))], gpu=True)
    spans = _core.BufferTable.of(weights), _core.BufferTable.of(results)
    device.settle(stream.device, 60.0)
    for codes in (False, True):
        stream.quantise(made, *spans, codes=codes)
    stream.synchronize(60.0)
    return image.cpu(), amaxes.cpu().view(torch.int32)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_and_scales_are_those_of_the_host(
    dtype: str, method: tuple[str, bool, int, int]
) -> None:
    ordinary = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    ordinary[5] *= 1e-6
    ordinary[7, 3] = -0.0
    ordinary[200:210] = 0
    with (
        contextlib.closing(_core.Stream(1, _core.host())) as host,
        contextlib.closing(_core.Stream(1, device.find(device.default()))) as gpu,
    ):
        for cuts in ([0, 456], [0, 128, 456], [0, 200, 456]):
            made = quantiser(dtype, method, cuts)
            weights = ordinary.to(getattr(torch, dtype))
            for wild in (None, torch.nan, torch.inf):
                if wild is not None:
                    weights[9, 21] = wild
                parts = [weights[:, a:b].contiguous() for a, b in itertools.pairwise(cuts)]
                expected = quantised(made, parts, host)
                found = quantised(made, [part.to(where()) for part in parts], gpu)
                assert torch.equal(found[0], expected[0]), (cuts, wild)
                assert torch.equal(found[1], expected[1]), (cuts, wild)


@pytest.mark.parametrize("own_stream", [True, False])
def test_an_update_waits_for_what_torch_was_given(own_stream: bool, torch_cuda: None) -> None:
    old, new = draw(8, LARGE), draw(9, LARGE)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with GpuEngine(old) as engine:
        with wsync.connect(old, [engine], options=OPTIONS) as sync:
            sync.update()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                slow()
                old["large"].copy_(new["large"])
                assert not stream.query()  # it is still to be written
                sync.update()
        assert wrong(engine.weights(), new) == []


def test_the_engine_s_own_reads_of_the_old_weights_come_first(torch_cuda: None) -> None:
    old, new = draw(10, LARGE), draw(11, LARGE)
    with GpuEngine(old) as engine:
        with wsync.connect(old, [engine], options=OPTIONS) as sync:
            sync.update()
            engine.start_slow_copy()
            sync.update(new)
        assert wrong(engine.slow_copy(), old) == []
        assert wrong(engine.weights(), new) == []


@pytest.mark.parametrize("learnt", [False, True])
def test_a_load_weights_on_the_gpu_gives_the_same_module(learnt: bool) -> None:
    with FusedEngine(learnt=learnt) as engine:
        weights = {name: tensor.to(where()) for name, tensor in fused.draw(1).items()}
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            for seed in (1, 2, 3):
                weights = {name: tensor.to(where()) for name, tensor in fused.draw(seed).items()}
                sync.update(weights)
                own = module()
                own.load_weights(list(weights.items()))
                assert wrong(engine.held(), fused.held(own)) == []
        assert engine.reason() == ("" if learnt else "not asked to learn")


@pytest.mark.parametrize(("workers", "memory"), [(1, "gpu"), (1, "host"), (2, "host"), (2, "gpu")])
def test_torch_rebuilds_the_buckets_of_an_engine_without_wsync(
    workers: int, memory: str, torch_cuda: None
) -> None:
    options = wsync.Options(
        deadline=60.0,
        progress=False,
        delivery="stock",
        stock_memory=memory,
        bucket_nbytes=1 << 20,
        ring_nbytes=16 << 20,
    )
    weights = draw(13, {**DENSE, **LARGE})
    engine = StockEngine(workers)
    try:
        with wsync.connect(weights, [engine], options=options) as sync:
            free = []
            for seed in (14, 15, 16):
                weights = draw(seed, {**DENSE, **LARGE})
                sync.update(weights)
                assert [wrong(found, weights) for found in engine.weights()] == [[]] * workers
                free.append(torch.cuda.mem_get_info()[0])
            assert free[2] >= free[1]
        gc.collect()
        assert gpu_payload.collect() == 0  # the engine has let go of all
    finally:
        engine.close()


def test_a_tensor_whose_memory_was_taken_away_is_named(torch_cuda: None) -> None:
    mapping = Mapping()
    paused = mapping.tensor()
    weights = {**draw(17, DENSE), "paused": paused}
    with GpuEngine(weights) as engine, wsync.connect(weights, [engine], options=OPTIONS) as sync:
        paused.copy_(torch.randn(paused.shape))
        sync.update()
        assert wrong(engine.weights(), weights) == []
        mapping.unmap()
        with pytest.raises(wsync.StateError, match="paused: no memory of GPU 0 lies at its addr"):
            sync.update()
        mapping.map()
        paused.copy_(torch.randn(paused.shape))
        sync.update()
        assert wrong(engine.weights(), weights) == []


def test_learning_reads_no_cache_of_an_engine_that_has_woken_its_weights_alone(
    torch_cuda: None,
) -> None:
    mapping, served, own = Mapping(), module(), module()
    served.cache = mapping.tensor()
    mapping.unmap()
    weights = {name: tensor.to(where()) for name, tensor in fused.draw(18).items()}
    engine = ThreadEngine([RecordedLoader(served)])
    with wsync.connect(weights, [engine], options=OPTIONS) as sync:
        sync.update()
    own.load_weights(list(weights.items()))
    del served.cache  # torch cannot read it either
    found = {name: tensor.cpu() for name, tensor in fused.held(served).items()}
    assert wrong(found, fused.held(own)) == []


def test_memory_of_an_exportable_block_has_a_descriptor_and_goes_back(torch_cuda: None) -> None:
    gpu = device.find(device.wanted() or device.uuid(0))
    torch.cuda.set_device(gpu.ordinal)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with wsync.exportable():
        weights = {"w": torch.empty(2048, 4096, device="cuda")}  # 32 MiB
        temporary = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del temporary
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20
    weights["w"].copy_(torch.randn(2048, 4096))
    plain = torch.zeros(2048, 4096, device="cuda")
    torch.cuda.synchronize()
    assert descriptor(plain.data_ptr()) is None
    fd = descriptor(weights["w"].data_ptr())
    assert fd is not None
    nbytes = weights["w"].nbytes
    with contextlib.closing(_core.Stream(1, gpu)) as stream:
        found = device.staging(nbytes, gpu)
        mapped = _core.Memory.from_fd(fd, nbytes, gpu)
        os.close(fd)
        stream.copy(_bytes(nbytes), 0, 0, _span(mapped), _span(found))
        stream.synchronize(60.0)
    assert torch.equal(found, weights["w"].cpu().view(torch.uint8).view(-1))
    with GpuEngine(weights) as engine:
        with wsync.connect(weights, [engine], options=OPTIONS) as sync:
            sync.update()
        assert wrong(engine.weights(), weights) == []
    during = torch.cuda.mem_get_info()[0]
    del mapped, weights
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - during >= nbytes


def test_an_exportable_block_says_what_the_driver_had_left(torch_cuda: None) -> None:
    torch.cuda.set_device(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        with wsync.exportable():
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
    (note,) = caught.value.__notes__
    assert note.startswith(f"wsync.exportable: cannot make GPU memory of {1 << 44} bytes: ")


def _box(rng: random.Random, itemsizes: tuple[int, int]) -> tuple[Any, ...]:
    """A random box: shape, and for source and target (offset, strides, bytes spanned)."""
    ndim = rng.randint(1, 4)
    shape = [rng.choice((1, 2, 3, 7, 16, 33, 64)) for _ in range(ndim)]
    sides = []
    for itemsize in itemsizes:
        order = list(range(ndim))
        rng.shuffle(order)
        strides, step = [0] * ndim, itemsize * rng.choice((1, 1, 1, 2))
        for dim in order:
            strides[dim] = step
            step *= shape[dim] + rng.choice((0, 0, 1))
        offset = itemsize * rng.randint(0, 40)
        sides.append((offset, strides, offset + step + itemsize))
    return (shape, *sides)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_copy_as_the_host_does(seed: int) -> None:
    rng = random.Random(seed)
    gpu = device.find(device.wanted() or device.uuid(0))
    on_gpu, on_host = _core.Stream(1, gpu), _core.Stream(1)
    casts = [(dtype, dtype) for dtype in DTYPES] + list(CASTS)
    for source, target in casts * 4:
        kinds = getattr(torch, source), getattr(torch, target)
        shape, begin, end = _box(rng, (kinds[0].itemsize, kinds[1].itemsize))
        layouts = []
        zeros = [0] * len(shape)
        for dtype, (offset, strides, _) in zip((source, target), (begin, end), strict=True):
            builder = _core.LayoutBuilder()
            builder.add_shard("t", dtype, shape, zeros, shape, 0, offset, strides)
            layouts.append(builder.build())
        if source in DTYPES[:3] and rng.random() < 0.4:  # x * 1.25 + 1, from the start on
            builder = _core.LayoutBuilder()
            steps = [stride // kinds[0].itemsize for stride in begin[1]]
            element = ("t", "", shape, zeros, zeros, shape, range(len(shape)), 0, 1.25, 1.0)
            builder.add_parameter("p", 0, source, steps, [(zeros, shape, zeros)], [element])
            layouts[0] = builder.build()
        route = _core.Route(*layouts)
        # floats that are numbers, so that casts have one answer
        values = torch.randn(begin[2] // kinds[0].itemsize + 1).to(kinds[0])
        data = values.view(torch.uint8)
        expected = torch.zeros(end[2], dtype=torch.uint8)
        found = device.staging(end[2], gpu).zero_()
        memory = _core.Memory(end[2], gpu)
        on_host.copy(route, 0, 0, _span(data), _span(expected))
        on_gpu.copy(route, 0, 0, _span(data), _span(memory))
        on_gpu.copy(_bytes(end[2]), 0, 0, _span(memory), _span(found))
        on_host.synchronize(60.0)
        on_gpu.synchronize(60.0)
        assert torch.equal(found, expected), (source, target, shape, begin, end)
    on_gpu.close()
    on_host.close()


def _span(memory: Any) -> _core.BufferTable:
    if isinstance(memory, torch.Tensor):
        return _core.BufferTable([(memory.data_ptr(), memory.numel())], owner=memory)
    return _core.BufferTable([(memory.address, memory.nbytes)], owner=memory)


def _bytes(nbytes: int) -> _core.Route:
    builder = _core.LayoutBuilder()
    builder.add_shard("b", "uint8", [nbytes], [0], [nbytes], 0, 0, [1])
    layout = builder.build()
    return _core.Route(layout, layout)


def test_an_engine_that_is_killed_leaves_the_trainer_s_gpu_usable() -> None:
    options = dataclasses.replace(OPTIONS, deadline=10.0, round_nbytes=4096, ring_nbytes=8192)
    weights = draw(12, LARGE)
    with GpuEngine(weights) as victim, GpuEngine(weights) as survivor:
        with wsync.connect(weights, [victim, survivor], options=options) as sync:
            sync.update()
            os.kill(victim.pids[0], signal.SIGSTOP)
            killer = threading.Timer(0.5, os.kill, (victim.pids[0], signal.SIGKILL))
            killer.start()
            with pytest.raises((wsync.PeerClosedError, wsync.RemoteError)):
                sync.update()
            killer.join()
        assert torch.equal(weights["large"] + 1, draw(12, LARGE)["large"] + 1)
        with wsync.connect(weights, [survivor], options=options) as sync:
            sync.update()
        assert wrong(survivor.weights(), weights) == []
