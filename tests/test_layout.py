"""Layouts: what a box, a map and a merge mean, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import box_in, one, patient, strides_of

from wsync import _core

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """A local parameter in regions of a full one, and maps from the full one to two tensors."""
    full = draw(shapes)
    regions = []
    local = [1] * len(full)
    for _ in range(draw(st.integers(1, 3))):
        start, extent = box_in(draw, full)
        first = tuple(draw(st.integers(0, 2)) for _ in full)
        local = [max(n, f + e) for n, f, e in zip(local, first, extent, strict=True)]
        regions.append((start, extent, first))
    strides, _ = strides_of(draw, local, 1)
    maps = []
    targets: dict[str, tuple[int, ...]] = {}
    for _ in range(draw(st.integers(1, 3))):
        source_start, source_extent = box_in(draw, full, least=1)
        used = draw(st.permutations(range(len(full))))[: draw(st.integers(0, len(full)))]
        axes = list(used)
        if len(axes) < 6 and draw(st.booleans()):
            axes.insert(draw(st.integers(0, len(axes))), -1)
        extent = [source_extent[axis] if axis >= 0 else 1 for axis in axes]
        start = [draw(st.integers(0, 2)) for _ in axes]
        name = f"t{len(targets)}"
        shape = tuple(s + e + draw(st.integers(0, 1)) for s, e in zip(start, extent, strict=True))
        targets[name] = shape
        maps.append((name, "", shape, start, source_start, extent, axes, 0))
    return {"strides": strides, "regions": regions, "maps": maps}


@patient
@given(parameters(), st.sampled_from(["bfloat16", "float32"]))
def test_composed_shards_are_where_the_oracle_puts_every_element(
    parameter: dict[str, Any], dtype: str
) -> None:
    builder = _core.LayoutBuilder(rank=3)
    count = builder.add_parameter("p", 5, dtype, **parameter)
    layout = builder.build()
    item = reference.ITEM_NBYTES[dtype]
    expected, expected_count = reference.compose(3, 5, item, **parameter)
    found = reference.elements(layout)
    assert count == expected_count
    assert {n: {i: sorted(a) for i, a in e.items()} for n, e in found.items()} == {
        n: {i: sorted(a) for i, a in e.items()} for n, e in expected.items()
    }
    assert layout.tensor_count == len(parameter["maps"])


@st.composite
def layouts(draw: st.DrawFn) -> _core.Layout:
    builder = _core.LayoutBuilder(draw(st.integers(0, 65535)))
    texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)
    names = draw(st.lists(texts, unique=True, max_size=4))
    for name in names:
        shape = draw(st.lists(st.integers(0, 2**19), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(sorted(reference.ITEM_NBYTES)))
        group = draw(st.integers(0, 2**32 - 1))
        builder.add_tensor(name, dtype, shape, group)
        for _ in range(draw(st.integers(0, 3))):
            start, extent = box_in(draw, shape)
            strides = [draw(st.integers(0, 2**30)) for _ in shape]
            builder.add_shard(
                name,
                dtype,
                shape,
                start,
                extent,
                draw(st.integers(0, 2**32 - 2)),
                draw(st.integers(0, 2**61)),
                strides,
                draw(st.sampled_from(["", "p", "\u00e4"])),
                group,
            )
    return builder.build()


def describe(layout: _core.Layout) -> list[Any]:
    count = layout.tensor_count
    return [(layout.tensor(i), layout.shards(i)) for i in range(count)]


@patient
@given(layouts())
def test_a_layout_survives_its_bytes(layout: _core.Layout) -> None:
    data = layout.to_bytes()
    copy = _core.Layout.from_bytes(data)
    assert describe(copy) == describe(layout)
    assert copy.to_bytes() == data
    assert (copy.nbytes, copy.rank_count, copy.shard_count) == (
        layout.nbytes,
        layout.rank_count,
        layout.shard_count,
    )
    last = layout.rank_count - 1
    assert last < 0 or copy.buffer_count(last) == layout.buffer_count(last) > 0


@patient
@given(layouts(), st.data())
def test_changed_bytes_are_refused_or_another_layout(
    layout: _core.Layout, data: st.DataObject
) -> None:
    wire = bytearray(layout.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(wire) - 1))
        wire[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not wire:
            break
    try:
        other = _core.Layout.from_bytes(bytes(wire))
    except _core.ProtocolError as error:
        assert str(error).startswith("byte ")
        assert int(str(error).split()[1].rstrip(":")) <= len(wire)
    else:
        assert _core.Layout.from_bytes(other.to_bytes()).to_bytes() == other.to_bytes()


def test_a_merge_is_the_union() -> None:
    merged = _core.Layout.merge([one(0), one(3, "a"), one(1), _core.LayoutBuilder(9).build()])
    assert merged.names() == ["up.weight", "a"]
    assert [shard[0] for shard in merged.shards(0)] == [0, 1]
    assert [shard[-1] for shard in merged.shards(0)] == ["rank 0", "rank 1"]
    assert (merged.rank_count, merged.shard_count, merged.nbytes) == (4, 3, 32)
    assert _core.Layout.merge([merged]).to_bytes() == merged.to_bytes()
    assert _core.Layout.merge([]).tensor_count == 0
    assert merged.buffer_count(2) == 0


@pytest.mark.parametrize(
    ("other", "mine", "theirs"),
    [
        ({"shape": (4, 3)}, "[4, 2]", "[4, 3]"),
        ({"shape": (4,)}, "[4, 2]", "[4]"),
        ({"dtype": "float32"}, "bfloat16", "float32"),
        ({"group": 9}, "group 0", "group 9"),
    ],
)
def test_a_merge_names_tensor_ranks_and_both_values(
    other: dict[str, Any], mine: str, theirs: str
) -> None:
    with pytest.raises(_core.LayoutError) as caught:
        _core.Layout.merge([one(0, "b"), one(4), one(7, **other)])
    first, second = str(caught.value).split(", rank 7 has ")
    assert first.startswith("up.weight: rank 4 has ")
    assert mine in first and theirs in second
    assert isinstance(caught.value, ValueError)


bad_calls: list[tuple[str, Callable[[_core.LayoutBuilder], object], type[Exception], list[str]]] = [
    (
        "box outside",
        lambda b: b.add_shard("w", "int16", (4,), (2,), (3,), 0, 0, (2,)),
        _core.InvalidArgumentError,
        ["w: dim 0", "start 2", "extent 3", "[4]"],
    ),
    (
        "dtype",
        lambda b: b.add_tensor("w", "float13", (4,)),
        _core.InvalidArgumentError,
        ["w: ", "'float13'"],
    ),
    (
        "shape",
        lambda b: b.add_tensor("w", "int16", (4, -1)),
        _core.InvalidArgumentError,
        ["w: ", "[4, -1]"],
    ),
    (
        "too many dimensions",
        lambda b: b.add_tensor("w", "int16", (1,) * 7),
        ValueError,
        ["shape", "7", "6"],
    ),
    (
        "unequal lengths",
        lambda b: b.add_shard("w", "int16", (4, 4), (0,), (4, 4), 0, 0, (8, 2)),
        ValueError,
        ["start", "1", "2"],
    ),
    (
        "offset",
        lambda b: b.add_shard("w", "int16", (4,), (0,), (4,), 0, -8, (2,)),
        _core.InvalidArgumentError,
        ["w: ", "offset"],
    ),
    (
        "buffer",
        lambda b: b.add_shard("w", "int16", (4,), (0,), (4,), -1, 0, (2,)),
        ValueError,
        ["buffer -1"],
    ),
    (
        "other shape",
        lambda b: (b.add_tensor("w", "int16", (4,)), b.add_tensor("w", "int16", (5,))),
        _core.LayoutError,
        ["w: ", "[4]", "[5]"],
    ),
    (
        "name with NUL",
        lambda b: b.add_tensor("w\0x", "int16", (4,)),
        ValueError,
        ["null character"],
    ),
    (
        "map twice from one axis",
        lambda b: b.add_parameter(
            "p",
            0,
            "int16",
            (2, 1),
            [((0, 0), (2, 2), (0, 0))],
            [("w", "", (2, 2), (0, 0), (0, 0), (2, 2), (0, 0), 0)],
        ),
        _core.InvalidArgumentError,
        ["p: w: ", "dim 1", "axis 0"],
    ),
    (
        "map axis",
        lambda b: b.add_parameter(
            "p",
            0,
            "int16",
            (1,),
            [((0,), (2,), (0,))],
            [("w", "", (2,), (0,), (0,), (2,), (1,), 0)],
        ),
        ValueError,
        ["w: ", "axis 1", "1 dimensions"],
    ),
    (
        "map out of the tensor",
        lambda b: b.add_parameter(
            "p",
            0,
            "int16",
            (1,),
            [((0,), (2,), (0,))],
            [("w", "", (2,), (1,), (0,), (2,), (0,), 0)],
        ),
        _core.InvalidArgumentError,
        ["p: w: dim 0", "start 1", "extent 2", "[2]"],
    ),
    (
        "region",
        lambda b: b.add_parameter("p", 0, "int16", (1,), [((0,), (2,))], []),  # type: ignore[list-item]
        TypeError,
        ["region"],
    ),
    (
        "map that is no tuple",
        lambda b: b.add_parameter("p", 0, "int16", (1,), [], ["w"]),  # type: ignore[list-item]
        TypeError,
        ["map", "'w'"],
    ),
    *(
        (f"NUL in {what}", call, _core.InvalidArgumentError, ["'a' has a null character"])
        for what, call in (
            ("a tensor", lambda b: b.add_tensor("a\0b", "int16", (1,))),
            ("a shard", lambda b: b.add_shard("a\0b", "int16", (), (), (), 0, 0, ())),
            ("an origin", lambda b: b.add_shard("a", "int16", (), (), (), 0, 0, (), "a\0b")),
            ("a parameter", lambda b: b.add_parameter("a\0b", 0, "int16", (1,), [], [])),
            (
                "a map",
                lambda b: b.add_parameter(
                    "p", 0, "int16", (1,), [], [("a\0b", "", (2,), (0,), (0,), (2,), (0,), 0)]
                ),
            ),
        )
    ),
    ("rank", lambda b: _core.LayoutBuilder(-1), ValueError, ["rank -1"]),
    (
        "rank too large",
        lambda b: _core.LayoutBuilder(65536).add_shard("w", "int16", (), (), (), 0, 0, ()),
        _core.InvalidArgumentError,
        ["w: rank 65536"],
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [case[1:] for case in bad_calls],
    ids=[case[0] for case in bad_calls],
)
def test_bad_input_is_named(
    call: Callable[[_core.LayoutBuilder], object], error: type[Exception], parts: list[str]
) -> None:
    builder = _core.LayoutBuilder()
    with pytest.raises(error) as caught:
        call(builder)
    assert [part for part in parts if part not in str(caught.value)] == []
    builder.build()


def test_described_tensors_become_whole_shards() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = [
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(5, 2).t(),
        torch.zeros(0, 7),
        torch.tensor(1.0),
    ]
    names = ["a", "b", "empty", "scalar"]
    builder = _core.LayoutBuilder(1)
    builder.add_tensors(names, _core.describe(tensors, names), [0, 4, 0, 0])
    layout = builder.build()
    assert layout.names() == names
    assert layout.tensor(1) == ("b", "float32", (2, 5), 4)
    assert layout.shards(0) == [(1, 0, 0, (0, 0), (3, 4), (8, 2), "a")]
    assert layout.shards(1) == [(1, 1, 0, (0, 0), (2, 5), (4, 8), "b")]
    assert layout.shards(2) == []
    assert layout.shards(3) == [(1, 3, 0, (), (), (), "scalar")]
    assert layout.nbytes == 24 + 40 + 4
