"""Tensors described in C, and views of shared memory handed out as tensors."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wsync._core import (
    BufferTable,
    InvalidArgumentError,
    TensorTable,
    UnsupportedError,
    checksum,
    describe,
    pack,
)

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32"),
    *("int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
]


def two_tensor() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(2, 4), torch.ones(2, 4))


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_known_by_its_torch_name(dtype: str) -> None:
    tensor = torch.empty(3, 2, dtype=getattr(torch, dtype))
    address, name, shape, stride, spanned = describe([tensor])[0]
    assert (address, name, shape, stride) == (tensor.data_ptr(), dtype, (3, 2), (2, 1))
    assert spanned == 6 * tensor.itemsize


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_views_of_a_tensor_are_described_like_torch_sees_them(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=5))
    tensor = torch.empty(shape, dtype=torch.int16)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
        dim = data.draw(st.integers(0, len(shape) - 1))
        tensor = tensor[(slice(None),) * dim + (slice(data.draw(st.integers(0, 4)), None, 2),)]
    for given_as in (tensor, nn.Parameter(tensor, requires_grad=False)):
        address, _, sizes, stride, spanned = describe([given_as])[0]
        assert sizes == tuple(tensor.shape)
        if tensor.numel() == 0:
            assert spanned == 0
            continue
        assert address == tensor.data_ptr()
        # the stride of a dimension of one element is torch's own choice
        mine, theirs = zip(stride, sizes, strict=True), zip(tensor.stride(), sizes, strict=True)
        assert [s for s, n in mine if n > 1] == [s for s, n in theirs if n > 1]
        last = sum((n - 1) * s for n, s in zip(sizes, tensor.stride(), strict=True))
        assert spanned == 2 * (last + 1)


@pytest.mark.usefixtures("group_of_one")
def test_a_dtensor_is_described_by_its_local_tensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    local = torch.ones(3, 4)
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    assert describe([sharded, nn.Parameter(sharded)])[0][0] == local.data_ptr()
    for rows in (0, 1, 3):
        part = DTensor.from_local(
            torch.ones(rows, 4), mesh, [Shard(0)], shape=torch.Size((6, 4)), stride=(4, 1)
        )
        with pytest.raises(UnsupportedError, match=r"w \(DTensor\): .* on several ranks"):
            describe([part], ["w"])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (two_tensor, InvalidArgumentError, r"w \(TwoTensor\): its 32 bytes have no memory.*NULL"),
        (freed, InvalidArgumentError, r"w \(Tensor\): its 16 bytes have no memory"),
        (lambda: torch.empty(2, device="meta"), UnsupportedError, r"w \(Tensor\): .*meta"),
        (lambda: torch.eye(3).to_sparse(), UnsupportedError, r"w .*does not tell where"),
        (lambda: torch.empty(2, dtype=torch.bits8), UnsupportedError, r"w .*Bit types"),
        (lambda: torch.ones([1] * 7), UnsupportedError, r"w .*7 dimensions, at most 6"),
        (lambda: None, InvalidArgumentError, r"w \(NoneType\): not a torch tensor"),
        (lambda: b"bytes", InvalidArgumentError, r"w \(bytes\): not a torch tensor"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_name(
    make: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        describe([torch.ones(1), make()], ["first", "w"])  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(UnsupportedError, match=r"tensor 0 .*QInt"):
        describe([tensor])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=4),
            st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 4, 16, 64]),
)
def test_packed_bytes_are_those_of_contiguous_tensors(
    specs: list[tuple[list[int], str, bool]], alignment: int
) -> None:
    tensors = []
    for shape, dtype, transposed in specs:
        numel = torch.Size(shape).numel()
        kind = getattr(torch, dtype)
        data = torch.randint(0, 255, (numel * kind.itemsize,), dtype=torch.uint8)
        tensor = data.view(kind).reshape(shape) if numel else torch.empty(shape, dtype=kind)
        tensors.append(tensor.permute(list(range(len(shape)))[::-1]) if transposed else tensor)
    table = describe(tensors)
    starts, nbytes = table.offsets(alignment)
    assert all(start % alignment == 0 for start in starts)
    out = torch.full((nbytes + 1,), 0xA5, dtype=torch.uint8)
    expected = out.clone()
    pack(table, out.data_ptr(), nbytes, starts)
    for tensor, start in zip(tensors, starts, strict=True):
        flat = tensor.contiguous().flatten().view(torch.uint8)
        expected[start : start + flat.numel()] = flat
    assert torch.equal(out, expected)


def test_tables_differ_where_a_tensor_has_another_form() -> None:
    tensors = [torch.ones(2, 3), torch.ones(3, dtype=torch.int32), torch.ones(())]
    table = describe(tensors)
    assert table.differs(describe([torch.zeros_like(tensor) for tensor in tensors])) is None
    for place, other in ((0, torch.ones(3, 2).t()), (1, torch.ones(3)), (2, torch.ones(1))):
        changed = [*tensors[:place], other, *tensors[place + 1 :]]
        assert table.differs(describe(changed)) == place
    assert table.differs(describe(tensors[:2])) == 2
    with pytest.raises(TypeError, match="TensorTable"):
        table.differs([])  # type: ignore[arg-type]


def test_pack_refuses_what_does_not_fit() -> None:
    tensor = torch.ones(4)
    table = describe([tensor])
    out = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError):
        pack(table, out.data_ptr(), 16, [1])
    with pytest.raises(InvalidArgumentError, match="16 bytes, but the buffer has 15"):
        pack(table, out.data_ptr(), 15, [0])
    with pytest.raises(InvalidArgumentError, match="1 tensors but 2 offsets"):
        pack(table, out.data_ptr(), 16, [0, 0])
    assert not out.any()
    with pytest.raises(InvalidArgumentError, match="alignment 3"):
        table.offsets(3)


def test_what_is_not_where_a_table_says_is_found() -> None:
    tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(0), torch.ones(3, 3)]
    form = describe(tensors).form()
    assert form.moved(tensors) is None
    for place, change in (
        (0, lambda tensor: tensor.clone()),
        (1, lambda tensor: tensor.view(2, 2)),
        (1, lambda tensor: tensor.view(torch.int32)),
        (2, lambda tensor: torch.ones(1)),
        (3, lambda tensor: tensor.t()),
        (3, lambda tensor: tensor.to("meta")),  # lies nowhere
        (3, lambda tensor: "no tensor"),
    ):
        changed = [change(t) if i == place else t for i, t in enumerate(tensors)]
        assert form.moved(changed) == place, place
    with pytest.raises(InvalidArgumentError, match="3 tensors were given, but the table has 4"):
        form.moved(tensors[:3])


def test_a_form_describes_but_is_not_read() -> None:
    tensor = torch.ones(2, 3)
    form = describe([tensor]).form()
    row = (tensor.data_ptr(), "float32", (2, 3), (3, 1), 24)
    assert (len(form), form.nbytes, form[0]) == (1, 24, row)
    assert form.differs(describe([torch.zeros(2, 3)])) is None
    text = r"a table's form\(\) cannot be read"
    with pytest.raises(InvalidArgumentError, match=text):
        BufferTable.of(form)
    with pytest.raises(InvalidArgumentError, match=text):
        pack(form, tensor.data_ptr(), 24, [0])


def _some() -> list[torch.Tensor]:
    flat = torch.zeros(64)
    kinds = [torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6), flat[8:32].view(4, 6)]
    kinds += [torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(24, dtype=torch.uint8)]
    return [*kinds, nn.Parameter(torch.zeros(1, 24), requires_grad=False), torch.zeros(0, 3)]


def _rows(table: TensorTable) -> list[object]:
    return [table[index] for index in range(len(table))]


def _move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _share(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().share_memory_()


def _enlarge(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(4096)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "other memory": _move,
    "shared memory": _share,
    "a longer storage": _enlarge,
    "another offset": lambda tensor: tensor.set_(tensor.flatten()[1:]),
    "fewer elements": lambda tensor: tensor.resize_(3),
    "another shape": lambda tensor: setattr(tensor, "data", tensor.data.flatten()),
    "other strides": lambda tensor: setattr(tensor, "data", tensor.data.reshape(-1, 2).t()),
    "repeated elements": lambda tensor: setattr(tensor, "data", tensor.data[:1].expand(4, -1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", range(6))
def test_what_has_changed_since_a_former_table_is_described_anew(place: int, change: str) -> None:
    tensors = _some()
    form = describe(tensors).form()
    with torch.no_grad():
        CHANGES[change](tensors[place])
    assert _rows(describe(tensors, former=form)) == _rows(describe(tensors))


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_of_the_same_tensors_is_found_again_unless_one_has_changed(change: str) -> None:
    tensors = _some()[:-1]
    table = describe(tensors)
    assert describe([*tensors], former=table) is table
    assert describe([*tensors[:-1], tensors[-1][:]], former=table) is not table
    with torch.no_grad():
        CHANGES[change](tensors[3])
    assert describe(tensors, former=table) is not table
    assert _rows(describe(tensors, former=table)) == _rows(describe(tensors))


@pytest.mark.parametrize(
    "dtype", [d for name in DTYPES if (d := getattr(torch, name)).itemsize in (1, 2, 4, 8)]
)
def test_another_dtype_at_the_same_place_is_noticed(dtype: torch.dtype) -> None:
    others = [each for name in DTYPES if (each := getattr(torch, name)).itemsize == dtype.itemsize]
    tensor = torch.zeros(32, dtype=torch.uint8).view(dtype)
    form = describe([tensor]).form()
    for other in others:
        tensor.data = tensor.data.view(other)
        assert describe([tensor], former=form)[0] == describe([tensor])[0]


def test_checksums_are_of_one_contiguous_tensor_that_is_there() -> None:
    tensor = torch.ones(4, 4)
    for table in (
        describe([]),
        describe([tensor, tensor]),
        describe([tensor[:, 1:]]),
        describe([tensor]).form(),
    ):
        with pytest.raises(InvalidArgumentError):
            checksum(table)
