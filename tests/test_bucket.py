"""wsync's bucket and SGLang's own, byte for byte, each filled and each read by either."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import SGLANG_VERSIONS, engine_tree

import wsync
from wsync import InvalidArgumentError, LayoutError, UnsupportedError
from wsync.bucket import FlattenedTensorBucket, FlattenedTensorMetadata

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module", params=SGLANG_VERSIONS)
def sglang(request: pytest.FixtureRequest) -> ModuleType:
    """SGLang's tensor_bucket.py, which needs torch alone."""
    tree = engine_tree("sglang", request.param)
    path = tree / "sglang" / "srt" / "weight_sync" / "tensor_bucket.py"
    name = f"sglang_tensor_bucket_{request.param.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape)
    data = torch.randint(0, 256, (size.numel() * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(size) if size.numel() else torch.empty(size, dtype=dtype)


def same(left: Named, right: Named) -> bool:
    """Equal names, dtypes, shapes and bytes; NaN is a value like others."""
    return [(n, t.dtype, t.shape, content(t)) for n, t in left] == [
        (n, t.dtype, t.shape, content(t)) for n, t in right
    ]


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def fields(metadata: list[Any]) -> list[dict[str, object]]:
    return [vars(entry) for entry in metadata]


named_tensors = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(
            [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]
        ),
    ),
    min_size=1,
    max_size=8,
).map(lambda specs: [(f"t{i}", random_tensor(tuple(s), d)) for i, (s, d) in enumerate(specs)])

# the stock class cannot look at empty or misaligned parts: multiples of 8 bytes keep clear of both
stock_tensors = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])),
    min_size=1,
    max_size=8,
).map(lambda specs: [(f"t{i}", random_tensor((n, 8), d)) for i, (n, d) in enumerate(specs)])


@settings(deadline=None, max_examples=100)
@given(named_tensors, st.sampled_from([1, 2, 16, 64]))
def test_what_goes_in_comes_out(tensors: Named, alignment: int) -> None:
    bucket = FlattenedTensorBucket(tensors, alignment=alignment)
    assert same(bucket.reconstruct_tensors(), tensors)
    assert all(entry.start_idx % alignment == 0 for entry in bucket.get_metadata())
    again = FlattenedTensorBucket(
        flattened_tensor=bucket.get_flattened_tensor(), metadata=bucket.get_metadata()
    )
    assert same(again.reconstruct_tensors(), tensors)


@settings(deadline=None, max_examples=40)
@given(tensors=stock_tensors)
def test_bytes_and_metadata_are_those_of_sglang(sglang: ModuleType, tensors: Named) -> None:
    theirs = sglang.FlattenedTensorBucket(named_tensors=tensors)
    mine = FlattenedTensorBucket(named_tensors=tensors, alignment=1)
    assert torch.equal(mine.get_flattened_tensor(), theirs.get_flattened_tensor())
    assert fields(mine.get_metadata()) == fields(theirs.get_metadata())


def test_an_odd_tensor_ahead_of_a_wider_one(sglang: ModuleType) -> None:
    """SGLang's own packing of these cannot be read back by SGLang."""
    tensors = [("odd", random_tensor((3,), torch.bfloat16)), ("wide", torch.ones(2, 2))]
    theirs = sglang.FlattenedTensorBucket(named_tensors=tensors)
    with pytest.raises(RuntimeError):
        theirs.reconstruct_tensors()
    mine = FlattenedTensorBucket(named_tensors=tensors)
    assert same(mine.reconstruct_tensors(), tensors)
    read = sglang.FlattenedTensorBucket(
        flattened_tensor=mine.get_flattened_tensor(), metadata=mine.get_metadata()
    )
    assert same(read.reconstruct_tensors(), tensors)
    mended = FlattenedTensorBucket(
        flattened_tensor=theirs.get_flattened_tensor(), metadata=theirs.get_metadata()
    )
    assert same(mended.reconstruct_tensors(), tensors)


def test_the_interface_is_sglangs(sglang: ModuleType) -> None:
    assert FlattenedTensorBucket.supports_multi_dtypes is True
    for arguments in ({}, {"named_tensors": []}, {"flattened_tensor": torch.empty(0)}):
        for bucket_class in (FlattenedTensorBucket, sglang.FlattenedTensorBucket):
            with pytest.raises(ValueError):
                bucket_class(**arguments)


def test_tensors_of_any_stride_are_flattened() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = [("t", base.t()), ("s", base[::2, 1::3]), ("e", torch.ones(1).expand(3, 2))]
    bucket = FlattenedTensorBucket(tensors)
    assert same(bucket.reconstruct_tensors(), tensors)
    parameter = torch.nn.Parameter(base)
    assert same(FlattenedTensorBucket([("p", parameter)]).reconstruct_tensors(), [("p", base)])


def test_a_warm_buffer_is_filled_in_place() -> None:
    out = torch.full((100,), 7, dtype=torch.uint8)
    tensors = [("a", torch.ones(4)), ("b", torch.zeros(3))]
    bucket = FlattenedTensorBucket(tensors, out=out)
    flat = bucket.get_flattened_tensor()
    assert flat.data_ptr() == out.data_ptr()
    assert flat.numel() == 28
    assert bool((out[28:] == 7).all())
    assert same(bucket.reconstruct_tensors(), tensors)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (torch.empty(27, dtype=torch.uint8), "27 bytes, the tensors need 28"),
        (torch.empty(28), "torch.float32"),
        (torch.empty(7, 4, dtype=torch.uint8), r"shape \(7, 4\)"),
        (torch.empty(64, dtype=torch.uint8)[::2], "stride"),
        (torch.empty(64, dtype=torch.uint8)[1:], "address is not a multiple of alignment=16"),
    ],
)
def test_a_buffer_that_cannot_hold_it_is_refused(out: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        FlattenedTensorBucket([("a", torch.ones(4)), ("b", torch.zeros(3))], out=out)


def test_errors_name_the_tensor() -> None:
    with pytest.raises(UnsupportedError, match=r"model\.w .*meta"):
        FlattenedTensorBucket([("a", torch.ones(1)), ("model.w", torch.ones(1, device="meta"))])
    with pytest.raises(InvalidArgumentError, match="alignment 24"):
        FlattenedTensorBucket([("a", torch.ones(1))], alignment=24)


@pytest.mark.parametrize(
    ("start", "end", "shape"),
    [(0, 12, (2,)), (4, 12, (2,)), (-8, 0, (2,)), (8, 0, (0,)), (0, 0, (1 << 32, 1 << 32))],
)
def test_metadata_that_does_not_fit_is_refused(start: int, end: int, shape: object) -> None:
    entry = FlattenedTensorMetadata(
        "w",
        torch.Size(shape),
        torch.float32,
        start,
        end,
        end - start,  # type: ignore[arg-type]
    )
    bucket = FlattenedTensorBucket(
        flattened_tensor=torch.zeros(8, dtype=torch.uint8), metadata=[entry]
    )
    with pytest.raises(LayoutError, match=r"^w: torch.* bytes, but its place is"):
        bucket.reconstruct_tensors()


def test_a_bucket_is_flat_bytes() -> None:
    bucket = FlattenedTensorBucket(flattened_tensor=torch.zeros(8), metadata=[])
    with pytest.raises(LayoutError, match=r"torch\.float32"):
        bucket.reconstruct_tensors()
    gaps = FlattenedTensorBucket(
        flattened_tensor=torch.zeros(8, dtype=torch.uint8)[::2],
        metadata=[FlattenedTensorMetadata("w", torch.Size((2,)), torch.float16, 0, 4, 4)],
    )
    with pytest.raises(LayoutError, match=r"expected a contiguous .* stride \(2,\)"):
        gaps.reconstruct_tensors()
    assert wsync.FlattenedTensorBucket is FlattenedTensorBucket
