"""Memory, events, streams and buffer tables of the host device, as Python sees them."""

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from wsync import _core
from wsync.machine import device

DEADLINE = 60.0


def make_layout(tensors: Sequence[Tensor]) -> _core.Layout:
    """A layout in which buffer i holds the whole tensor "t<i>"."""
    builder = _core.LayoutBuilder()
    builder.add_tensors([f"t{i}" for i in range(len(tensors))], _core.describe(tensors))
    return builder.build()


def test_the_memory_that_is_left_is_a_part_of_the_machines() -> None:
    left = _core.host().memory_available()
    assert 0 < left <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("backend", "reserved", "frees"),
    [
        ("native", (9, 5, 4), 2),
        ("native", (5, 1, 8), None),  # counted anew when 4 bytes were reserved
        ("cudaMallocAsync", (9, 5, 4), None),
    ],
)
def test_memory_that_torch_has_freed_is_counted_if_torch_counts_it(
    backend: str, reserved: tuple[int, ...], frees: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dict(zip(("allocated", "freed", "current"), reserved, strict=True))
    stats = [{}, {"num_device_free": 2, "reserved_bytes": {"all": facts}}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda gpu: stats[gpu])
    assert [device.frees(gpu) for gpu in (None, 0, 1)] == [None, None, frees]


@pytest.mark.parametrize(
    ("cores", "gpus", "threads"), [(2, 1, 2), (64, 8, 4), (16, 8, 2), (4, 8, 1), (64, 1, 4)]
)
def test_threads_that_gather_for_a_gpu_are_at_most_four_and_its_share_of_the_cores(
    cores: int, gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = SimpleNamespace(cuda_devices=lambda: (12080, [("GPU-0", "", 0, 9, 0)] * gpus))
    monkeypatch.setattr(device, "_core", played)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    gpu: Any = SimpleNamespace(ordinal=0)
    assert device.threads_for(gpu) == threads
    assert device.threads_for(_core.host()) == 1


def copy_tensors(
    stream: _core.Stream, sources: Sequence[Tensor], destinations: Sequence[Tensor]
) -> int:
    """Enqueues the copies of sources[i] to destinations[i]; returns the bytes written."""
    route = _core.Route(make_layout(sources), make_layout(destinations))
    source_table = _core.BufferTable.of(_core.describe(sources), sources)
    destination_table = _core.BufferTable.of(_core.describe(destinations), destinations)
    return sum(
        stream.copy(route, i, 0, source_table, destination_table) for i in range(route.buffer_count)
    )


def copied(source: Tensor, dtype: torch.dtype, *, threads: int = 1) -> Tensor:
    destination = torch.zeros(source.shape, dtype=dtype)
    stream = _core.Stream(threads)
    nbytes = copy_tensors(stream, [source], [destination])
    stream.synchronize(DEADLINE)
    stream.close()
    assert nbytes == destination.nbytes
    return destination


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, except that any NaN stands for any other."""
    assert result.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    integer = {2: torch.int16, 4: torch.int32}[result.element_size()]
    assert torch.equal(result.view(integer)[~nan], expected.view(integer)[~nan])


def all_16_bits(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def special_floats() -> Tensor:
    """Random bit patterns, and what lies at and next to every 16-bit value and tie."""
    generator = torch.Generator().manual_seed(5)
    low, high = -(2**31), 2**31 - 1
    bits = torch.randint(low, high, (300_001,), generator=generator, dtype=torch.int64)
    halves = all_16_bits(torch.float16).float().view(torch.int32).long()
    brains = all_16_bits(torch.bfloat16).float().view(torch.int32).long()
    parts = [bits]
    between = all_16_bits(torch.float16).float().unfold(0, 2, 1).mean(1).view(torch.int32).long()
    parts += [between + delta for delta in (-1, 0, 1)]  # of subnormal halves, too
    for values, tie in ((halves, 2**12), (brains, 2**15)):
        parts += [values + base + delta for base in (0, tie) for delta in (-1, 0, 1)]
    return torch.cat(parts).clamp(low, high).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("step", [1, 2], ids=["rows", "elements"])
def test_widening_is_exact_for_every_bfloat16(step: int) -> None:
    source = all_16_bits(torch.bfloat16)[::step]
    assert_same_bits(copied(source, torch.float32), source.float())


@pytest.mark.parametrize("step", [1, 3], ids=["rows", "elements"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrowing_rounds_like_torch(dtype: torch.dtype, step: int) -> None:
    source = special_floats()[::step]
    assert source.isnan().any() and source.isinf().any()
    assert_same_bits(copied(source, dtype), source.to(dtype))


def computing_layout(tensor: Tensor, scale: float, offset: float) -> _core.Layout:
    """As make_layout, but "t0" is computed from the tensor."""
    builder = _core.LayoutBuilder()
    shape, zeros = tuple(tensor.shape), (0,) * tensor.dim()
    target = ("t0", "", shape, zeros, zeros, shape, range(tensor.dim()), 0, scale, offset)
    dtype = str(tensor.dtype).removeprefix("torch.")
    builder.add_parameter("p", 0, dtype, tensor.stride(), [(zeros, shape, zeros)], [target])
    return builder.build()


def computed(source: Tensor, dtype: torch.dtype, scale: float, offset: float) -> Tensor:
    destination = torch.zeros(source.shape, dtype=dtype)
    route = _core.Route(computing_layout(source, scale, offset), make_layout([destination]))
    stream = _core.Stream()
    tables = [_core.BufferTable.of(_core.describe([t]), t) for t in (source, destination)]
    stream.copy(route, 0, 0, *tables)
    stream.synchronize(DEADLINE)
    stream.close()
    return destination


FLOATS = {
    "float32": special_floats,
    "bfloat16": lambda: all_16_bits(torch.bfloat16),
    "float16": lambda: all_16_bits(torch.float16),
}


@pytest.mark.parametrize("step", [1, 3], ids=["rows", "elements"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_step_of_a_computation_is_what_torch_computes(dtype: str, step: int) -> None:
    source = FLOATS[dtype]()[::step]
    assert source.isnan().any() and source.isinf().any()
    same = source.dtype
    for offset in (1.0, -0.375):
        assert_same_bits(computed(source, same, 1.0, offset), source + offset)
    for scale in (0.5, -1.75):
        assert_same_bits(computed(source, same, scale, 0.0), source * scale)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        *(("float32", dtype) for dtype in FLOATS),
        *(("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")),
    ],
)
def test_a_computation_rounds_each_step_to_float32_and_then_as_the_tensor_is(
    held: str, wanted: str
) -> None:
    """A ring brings the tensor in its own dtype; so does what reads it in place and widens it."""
    source, dtype = FLOATS[held](), getattr(torch, wanted)
    for scale, offset in ((1.0, 1.0), (-1.7, 0.3), (3.0, -1e4), (1e30, 1e38)):
        result = source.float() * torch.tensor(scale) + torch.tensor(offset)
        assert_same_bits(computed(source, dtype, scale, offset), result.to(source.dtype).to(dtype))


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(_core.UnsupportedError, match="p: no conversion from int32 to int32 with"):
        computing_layout(torch.ones(2, dtype=torch.int32), 1.0, 1.0)
    for scale, offset in ((float("nan"), 0.0), (1.0, float("inf")), (0.0, 1.0)):
        with pytest.raises(_core.InvalidArgumentError, match="must be finite, and a scale"):
            computing_layout(torch.ones(2), scale, offset)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str
)
def test_strided_and_transposed_tensors_arrive(dtype: torch.dtype, threads: int) -> None:
    base = torch.arange(3 * 130 * 257).reshape(3, 130, 257).to(dtype)
    sources = [
        base,
        base.transpose(1, 2),
        base.permute(2, 0, 1),
        base[:, ::2, 5:200],
        base[1:, :, ::3],
        base.expand(2, 3, 130, 257),
        base[0, 0, 0],
        base[:, :0],
    ]
    destinations = [torch.zeros(s.shape, dtype=dtype) for s in sources]
    stream = _core.Stream(threads)
    nbytes = copy_tensors(stream, sources, destinations)
    stream.synchronize(DEADLINE)
    assert nbytes == sum(d.nbytes for d in destinations)
    for source, destination in zip(sources, destinations, strict=True):
        assert torch.equal(destination, source)


def test_copies_outside_their_buffers_are_refused() -> None:
    source = torch.ones(100)
    destination = torch.zeros(100)
    route = _core.Route(make_layout([source]), make_layout([destination]))
    table = _core.BufferTable.of(_core.describe([source]), source)
    small = _core.BufferTable([(destination.data_ptr(), 399)], destination)
    stream = _core.Stream()
    with pytest.raises(_core.InvalidArgumentError, match="399"):
        stream.copy(route, 0, 0, table, small)
    with pytest.raises(_core.InvalidArgumentError):
        stream.copy(route, 0, 0, table, _core.BufferTable([]))
    with pytest.raises(_core.InvalidArgumentError, match="buffer 1 is out of range"):
        stream.copy(route, 1, 0, table, table)
    with pytest.raises(_core.InvalidArgumentError, match="buffer -1 is out of range"):
        stream.copy(route, -1, 0, table, table)
    with pytest.raises(TypeError, match="Plan or a Route"):
        stream.copy("route", 0, 0, table, table)  # type: ignore[arg-type]
    stream.synchronize(DEADLINE)
    assert not destination.any()


def test_a_plan_fills_the_ring_round_by_round() -> None:
    tensors = [torch.randn(300, 70), torch.arange(5000, dtype=torch.int64)]
    layout = make_layout(tensors)
    plan = _core.Plan(layout, [(layout, True)], [(0, 0)], [0], 0)
    sources = _core.BufferTable.of(_core.describe(tensors), tensors)
    ring = _core.Memory(plan.ring_nbytes(0))
    rings = _core.BufferTable([(ring.address, ring.nbytes)], ring)
    stream = _core.Stream(2)
    total = sum(
        stream.copy(plan, number, _core.LOCAL, sources, rings) for number in range(plan.round_count)
    )
    stream.synchronize(DEADLINE)
    assert total == sum(tensor.nbytes for tensor in tensors)
    manifest = plan.manifest(0)
    for i, tensor in enumerate(tensors):
        offset = manifest.shards(manifest.names().index(f"t{i}"))[0][2]
        data = bytes(memoryview(ring)[offset : offset + tensor.nbytes])
        assert data == tensor.numpy().tobytes()
    with pytest.raises(
        _core.InvalidArgumentError, match=f"round {plan.round_count} is out of range"
    ):
        stream.copy(plan, plan.round_count, _core.LOCAL, sources, rings)
    with pytest.raises(_core.InvalidArgumentError, match="phase 3 is out of range"):
        stream.copy(plan, 0, 3, sources, rings)


@pytest.mark.parametrize(
    ("nbytes", "error", "match"),
    [
        (0, ValueError, "0 bytes"),
        (2**60, MemoryError, str(2**60)),
    ],
)
def test_impossible_sizes_are_errors(nbytes: int, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        _core.Memory(nbytes)


def test_check_ends_a_wait() -> None:
    event = _core.Event(_core.Memory(64), 0)
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the peer failed")

    with pytest.raises(KeyError, match="the peer failed"):
        event.wait(1, DEADLINE, check)


def test_signals_end_a_wait() -> None:
    event = _core.Event(_core.Memory(64), 0)

    def interrupt(signum: int, frame: object) -> None:
        raise InterruptedError("signal")

    previous = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(InterruptedError, match="signal"):
            event.wait(1, DEADLINE)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)


class Owner:
    """Something whose life can be watched."""


def test_copies_keep_their_buffers_alive_until_the_stream_has_passed() -> None:
    stream = _core.Stream()
    source, destination = torch.arange(1000.0), torch.zeros(1000)
    route = _core.Route(make_layout([source]), make_layout([destination]))
    owner = Owner()
    alive = weakref.ref(owner)
    table = _core.BufferTable.of(_core.describe([source]), owner)
    stream.copy(
        route, 0, 0, table, _core.BufferTable.of(_core.describe([destination]), destination)
    )
    del table, owner
    assert alive() is not None  # nothing was let go before this thread asked
    stream.synchronize(DEADLINE)
    assert alive() is None
    assert torch.equal(source, destination)
