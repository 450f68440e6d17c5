"""Loaders that put two tensors into one place: both are the same to the bit, or it is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync._core import WsyncError
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=20, progress=False)
Tensors = dict[str, torch.Tensor]
Load = Callable[["Head", Tensors], None]


class Head(torch.nn.Module):
    """An embedding, padded, and a head that is tied to it."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.filler = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.head = self.embed
        self.copy = torch.zeros(8, 4)
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))


def common(module: Head, tensors: Tensors) -> None:
    module.embed[:6].copy_(tensors["embed"])
    module.embed[6:].fill_(0)
    module.filler.copy_(tensors["filler"])


def both(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.head[:6].copy_(tensors["head"])


def transposed(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.head[:6].t().copy_(tensors["head"].t().contiguous())


def also_elsewhere(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.copy[:6].copy_(tensors["embed"])
    module.head[:6].copy_(tensors["head"])


def by_a_copy(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.copy[:6].copy_(tensors["head"])
    module.head[:6].copy_(module.copy[:6])


def in_part(module: Head, tensors: Tensors) -> None:
    common(module, tensors)
    module.head[2:5, 1:3].copy_(tensors["head"][2:5, 1:3])


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(6, 4, generator=generator).bfloat16().float()
    return {
        "embed": embed,
        "head": embed.clone(),
        "filler": torch.randn(64, 64, generator=generator),
    }


@pytest.mark.parametrize("load", [common, both, transposed, also_elsewhere, by_a_copy, in_part])
@pytest.mark.parametrize("needed", [True, False])
def test_what_is_loaded_twice_is_compared_at_every_update(load: Load, needed: bool) -> None:
    module = Head(load)
    loader = RecordedLoader(module, needed=needed)
    engine = ThreadEngine([loader])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert torch.equal(module.embed[:6], draw(seed)["embed"])
        assert loader.reason == ""
        other = draw(3)
        other["head"][4, 2] += 1
        with pytest.raises(
            WsyncError, match=r"head: (embed and head|head and embed) are both loaded there"
        ):
            sync.update(other)
        assert not engine.receivers[0].consistent
        sync.update(draw(4))
        assert engine.receivers[0].consistent
    assert torch.equal(module.embed[:6], draw(4)["embed"])


def scaled(module: Head, tensors: Tensors) -> None:
    module.embed.copy_(torch.cat([tensors["embed"], tensors["embed"][:2]]) * 2)
    module.filler.copy_(tensors["filler"])
    module.head[:6].copy_(tensors["tail"])


def test_what_is_computed_and_then_written_over_is_refused() -> None:
    module = Head(scaled)
    tensors = draw(1)
    tensors["tail"] = tensors.pop("head")
    with wsync.connect(
        tensors, engines=[ThreadEngine([RecordedLoader(module)])], options=OPTIONS
    ) as sync:
        with pytest.raises(WsyncError, match=r"embed and tail are both loaded there"):
            sync.update()


def put_by_rows(place: torch.Tensor, value: torch.Tensor) -> None:
    for row in range(len(value)):
        place[torch.tensor([row])] = value[row]


def put_by_an_order(place: torch.Tensor, value: torch.Tensor) -> None:
    """Of which one row is there twice, which no movement does."""
    rows = torch.arange(len(value)).flip(0)
    place[torch.cat([rows, rows[-1:]])] = torch.cat([value.flip(0), value[:1]])


def put_by_columns(place: torch.Tensor, value: torch.Tensor) -> None:
    buffer = torch.zeros(2 * len(value), 2 * len(value[0]))[: len(value), : len(value[0])]
    place.copy_(buffer.copy_(value))


PUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "": lambda place, value: place.copy_(value),
    "several at once": lambda place, value: torch._foreach_copy_([place], [value]),
    "by an index": lambda place, value: place.index_copy_(0, torch.arange(len(value)), value),
    "by a mask": lambda place, value: place.__setitem__(torch.ones(len(value)) > 0, value),
    "by indices": put_by_rows,
    "by an order": put_by_an_order,
    "added to nothing": lambda place, value: place.zero_().add_(value),
    "added into it": lambda place, value: torch.add(value, 0, out=place),
    "by part of a buffer": put_by_columns,
    "over zeros": lambda place, value: place.zero_().copy_(value),
}

BUFFERS = ("a buffer", "a larger buffer", "by rows", "computed into one")


class Checking(torch.nn.Module):
    """A head that is tied to an embedding, and a load_weights that looks at values of some, or
    computes with them."""

    def __init__(self, looks: str, scale: float, part: int, way: str) -> None:
        super().__init__()
        flat = torch.zeros(32)
        self.embed = torch.nn.Parameter(flat[:24].view(6, 4), requires_grad=False)
        self.head = torch.nn.Parameter(flat[part : 24 + part].view(6, 4), requires_grad=False)
        self.filler = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        for each in ("spare", "spare_embed", "spare_tail"):
            self.register_buffer(each, torch.zeros(6, 4), persistent=False)
        self.looks, self.scale, self.way = looks, scale, way

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        buffer = torch.zeros(999 if self.way == "a larger buffer" else 24)[:24].view(6, 4)
        for name, tensor in pairs:
            if name in self.looks and not torch.isfinite(tensor).all():
                raise ValueError(name)
            target = "head" if name == "tail" else name
            value = tensor * self.scale if self.scale != 1 and name != "filler" else tensor
            if "buffer" in self.way and name != "filler":
                value = buffer.copy_(value)
            elif self.way == "by rows" and name != "filler":
                for place, row in enumerate(value):
                    buffer[place] = row
                value = buffer
            elif self.way == "computed into one" and name != "filler":
                value = torch.mul(value, 1, out=buffer)
            elif self.way == "by the module" and name != "filler":
                value = self.spare.copy_(value)
            elif self.way == "by parts of the module" and name != "filler":
                value = self.get_buffer(f"spare_{name}").copy_(value)
            PUTS.get(self.way, PUTS[""])(self.get_parameter(target), value)


def pairs_of(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of an axis meets each one of every other."""
    left = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(range(len(axes[one])), range(len(axes[other])))
    }
    every = [tuple(enumerate(case)) for case in itertools.product(*(range(len(a)) for a in axes))]
    found = []
    while left:
        best = max(every, key=lambda case: len(left.intersection(itertools.combinations(case, 2))))
        left.difference_update(itertools.combinations(best, 2))
        found.append(tuple(axes[axis][value] for axis, value in best))
    return found


NAMES = (("embed", "head"), ("head", "embed"), ("embed", "tail"))
LOOKS = ("embed", "head tail", "embed head tail", "embed filler tail")


@pytest.mark.parametrize(
    ("names", "scale", "part", "looks", "way"),
    pairs_of(NAMES, (1.0, 2.0), (0, 4), LOOKS, ("", *BUFFERS)),
)
def test_what_is_looked_at_and_loaded_twice_is_compared(
    names: tuple[str, str], scale: float, part: int, looks: str, way: str
) -> None:
    module = Checking(looks, scale, part, way)
    receivers = [RecordedLoader(module)]
    same = draw(1)["embed"] if part == 0 else torch.ones(6, 4)
    tensors = {**dict.fromkeys(names, same), "filler": draw(1)["filler"]}
    with wsync.connect(tensors, engines=[ThreadEngine(receivers)], options=OPTIONS) as sync:
        with contextlib.suppress(WsyncError):  # what cannot be compared may be refused
            sync.update()
            assert torch.equal(module.embed, same * scale)
        refused = "are both loaded there|are one tensor of the module|are kept in the same memory"
        with pytest.raises(WsyncError, match=refused):
            sync.update({**tensors, names[1]: same + 1})


@pytest.mark.parametrize(
    ("looks", "scale", "part", "way"),
    pairs_of(("", "embed tail"), (1.0, 2.0), (0, 4), tuple(PUTS)),
)
def test_what_is_put_twice_is_compared(looks: str, scale: float, part: int, way: str) -> None:
    names = ("embed", "tail")
    test_what_is_looked_at_and_loaded_twice_is_compared(names, scale, part, looks, way)


@pytest.mark.parametrize("names", [("embed", "tail"), ("tail", "embed")])
@pytest.mark.parametrize("looks", ["", "embed tail"])
@pytest.mark.parametrize("way", ["", "by an index", "added to nothing", "by part of a buffer"])
def test_equal_tensors_that_bring_others_of_their_elements_to_one_place_are_refused(
    names: tuple[str, str], looks: str, way: str
) -> None:
    module = Checking(looks, 1.0, 4, way)
    same = draw(1)["embed"]
    tensors = {**dict.fromkeys(names, same), "filler": draw(1)["filler"]}
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="are both loaded there"):
            sync.update()


SEVERAL = [torch.cat, torch.stack, torch._foreach_mul, torch._foreach_add]


@pytest.mark.parametrize("several", SEVERAL)
def test_what_is_computed_of_several_at_once_is_compared(several: Any) -> None:
    def load(module: Head, tensors: Tensors) -> None:
        if "filler" in tensors:
            module.filler.copy_(tensors["filler"])
        module.embed[6:].fill_(0)
        both = [tensors[name] for name in ("embed", "head") if name in tensors]
        assert all(tensor.isfinite().all() for tensor in both)
        if both and several is torch.cat:
            both = list(torch.cat(both).split(6))
        elif both and several is torch.stack:
            both = list(torch.stack(both, 1).unbind(1))
        elif both:
            both = several(both, 2.0 if several is torch._foreach_mul else torch.tensor(1.0))
        for tensor in both:
            module.embed[:6].copy_(tensor)

    module, tensors = Head(load), draw(1)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        expected = {
            torch._foreach_mul: 2 * tensors["embed"],
            torch._foreach_add: 1 + tensors["embed"],
        }
        assert torch.equal(module.embed[:6], expected.get(several, tensors["embed"]))
        with pytest.raises(WsyncError, match="are both loaded there"):
            sync.update({**tensors, "head": tensors["head"] + 1})


@pytest.mark.parametrize("looks", [False, True])
def test_equal_tensors_that_lie_shifted_in_one_parameter_are_refused(looks: bool) -> None:
    def load(module: Head, tensors: Tensors) -> None:
        if "filler" in tensors:
            module.filler.copy_(tensors["filler"])
        for name in tensors.keys() - {"filler"}:
            assert not looks or tensors[name].isfinite().all()
        for name, rows in (("embed", slice(0, 6)), ("tail", slice(2, 8))):
            if name in tensors:
                module.embed[rows].copy_(tensors[name])

    tensors = draw(1)
    tensors["tail"] = tensors.pop("head")
    engine = ThreadEngine([RecordedLoader(Head(load))])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="embed and tail are both loaded there"):
            sync.update()


def test_equal_tensors_may_come_by_one_part_of_the_module() -> None:
    def load(module: Head, tensors: Tensors) -> None:
        module.filler.copy_(tensors["filler"])
        for name in ("embed", "head"):
            module.copy[:6].copy_(tensors[name])
            module.embed[:6].copy_(module.copy[:6])

    module = Head(load)
    engine = ThreadEngine([RecordedLoader(module, ignore=["embed", "head"])])
    with wsync.connect(draw(1), engines=[engine], options=OPTIONS) as sync:
        module.embed[6:].fill_(0)
        sync.update()
        assert torch.equal(module.embed[:6], draw(1)["embed"])
        other = draw(2)
        with pytest.raises(WsyncError, match="are both loaded there"):
            sync.update({**other, "head": other["head"] + 1})


def test_rows_that_an_index_puts_are_learnt() -> None:
    """By integers that do not follow each other, by a mask, and along another dimension."""
    order = torch.tensor([4, 0, 1, 5])

    def load(module: Head, tensors: Tensors) -> None:
        module.filler.copy_(tensors["filler"])
        module.embed[order] = tensors["embed"][:4]
        module.embed[torch.tensor([False, False, True, True] + 4 * [False])] = tensors["embed"][4:]
        module.copy.index_copy_(1, torch.tensor([3, 0]), tensors["tail"])
        module.copy[6:, torch.tensor([1, -2])] = 7

    module, expected = Head(load), Head(load)
    tensors = {**draw(1), "tail": torch.rand(8, 2)}
    del tensors["head"]
    loader = RecordedLoader(module, ignore=["embed"])
    module.embed.data.zero_()
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
    assert loader.recording is not None and not loader.recording.fallback
    expected.load_weights(list(tensors.items()))
    assert torch.equal(module.embed, expected.embed)
    assert torch.equal(module.copy, expected.copy)


def test_an_index_of_many_columns_is_as_good_as_computed() -> None:
    """Over what is filled before, it would be more parts than are worth a plan."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))

    def load(module: Head, tensors: Tensors) -> None:
        if "large" in tensors:
            module.large.copy_(tensors["large"])
        if "filler" in tensors:
            module.filler.zero_()
            module.filler[:, order] = tensors["filler"]

    module = Head(load)
    module.large = torch.nn.Parameter(torch.zeros(128, 128), requires_grad=False)
    loader = RecordedLoader(module, ignore=["embed", "head"])
    tensors = {"filler": draw(1)["filler"], "large": torch.ones(128, 128)}
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
    assert loader.recording is not None and loader.recording.fallback.keys() == {"filler"}
    assert torch.equal(module.filler[:, order], tensors["filler"])


def by_bytes(module: Head, tensors: Tensors) -> None:
    """A mask in the form of torch before 1.2: of bytes, which are no numbers of rows."""
    module.embed[torch.tensor([0, 1, 1, 0, 0, 0, 0, 0], dtype=torch.uint8)] = tensors["embed"][:2]


def by_a_short_mask(module: Head, tensors: Tensors) -> None:
    module.embed[torch.tensor([True, False])] = tensors["embed"][:1]


def by_broadcast(module: Head, tensors: Tensors) -> None:
    module.embed.index_copy_(0, torch.arange(6), tensors["embed"][:1])


def by_a_negative(module: Head, tensors: Tensors) -> None:
    module.embed.index_copy_(0, torch.tensor([-1]), tensors["embed"][:1])


def by_values(module: Head, tensors: Tensors) -> None:
    """Rows that one tensor says; then others, of which it may have said some."""
    if "embed" in tensors:
        module.embed[tensors["embed"].abs().sum(1).argsort()[:3]] = tensors["embed"][:3]
    if "tail" in tensors:
        module.embed[3:].copy_(tensors["tail"])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("load", [by_bytes, by_a_short_mask, by_broadcast, by_a_negative])
def test_an_index_that_torch_refuses_or_takes_for_another_is_no_row(load: Load) -> None:
    def all_of_it(module: Head, tensors: Tensors) -> None:
        common(module, tensors)
        load(module, tensors)

    module, expected = Head(all_of_it), Head(all_of_it)
    tensors = {name: draw(1)[name] for name in ("embed", "filler")}
    try:
        expected.load_weights(list(tensors.items()))
    except (IndexError, RuntimeError) as error:
        text = str(error).split(" (")[0][:40]
    else:
        text = ""
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        if text:
            with pytest.raises(WsyncError) as caught:
                sync.update()
            assert text in str(caught.value)
        else:
            sync.update()
            assert torch.equal(module.embed, expected.embed)


def test_rows_that_a_tensor_says_are_not_taken_for_those_of_made_up_values() -> None:
    def load(module: Head, tensors: Tensors) -> None:
        if "filler" in tensors:
            module.filler.copy_(tensors["filler"])
        by_values(module, tensors)

    tensors = {**draw(1), "tail": torch.rand(5, 4)}
    del tensors["head"]
    module, expected = Head(load), Head(load)
    engine = ThreadEngine([RecordedLoader(module, ignore=["embed"])])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        for seed in range(1, 6):
            tensors["embed"] = draw(seed)["embed"]
            try:
                sync.update(tensors)
            except WsyncError as error:
                assert "are both loaded there" in str(error)
                continue
            expected.embed.zero_()
            expected.load_weights(list(tensors.items()))
            assert torch.equal(module.embed[3:], expected.embed[3:])


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [4, 5, 2, 3]])
def test_rows_that_the_module_says_may_change_places_only(looks: bool, order: list[int]) -> None:
    def load(module: Head, tensors: Tensors) -> None:
        if "filler" in tensors:
            module.filler.copy_(tensors["filler"])
        if "four" in tensors:
            assert not looks or tensors["four"].isfinite().all()
            module.embed[module.order + 1 - 1] = tensors["four"]
        if "rest" in tensors:
            module.embed[4:].copy_(tensors["rest"])

    module, expected = Head(load), Head(load)
    module.order = expected.order = torch.arange(4)
    tensors = {"filler": torch.rand(64, 64), "four": torch.rand(4, 4), "rest": torch.rand(4, 4)}
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        module.order.copy_(torch.tensor(order))
        try:
            sync.update()
        except WsyncError:
            assert order != [3, 2, 1, 0] or not looks
        else:
            expected.load_weights(list(tensors.items()))
            assert torch.equal(module.embed, expected.embed)


@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("way", ["by the module", "by parts of the module"])
def test_what_comes_by_another_part_of_the_module_is_compared(part: int, way: str) -> None:
    test_what_is_looked_at_and_loaded_twice_is_compared(
        ("embed", "tail"), 1.0, part, "embed tail", way
    )


def test_of_what_is_computed_from_two_tensors_one_of_them_may_replace_a_part() -> None:
    def load(module: Head, tensors: Tensors) -> None:
        if "filler" in tensors:
            module.filler.copy_(tensors["filler"])
        if "head" in tensors:
            module.embed[6:].fill_(0)
            module.head[:6].copy_(tensors["embed"] * tensors["head"])
            module.head[:2].copy_(tensors["embed"][:2])

    module = Head(load)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
    assert loader.recording is not None
    assert loader.recording.fallback.keys() == {"embed", "head"}
    expected = draw(1)["embed"] * draw(1)["head"]
    expected[:2] = draw(1)["embed"][:2]
    assert torch.equal(module.head[:6], expected)


def test_a_copy_of_one_part_is_compared_with_a_tensor_that_lies_in_another() -> None:
    """Where both lie in one storage, only the part that was copied is in question."""

    def load(module: Head, tensors: Tensors) -> None:
        common(module, {"embed": tensors["embed"], "filler": tensors["filler"]})
        module.pair[:6].copy_(tensors["embed"])
        module.pair[6:].copy_(tensors["tail"])
        module.copy[:6].copy_(module.pair[6:])
        module.copy[:6].copy_(tensors["embed"])

    module = Head(load)
    module.pair = torch.zeros(12, 4)
    tensors = draw(1)
    tensors["tail"] = tensors.pop("head")
    loaders = [RecordedLoader(module)]
    with wsync.connect(tensors, engines=[ThreadEngine(loaders)], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match=r"tail and embed are both loaded there"):
            sync.update()


def test_what_a_loader_makes_of_one_tensor_is_its_own_matter() -> None:
    def load(module: Head, tensors: Tensors) -> None:
        module.embed.fill_(7)
        common(module, tensors)
        module.embed[0].fill_(5)
        module.embed[1].copy_(tensors["embed"][2])

    module = Head(load)
    loader = RecordedLoader(module)
    tensors = draw(1)
    del tensors["head"]
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
    assert loader.recording is not None and not loader.recording.twins
    assert torch.equal(module.embed[1], draw(1)["embed"][2])


def test_what_is_compared_can_be_inspected() -> None:
    loader = RecordedLoader(Head(in_part))
    facts: dict[str, Any] = {}
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        facts = loader.facts()
    assert facts["twins"]
    assert {box["into"] for tensor in facts["tensors"] for box in tensor["boxes"]} == {
        "embed",
        "filler",
    }


# --- what the trainer lacks -------------------------------------------------------------------


def fused(module: Head, tensors: Tensors) -> None:
    for name, rows in (("embed", slice(0, 6)), ("more", slice(6, 8))):
        if name in tensors:
            module.embed[rows].copy_(tensors[name])
    if "filler" in tensors:
        module.filler.copy_(tensors["filler"])


def opaque(module: Head, tensors: Tensors) -> None:
    fused(module, {name: tensor * 2 for name, tensor in tensors.items()})


LACKING = {
    "whole": (fused, ["embed", "more"], r"filler \(16384 of its 16384 bytes\)"),
    "part": (fused, ["embed", "filler"], r"embed \(32 of its 128 bytes\)"),
    "opaque": (opaque, ["filler"], r"embed \(128 of its 128 bytes\)"),
}


@pytest.mark.parametrize("kind", LACKING)
@pytest.mark.parametrize("way", ["refused", "ignore", "variable"])
def test_a_parameter_that_the_trainer_lacks_is_refused_unless_it_is_to_stay(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, names, text = LACKING[kind]
    if way == "variable":
        monkeypatch.setenv("WSYNC_KEEP", "embed, filler")
    every = {**draw(1), "more": torch.ones(2, 4)}
    tensors = {name: every[name] for name in names}
    module = Head(load)
    loader = RecordedLoader(module, ignore=["embed", "fill*"] if way == "ignore" else [])
    engine = ThreadEngine([loader])
    with wsync.connect(tensors, engines=[engine], options=OPTIONS) as sync:
        if way == "refused":
            for _ in range(2):
                with pytest.raises(WsyncError, match=text):
                    sync.update(version=3)
            assert engine.version is None
            return
        sync.update(version=3)
    assert bool(loader.reason) == (kind == "opaque")
    other = Head(load)
    other.load_weights(list(tensors.items()))
    for name in names:
        part = "filler" if name == "filler" else "embed"
        rows = slice(6, 8) if name == "more" else slice(0, 6) if name == "embed" else slice(None)
        assert torch.equal(getattr(module, part)[rows], getattr(other, part)[rows])


@pytest.mark.parametrize("load", [fused, opaque])
def test_a_pattern_lets_no_part_of_a_parameter_stay(load: Load) -> None:
    """With the other part it would be neither the old one nor the new one."""
    loader = RecordedLoader(Head(load), ignore=["f*", "e*"])
    tensors = {"embed": draw(1)["embed"]}
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match=r"embed \(32 of its 128 bytes, of which 'e\*' lets"):
            sync.update()
    loader = RecordedLoader(module := Head(load), ignore=["*"])
    tensors = {"filler": draw(1)["filler"]}
    with wsync.connect(tensors, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
    assert not module.embed.any() and module.filler.all()


class Scaled(torch.nn.Module):
    """Has a weight as it is, and one that it computes of that and of a number."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.a, self.c, self.filler = (
            torch.nn.Parameter(torch.zeros(size, size), requires_grad=False) for size in (8, 8, 64)
        )
        self.register_buffer("scale", torch.ones(()))
        self.number = 1.0
        self.kept = kept  # an attribute that what is computed goes by

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        number = self.number if self.kept else 1.0
        for name, tensor in pairs:
            getattr(self, name).copy_(tensor)
            if name == "scale":
                number = tensor.item()
        if self.kept:
            self.number = number
        self.c.copy_(self.a * number)


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_computed_of_a_number_and_a_weight_is_not_loaded_twice(kept: bool) -> None:
    module = Scaled(kept)
    loader = RecordedLoader(module)

    def weights(number: int) -> Tensors:
        shapes = {"a": (8, 8), "filler": (64, 64)}
        found = {name: torch.full(shape, float(number)) for name, shape in shapes.items()}
        return {**found, "scale": torch.tensor(float(number + 1))}

    with wsync.connect(weights(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for number in range(1, 4):
            given = weights(number)
            sync.update(given)
            assert torch.equal(module.a, given["a"])
            assert torch.equal(module.c, given["a"] * (number + 1))
            assert torch.equal(module.scale, given["scale"])
    assert (loader.recording is None) == kept
    if loader.recording is not None:
        assert loader.recording.fallback.keys() == {"a", "scale"}
