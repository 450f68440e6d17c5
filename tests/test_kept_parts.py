"""What engines keep of the trainer's tensors, against all of them: loaders of SGLang and vLLM take
the part of a tensor that their parameter has room for, and never look at the rest."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync import _core
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(progress=False, deadline=60)


class Narrowing(torch.nn.Module):
    """One tensor-parallel worker, which cuts its rows out of what it is given."""

    def __init__(self, rank: int, rows: int) -> None:
        super().__init__()
        self._first = rank * rows
        self.up = torch.nn.Parameter(torch.zeros(rows, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            own = getattr(self, name)
            own.data.copy_(tensor.narrow(0, self._first, len(own)) if name == "up" else tensor)


def engine(*ranks: int, rows: int, name: str = "e") -> ThreadEngine:
    made = ThreadEngine([RecordedLoader(Narrowing(rank, rows)) for rank in ranks])
    made.name = name
    return made


def updated(weights: dict[str, torch.Tensor], engines: list[ThreadEngine]) -> None:
    with wsync.connect(weights, engines=engines, options=OPTIONS) as sync:
        sync.update()


WEIGHTS = {"up": torch.arange(32.0).reshape(8, 4), "norm": torch.ones(4)}


@pytest.mark.parametrize(
    ("engines", "kept"),
    [
        ([engine(0, rows=6)], "0:6 of 8"),
        ([engine(0, 1, rows=3)], "0:6 of 8"),
        ([engine(0, rows=4)], "0:4 of 8"),
        ([engine(0, rows=8, name="whole"), engine(0, rows=6)], "0:6 of 8"),
        ([engine(0, rows=4, name="e"), engine(0, rows=6, name="other")], "0:4 of 8"),
    ],
)
def test_an_engine_that_keeps_a_part_alone_is_refused(
    engines: list[ThreadEngine], kept: str
) -> None:
    text = rf"up \(8, 4\): dim 0: {kept} is all that engine e keeps of it"
    with pytest.raises(wsync.LayoutError, match=text):
        updated(WEIGHTS, engines)


@pytest.mark.parametrize(
    "engines",
    [
        [engine(0, rows=8)],
        [engine(0, 1, rows=4), engine(0, rows=8)],
        [engine(1, rows=4)],  # what it fills itself, as a row of padding, is not cut off
        [engine(0, rows=4), engine(1, rows=4)],  # each rank of one model an engine of its own
    ],
)
def test_engines_that_keep_all_of_it_between_their_workers(engines: list[ThreadEngine]) -> None:
    updated(WEIGHTS, engines)


def test_which_tensors_a_layout_has_in_part() -> None:
    builder = _core.LayoutBuilder()

    def add(
        name: str, shape: list[int], start: list[int], extent: list[int], **more: object
    ) -> None:
        strides = [4] * len(shape)
        builder.add_shard(name, "float32", shape, start, extent, 0, 0, strides, **more)

    add("whole", [4, 2], [0, 0], [2, 2])
    add("whole", [4, 2], [2, 0], [2, 2])
    add("first", [4, 2], [0, 0], [3, 2])
    add("last", [4, 2], [1, 0], [3, 2])
    add("column", [4, 2], [0, 0], [4, 1])
    add("even", [6], [0], [3], steps=[2])
    add("odd", [6], [1], [3], steps=[2])
    add("both", [6], [0], [3], steps=[2])
    add("both", [6], [1], [3], steps=[2])
    add("scalar", [], [], [])
    builder.add_tensor("none", "float32", [3])
    layout = builder.build()
    found = [(layout.tensor(index).name, *part) for index, *part in layout.short()]
    assert found == [
        ("first", 0, 0, 3),
        ("last", 0, 1, 4),
        ("column", 1, 0, 1),
        ("even", 0, 0, 5),
        ("odd", 0, 1, 6),
    ]
