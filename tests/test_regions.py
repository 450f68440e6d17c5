"""Strided regions, compared with what element-by-element bookkeeping says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from wsync.engine.learn import regions
from wsync.engine.learn.regions import (
    Move,
    UnexpressedError,
    all_apart,
    boxes,
    compose,
    in_one_run,
    united,
    without,
)
from wsync.engine.learn.time_limit import learning

ITEM = 2
SIZES = [12, 24, 48, 72]


@st.composite
def views(draw: Any, count: int) -> torch.Tensor:
    """A view of a flat tensor of `count` elements."""
    view = torch.arange(count)
    for _ in range(draw(st.integers(0, 5))):
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        what = draw(st.sampled_from(["split", "narrow", "step", "transpose"]))
        if what == "split" and view.dim() < 5 and size % 2 == 0:
            view = view.unflatten(dim, (draw(st.sampled_from([2, size // 2])), -1))
        elif what == "narrow":
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif what == "step":
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
        else:
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
    return view


@st.composite
def pairs(draw: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    count = draw(st.sampled_from(SIZES))
    return count, draw(views(count)), draw(views(count))


def between(view: torch.Tensor, other: int, *, writes: bool, gap: int = 0) -> Move:
    """A move from (or to) a view of memory at 0, to (or from) memory at `other` that is contiguous,
    or has so many elements between each two rows."""
    strides = [
        math.prod(n + gap for n in view.shape[axis + 1 :]) * ITEM for axis in range(view.dim())
    ]
    mine = [stride * ITEM for stride in view.stride()]
    place = view.storage_offset() * ITEM
    if writes:
        dims = tuple(zip(view.shape, strides, mine, strict=True))
        return Move(other, place, dims, ITEM, ITEM)
    dims = tuple(zip(view.shape, mine, strides, strict=True))
    return Move(place, other, dims, ITEM, ITEM)


def elements(moves: list[Move]) -> dict[int, int]:
    """Destination -> source of every element."""
    found: dict[int, int] = {}
    for move in moves:
        for index in itertools.product(*(range(n) for n, _, _ in move.dims)):
            steps = list(zip(index, move.dims, strict=True))
            destination = move.destination + sum(i * d for i, (_, _, d) in steps)
            assert destination not in found
            found[destination] = move.source + sum(i * s for i, (_, s, _) in steps)
    return found


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_reading_what_was_written(drawn: tuple[int, torch.Tensor, torch.Tensor]) -> None:
    _, written, seen = drawn
    write, read = between(written, 10_000, writes=True), between(seen, 50_000, writes=False)
    moves, rest = compose(read, write)
    origin = elements([write])
    wanted = elements([read])
    assert elements(moves) == {d: origin[s] for d, s in wanted.items() if s in origin}
    assert elements(rest) == {d: s for d, s in wanted.items() if s not in origin}
    assert elements(without(read.reversed(), write)) == {
        s: d for d, s in wanted.items() if s not in origin
    }


@st.composite
def windows(draw: Any) -> tuple[int, torch.Tensor]:
    """Views whose rows may begin anywhere, and have elements in common."""
    count = draw(st.sampled_from(SIZES))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    hypothesis.assume(reach < count)
    start = draw(st.integers(0, count - 1 - reach))
    return count, torch.arange(count).as_strided(shape, strides, start)


def bytes_of(move: Move) -> set[int]:
    steps = itertools.product(*(range(0, n * d, d) if d else [0] for n, _, d in move.dims))
    return {move.destination + sum(each) + i for each in steps for i in range(move.into)}


@settings(max_examples=300, deadline=None)
@given(st.lists(windows(), min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 99))
def test_uniting_what_moves_write_to(
    drawn: list[tuple[int, torch.Tensor]], start: int, nbytes: int
) -> None:
    moves = [between(view, 10_000, writes=True) for _, view in drawn]
    found = united(moves)
    assert set().union(*map(bytes_of, found)) == set().union(*map(bytes_of, moves))
    runs = [move.span() for move in found if not move.dims]
    assert all(one[1] < two[0] for one, two in itertools.pairwise(runs))
    assert [move.dims for move in found[: len(runs)]] == [()] * len(runs)
    inside = any(low <= start and start + nbytes <= high for low, high in runs)
    assert in_one_run(found, start, start + nbytes) == inside


@settings(max_examples=300, deadline=None)
@example((48, torch.arange(48)[2:10].view(2, 4)), (-1, 8), 4)
@given(
    st.one_of(pairs().map(lambda drawn: drawn[::2]), windows()),
    st.sampled_from([(-1,), (-1, 4), (2, -1, 3), (1, -1, 6, 1)]),
    st.sampled_from([0, 4]),
)
def test_boxes_of_a_tensor(
    drawn: tuple[int, torch.Tensor], shape: tuple[int, ...], gap: int
) -> None:
    count, seen = drawn
    tensor = torch.arange(count).reshape(shape)
    read = between(seen, 50_000, writes=False, gap=gap)
    found: dict[int, int] = {}
    with learning(60.0):
        cells = boxes(read, 0, tensor.shape, ITEM)
    for box in cells:
        for index in itertools.product(*(range(n) for n in box.extent)):
            place = tuple(i + j for i, j in zip(index, box.start, strict=True))
            address = box.address + sum(i * s for i, s in zip(index, box.strides, strict=True))
            assert address not in found
            found[address] = int(tensor[place]) * ITEM
    assert found == elements([read])


def test_elements_of_other_sizes() -> None:
    read = Move(8, 100, ((4, 4, 4),), 4, 4)
    write = Move(1000, 0, ((16, 2, 2),), 2, 2)
    assert [(m.source, m.destination, m.dims) for m in compose(read, write)[0]] == [
        (1008, 100, ((8, 2, 2),))
    ]
    converting = Move(8, 100, ((4, 4, 2),), 4, 2)
    with pytest.raises(UnexpressedError, match="elements of 4 bytes read as 2"):
        compose(converting, write)


def test_too_many_parts_are_refused() -> None:
    strided = Move(0, 0, ((100_000, 6, 2),), 2, 2)
    with pytest.raises(UnexpressedError, match="boxes along one axis"):
        boxes(strided, 0, (300_000,), 2)


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_what_is_said_to_lie_apart_does(drawn: tuple[int, torch.Tensor, torch.Tensor]) -> None:
    _, one, other = drawn
    if all_apart([between(one, 1 << 20, writes=True), between(other, 1 << 21, writes=True)]):
        assert set(one.flatten().tolist()).isdisjoint(other.flatten().tolist())


def test_columns_and_rows_in_turn_are_told_apart_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them made learning take minutes: each pair was cut into its parts."""

    def cutting(*_: Any) -> Any:
        raise AssertionError("cut into parts")

    data = torch.arange(24 * 8).view(24, 8)
    moves = [
        [between(data[:, 2 * k : 2 * k + 2], 1 << 20, writes=True) for k in range(4)],
        [between(data[k::3], 1 << 20, writes=True) for k in range(3)],
        [between(data.view(4, 6, 8)[:, k : k + 2], 1 << 20, writes=True) for k in (0, 2, 4)],
        [between(data[:, k::2].t(), 1 << 20, writes=True) for k in range(2)],
    ]
    monkeypatch.setattr(regions, "cut", cutting)
    for kind in moves:
        assert all_apart(kind)
        for one, other in itertools.combinations(kind, 2):
            assert without(one, other) == [one] and without(other, one) == [other]
