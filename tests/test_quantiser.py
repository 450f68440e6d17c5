"""Quantisers of ranks that hold a tensor in pieces: together they make what is made of it whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import patient
from support import quantise_reference as reference
from torch import Tensor

from wsync import _core

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kind(NamedTuple):
    """A method's block, the codes in a word, and what it makes of a matrix."""

    block: tuple[int, int]
    codes: int
    make: Any


KINDS = {
    "fp8_block": Kind((16, 24), 1, lambda w: reference.fp8_block(w, (16, 24), reciprocal=False)),
    "fp8_ue8m0": Kind((16, 16), 1, lambda w: reference.fp8_ue8m0(w, (16, 16))),
    "fp8_tensor": Kind((0, 0), 1, reference.fp8_tensor),
    "int4": Kind((1, 16), 8, lambda w: reference.int4(w, 16)),
    "int4_slime": Kind((1, 16), 8, lambda w: reference.int4_slime(w, 16)),
    "mxfp8": Kind((1, 32), 1, reference.mxfp8),
    "nvfp4": Kind((1, 16), 2, reference.nvfp4),
    "fp8_packed": Kind((16, 8), 1, lambda w: reference.fp8_packed(w, (16, 8))),
}


def rule(kind: str, name: str = "w", share: int = 0) -> _core.QuantiseRule:
    rows, cols = KINDS[kind].block
    second = f"{name}_second" if kind == "nvfp4" else None
    shape = f"{name}_shape" if kind.startswith("int4") else None
    return (
        *(name, kind, False, rows, cols),
        *(f"{name}_codes", f"{name}_scales", second, shape, share, 7),
    )


class Rank:
    """One rank's part of matrices: boxes (start, extent) of each by name."""

    def __init__(self, rank: int, whole: dict[str, Tensor], boxes: dict[str, Any]) -> None:
        self.rank = rank
        builder = _core.LayoutBuilder(rank)
        self.parts: list[Tensor] = []
        for name, tensor in whole.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            for number, (start, extent) in enumerate(boxes.get(name, ())):
                place = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
                part = tensor[place].clone()
                if number % 2:  # stored transposed
                    part = part.mT.contiguous().mT
                strides = [stride * part.element_size() for stride in part.stride()]
                buffer = len(self.parts)
                builder.add_shard(name, dtype, tensor.shape, start, extent, buffer, 0, strides)
                self.parts.append(part)
        self.layout = builder.build()

    def begin(self, model: _core.Layout, rules: Sequence[_core.QuantiseRule]) -> None:
        self.quantiser = _core.Quantiser(model, self.rank, len(self.parts), rules)
        self.image = torch.zeros(self.quantiser.image_nbytes, dtype=torch.uint8)
        constants = self.quantiser.constants
        if constants:
            self.image[: len(constants)] = torch.frombuffer(bytearray(constants), dtype=torch.uint8)
        self.amaxes = torch.zeros(self.quantiser.amax_count)
        self.sources = _core.BufferTable.of(_core.describe(self.parts))
        self.results = _core.BufferTable.of(_core.describe([self.image, self.amaxes]))
        self.run(codes=False)

    def run(self, codes: bool) -> None:
        stream = _core.Stream(2)
        stream.quantise(self.quantiser, self.sources, self.results, codes)
        stream.synchronize(60.0)
        stream.close()

    def held(self, into: dict[str, Tensor]) -> None:
        """Writes what the rank made into whole tensors."""
        layout = self.quantiser.layout
        starts = [0, *self.quantiser.ends]
        for index in range(layout.tensor_count):
            info = layout.tensor(index)
            for shard in layout.shards(index):
                assert shard.buffer >= len(self.parts)
                dtype = getattr(torch, info.dtype)
                offset = starts[shard.buffer - len(self.parts)] + shard.offset
                item = dtype.itemsize
                flat = self.image[offset // item * item :]
                flat = flat[: flat.numel() // item * item].view(dtype)
                found = flat.as_strided(shard.extent, [s // item for s in shard.strides])
                whole = into.setdefault(info.name, torch.zeros(info.shape, dtype=dtype))
                place = tuple(
                    slice(a, a + n) for a, n in zip(shard.start, shard.extent, strict=True)
                )
                whole[place] = found


def quantise(ranks: Sequence[Rank], rules: Sequence[_core.QuantiseRule]) -> dict[str, Tensor]:
    """What the ranks make together."""
    model = _core.Layout.merge([rank.layout for rank in ranks])
    for rank in ranks:
        rank.begin(model, rules)
    amaxes = torch.stack([rank.amaxes for rank in ranks]).amax(0)
    made: dict[str, Tensor] = {}
    for rank in ranks:
        rank.amaxes.copy_(amaxes)
        rank.run(codes=True)
        rank.held(made)
    return made


def same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(
        found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    )


def cuts(draw: st.DrawFn, size: int, unit: int) -> list[tuple[int, int]]:
    """Ranges of a dimension, whose cuts are multiples of a unit."""
    places = list(range(unit, size, unit))
    chosen = sorted(draw(st.sets(st.sampled_from(places), max_size=2))) if places else []
    return [(a, b - a) for a, b in itertools.pairwise([0, *chosen, size])]


def matrix(shape: Sequence[int], dtype: torch.dtype, seed: int, odd: bool = False) -> Tensor:
    """Numbers of many magnitudes, subnormal ones and zeros of both signs among them.

    odd: and a few that are infinite or no numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    found = torch.randn(shape, generator=generator)
    found *= torch.pow(2.0, torch.randint(-30, 4, shape, generator=generator).float())
    found = found.to(dtype)
    least = torch.finfo(dtype).smallest_normal
    small = (torch.randn(shape, generator=generator) / 4 * least).to(dtype)
    rows = (torch.arange(shape[-2]) % 40 == 7)[:, None]  # one that has nothing else
    found = torch.where(some(0.1) | rows, small, found)
    found[some(0.05)] = 0.0
    found[some(0.05)] = -0.0
    for value in (torch.nan, torch.inf, -torch.inf) if odd else ():
        found[some(0.003)] = value
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[Rank], Tensor]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    codes, width = KINDS[kind].codes, KINDS[kind].block[1]
    rows = draw(st.integers(1, 70))
    whole_groups = KINDS[kind].block[0] == 1
    cols = draw(st.integers(1, 6)) * width if whole_groups else draw(st.integers(1, 90))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    whole = matrix((rows, cols), dtype, seed, draw(st.booleans()))
    unit = draw(st.sampled_from([codes, max(codes, width, 1), max(codes, 4 * width, 1)]))
    grid = itertools.product(
        cuts(draw, rows, draw(st.sampled_from([1, 16]))), cuts(draw, cols, unit)
    )
    boxes = [((a, c), (b, d)) for (a, b), (c, d) in grid]
    count = draw(st.integers(1, 3))
    held: list[list[Any]] = [[] for _ in range(count)]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)):
            held[rank].append(box)
    if codes == 1 and draw(st.booleans()):  # one that is cut otherwise
        extent = draw(st.integers(1, rows)), draw(st.integers(1, cols))
        held[-1].append(((0, 0), extent))
    return kind, [Rank(i, {"w": whole}, {"w": part}) for i, part in enumerate(held)], whole


@patient
@given(cases())
def test_ranks_make_together_what_is_made_of_the_whole(
    case: tuple[str, list[Rank], Tensor],
) -> None:
    kind, ranks, whole = case
    made = quantise(ranks, [rule(kind)])
    expected = KINDS[kind].make(whole)
    assert same(made.pop("w_scales"), expected.scale), kind
    assert same(made.pop("w_codes"), expected.codes), kind
    if kind == "nvfp4":
        assert same(made.pop("w_second"), expected.second)
    if kind.startswith("int4"):
        assert made.pop("w_shape").tolist() == list(whole.shape)
    assert not made


def test_tensors_of_one_number_share_the_second_scale() -> None:
    whole = {name: matrix((8, 32), torch.bfloat16, seed) for seed, name in enumerate("abc")}
    box = [((0, 0), (8, 32))]
    ranks = [Rank(0, whole, {"a": box, "c": box}), Rank(1, whole, {"b": box})]
    made = quantise(
        ranks, [rule("nvfp4", name, share) for name, share in zip("abc", (1, 1, 0), strict=True)]
    )
    both = torch.maximum(reference.amax_of(whole["a"]), reference.amax_of(whole["b"]))
    for name, amax in (("a", both), ("b", both), ("c", reference.amax_of(whole["c"]))):
        expected = reference.nvfp4(whole[name], amax)
        assert same(made[f"{name}_codes"], expected.codes)
        assert same(made[f"{name}_scales"], expected.scale)
        assert same(made[f"{name}_second"], expected.second)


def test_each_of_stacked_matrices_has_blocks_of_its_own() -> None:
    whole = matrix((3, 20, 30), torch.bfloat16, 1)
    boxes = [((0, 0, 0), (2, 20, 30)), ((2, 0, 0), (1, 9, 30)), ((2, 9, 0), (1, 11, 30))]
    ranks = [Rank(rank, {"w": whole}, {"w": [box]}) for rank, box in enumerate(boxes)]
    made = quantise(ranks, [rule("fp8_block")])
    for number in range(3):
        expected = reference.fp8_block(whole[number], (16, 24), reciprocal=False)
        assert same(made["w_codes"][number], expected.codes)
        assert same(made["w_scales"][number], expected.scale)


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ([rule("int4", "x")], _core.InvalidArgumentError, "x is to be quantised, but no rank"),
        ([rule("int4", "norm")], _core.UnsupportedError, "norm: it has 1 dimensions"),
        (
            [rule("int4", "ids")],
            _core.UnsupportedError,
            "ids: its dtype is int64, but only float32",
        ),
        ([rule("int4", "odd")], _core.UnsupportedError, "odd: rank 0 has columns 0 to 12 of 32"),
        (
            [rule("nvfp4", "stack")],
            _core.UnsupportedError,
            "stack: several matrices in one tensor cannot have second scales",
        ),
        ([("w", "fp9", *rule("int4")[2:])], _core.InvalidArgumentError, "is named 'fp9'"),
    ],
)
def test_what_cannot_be_quantised_is_named(rules: Any, error: type, text: str) -> None:
    whole = {
        "w": torch.zeros(4, 32),
        "norm": torch.zeros(4),
        "ids": torch.zeros(4, 32, dtype=torch.int64),
        "odd": torch.zeros(4, 32),
        "stack": torch.zeros(2, 8, 32),
    }
    boxes = {name: [((0,) * t.dim(), t.shape)] for name, t in whole.items()}
    boxes["odd"] = [((0, 0), (4, 12)), ((0, 12), (4, 20))]
    with pytest.raises(error, match=text):
        _core.Quantiser(Rank(0, whole, boxes).layout, 0, 6, rules)
