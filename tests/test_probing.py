"""What a load does with tensors, learnt from numbered ones and proved on random ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.probing.codes import base_of, decode, encode
from wsync.probing.learn import LearntLoad, Load, learn
from wsync.probing.lines import raw
from wsync.probing.numbering import Numbering, Source
from wsync.probing.probe import RaisedError

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DTYPES = [BF16, F32, FP8, torch.float16, torch.uint8, torch.float8_e8m0fnu, torch.int32]


def values(seed: int) -> Callable[[Source], torch.Tensor]:
    def make(source: Source) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sum(source.name.encode()))
        data = torch.rand(source.shape, generator=generator) * 100 + 1
        return data.to(torch.int32).to(source.dtype)

    return make


def learnt(load: Load, targets: list[torch.Tensor], sources: list[Source]) -> LearntLoad:
    return learn(load, targets, sources, {}, (values(1), values(2)))


def replay(
    found: LearntLoad, load: Load, targets: list[torch.Tensor], sources: dict[str, torch.Tensor]
) -> None:
    for piece, kept in found.constants.items():
        piece.view(targets).copy_(kept)
    for piece in found.pieces:
        piece.view(targets).copy_(piece.of(sources[piece.name]))
    if found.computed:
        load([(name, tensor) for name, tensor in sources.items() if name in found.computed])
    for copy in found.copies:
        copy.run(targets)


def held(targets: list[torch.Tensor]) -> list[bytes]:
    found = (target.contiguous().view(-1).view(torch.uint8) for target in targets)
    return [target.numpy().tobytes() for target in found]


def check(load: Load, targets: list[torch.Tensor], sources: list[Source]) -> LearntLoad:
    """A replay leaves what a load leaves, and asks for no element twice."""
    found = learnt(load, targets, sources)
    tensors = {source.name: values(3)(source) for source in sources}
    load([(name, tensor.clone()) for name, tensor in tensors.items()])
    wanted = held(targets)
    load([(source.name, values(4)(source)) for source in sources])
    replay(found, load, targets, tensors)
    assert held(targets) == wanted
    for source in sources:
        seen = torch.zeros(source.shape, dtype=torch.int64)
        for piece in found.pieces:
            if piece.name == source.name:
                piece.of(seen).add_(1)
        assert int(seen.max()) <= 1
    return found


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_target_may_hold_the_inverse_of_what_is_loaded(dtype: torch.dtype) -> None:
    """Memory that an earlier load has left so: the first load leaves what was there before it."""
    target = encode(torch.zeros(8, 4, dtype=torch.int64), dtype)
    raw(target).bitwise_not_()

    def load(pairs: Any) -> None:
        for _, tensor in pairs:
            target.copy_(tensor)

    (piece,) = check(load, [target], [Source("w", dtype, (8, 4))]).pieces
    assert piece.extent == (8, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digit_is_read_back_from_every_wider_dtype(dtype: torch.dtype) -> None:
    digits = torch.arange(base_of(dtype))
    made = encode(digits, dtype)
    assert torch.equal(decode(made), digits)
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert torch.equal(decode(made.to(F32)), digits)
        assert (decode(1 + made) == -1).all()
        assert (decode(-made) == -1).all()
    if dtype == F32:
        for narrower in (BF16, torch.float16):
            assert torch.equal(decode(made.to(narrower)), digits)


def test_qwens_largest_tensors_take_few_calls() -> None:
    names = [Source(f"{number}", BF16, (768, 2048)) for number in range(18_867)]
    sources = [*names, Source("embed", BF16, (151_936, 2048))]
    numbering = Numbering(sources, {})
    assert numbering.calls == 5
    tensors = [numbering.tensor(source, 2) for source in sources]
    assert all(tensor.untyped_storage().nbytes() < 1 << 20 for tensor in tensors)


def test_what_a_load_does_in_every_way() -> None:
    qkv, norm, plain = torch.ones(16, 6, dtype=BF16), torch.ones(6), torch.ones(6)
    embed, codes = torch.ones(24, 4), torch.ones(8, 8).to(FP8)
    second = torch.ones(8, 6, dtype=BF16)
    targets = [qkv, norm, plain, embed, codes, second]
    kept = plain[5].clone()

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            if name in ("q", "k", "v"):
                start, rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[name]
                qkv[start : start + rows].copy_(tensor)
            if name == "q":
                second.copy_(tensor.flip(0))
            if name == "norm":
                norm.copy_(1 + tensor)
                plain[:5].copy_(tensor[:5])
            if name in ("embed", "head"):
                embed[:20].copy_(tensor[20:])
                embed[20:].fill_(0)
            if name == "codes":
                codes.copy_(tensor.t())

    sources = [
        *(Source(name, BF16, (rows, 6)) for name, rows in (("q", 8), ("k", 4), ("v", 4))),
        Source("norm", F32, (6,)),
        *(Source(name, F32, (40, 4)) for name in ("embed", "head")),
        Source("codes", FP8, (8, 8)),
        Source("unused", BF16, (3,)),
    ]
    found = learnt(load, targets, sources)
    assert list(found.computed) == ["norm"]
    assert targets[found.computed["norm"].target] is norm
    assert {piece.name for piece in found.pieces} == {"q", "k", "v", "head", "codes"}
    assert {copy.target.target for copy in found.copies} == {5}
    assert [piece.offset for piece in found.constants] == [80]
    assert plain[5] == kept
    unwritten = [(piece.target, piece.offset, piece.extent) for piece in found.unwritten]
    assert unwritten == [(2, 5, (1,))]
    check(load, targets, sources)


def test_what_another_source_may_be_the_value_of_is_computed() -> None:
    """The larger one of two scales lies there, as it does where engines fuse them."""
    scale = torch.ones(3)

    def load(pairs: Any) -> None:
        given = dict(pairs)
        if "one" in given and "other" in given:
            scale.copy_(torch.maximum(given["one"], given["other"]))

    sources = [Source(name, F32, (3,)) for name in ("one", "other")]
    with pytest.raises(Exception, match="computes other values"):
        learnt(load, [scale], sources)


def test_a_load_that_takes_no_expanded_tensors_is_given_whole_ones() -> None:
    target = torch.ones(4, 6)

    def load(pairs: Any) -> None:
        for _, tensor in pairs:
            tensor += 0
            target.view(-1).copy_(tensor.view(-1))

    found = check(load, [target], [Source("a", F32, (4, 6))])
    assert len(found.pieces) == 1


def test_a_load_that_writes_to_what_it_is_given_and_in_threads() -> None:
    targets = [torch.ones(4, 6, dtype=BF16) for _ in range(8)]

    def put(number: int, tensor: torch.Tensor) -> None:
        targets[number].copy_(tensor)
        tensor.zero_()

    def load(pairs: Any) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda pair: put(int(pair[0]), pair[1]), pairs))

    found = check(load, targets, [Source(str(n), BF16, (4, 6)) for n in range(8)])
    assert len(found.pieces) == 8


def test_a_shape_is_given_as_it_is() -> None:
    """A load cuts what it unpacks by it."""
    target, shape = torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)

    def load(pairs: Any) -> None:
        given = dict(pairs)
        rows, columns = given["w.weight_shape"].tolist()
        shape.copy_(given["w.weight_shape"])
        target.copy_(given["w.weight_packed"][:rows, :columns])

    sources = [
        Source("w.weight_packed", F32, (8, 8)),
        Source("w.weight_shape", torch.int64, (2,)),
    ]
    real = {"w.weight_shape": torch.tensor([3, 4])}
    others = [lambda source, n=n: real.get(source.name, values(n)(source)) for n in (1, 2)]
    found = learn(load, [target, shape], sources, real, (others[0], others[1]))
    assert [piece.extent for piece in found.pieces] == [(3, 4)]
    assert [kept.tolist() for kept in found.constants.values()] == [[3, 4]]
    assert not found.computed


def test_an_error_of_a_load_leaves_what_it_has_not_written() -> None:
    target = torch.arange(6.0)

    def load(pairs: Any) -> None:
        raise ValueError("no such name")

    with pytest.raises(RaisedError, match="no such name"):
        learnt(load, [target], [Source("a", F32, (6,))])
    assert torch.equal(target, torch.arange(6.0))


@st.composite
def loads(draw: st.DrawFn) -> tuple[Load, list[torch.Tensor], list[Source]]:
    """Each source goes, cut or in another dtype, to a box of a target: all of these transposed, or
    none, as one line tells of all that have the same form."""
    sources: list[Source] = []
    puts: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = []
    targets = []
    for number in range(draw(st.integers(1, 3))):
        rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        width = draw(st.integers(1, 9))
        dtype = draw(st.sampled_from([BF16, F32]))
        padding = draw(st.integers(0, 2))
        target = torch.ones(sum(rows) + padding, width, dtype=dtype)
        targets.append(target)
        start, turned = 0, draw(st.booleans())
        for part, count in enumerate(rows):
            cut = draw(st.integers(0, 3))
            shape = (count + cut, width)
            sources.append(Source(f"{number}.{part}", BF16, shape[::-1] if turned else shape))

            def box(tensor: torch.Tensor, turned: bool = turned, cut: int = cut) -> torch.Tensor:
                return (tensor.t() if turned else tensor)[cut:]

            puts.append((f"{number}.{part}", box, target[start : start + count]))
            start += count

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            for other, box, place in puts:
                if other == name:
                    place.copy_(box(tensor))

    return load, targets, sources


@given(loads())
@settings(max_examples=60, deadline=None)
def test_boxes_are_found_whatever_their_sizes(
    case: tuple[Load, list[torch.Tensor], list[Source]],
) -> None:
    found = check(*case)
    assert not found.computed
