"""What engines keep of the trainer's tensors, against all of them: loaders of SGLang and vLLM take
the part of a tensor that their parameter has room for, and never look at the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync import _core
from wsync.engine.learn.loader import RecordedLoader

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


def engine(*ranks: int, rows: int, name: str = "e", dtype: Any = None) -> ThreadEngine:
    """dtype: of the last rank, where it is another one."""
    modules = [Narrowing(rank, rows) for rank in ranks]
    modules[-1].to(dtype)
    made = ThreadEngine([RecordedLoader(module) for module in modules])
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
def test_an_engine_that_keeps_a_part_alone_is_named(
    engines: list[ThreadEngine], kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    updated(WEIGHTS, engines)
    text = f"engine e keeps only the first part of up (8, 4): dim 0: {kept}: it fills the rest"
    assert any(text in message for message in caplog.messages)


@pytest.mark.parametrize(
    "engines",
    [
        [engine(0, rows=8)],
        [engine(0, 1, rows=4), engine(0, rows=8)],
        [engine(1, rows=4)],  # what it fills itself, as a row of padding, is not cut off
        [engine(0, 1, rows=4, dtype=torch.bfloat16)],
    ],
)
def test_engines_that_keep_all_of_it_between_their_workers(
    engines: list[ThreadEngine], caplog: pytest.LogCaptureFixture
) -> None:
    updated(WEIGHTS, engines)
    assert not any("first part" in message for message in caplog.messages)


def test_which_tensors_layouts_have_in_part() -> None:
    def layout(dtype: str, *shards: tuple[str, list[int], list[int], list[int]]) -> _core.Layout:
        builder = _core.LayoutBuilder()
        builder.add_tensor("none", dtype, [3])
        for name, shape, start, extent in shards:
            steps = [2] if name in ("even", "odd", "both") else None
            strides = [4] * len(shape)
            builder.add_shard(name, dtype, shape, start, extent, 0, 0, strides, steps=steps)
        return builder.build()

    first = layout(
        "float32",
        ("whole", [4, 2], [0, 0], [2, 2]),
        ("first", [4, 2], [0, 0], [3, 2]),
        ("last", [4, 2], [1, 0], [3, 2]),
        ("corner", [4, 2], [1, 0], [3, 1]),
        ("even", [6], [0], [3]),
        ("odd", [6], [1], [3]),
        ("both", [6], [0], [3]),
        ("scalar", [], [], []),
    )
    second = layout(
        "bfloat16", ("whole", [4, 2], [2, 0], [2, 2]), ("both", [6], [1], [3]), ("o", [2], [1], [1])
    )
    assert _core.Layout.short([first, second]) == [
        ("first", (4, 2), 0, 0, 3),
        ("last", (4, 2), 0, 1, 4),
        ("corner", (4, 2), 0, 1, 4),
        ("corner", (4, 2), 1, 0, 1),
        ("even", (6,), 0, 0, 5),
        ("odd", (6,), 0, 1, 6),
        ("o", (2,), 0, 1, 2),
    ]
    assert _core.Layout.short([]) == []
    with pytest.raises(TypeError, match=r"a layout must be .*Layout.*, not .*int"):
        _core.Layout.short([first, 3])  # type: ignore[list-item]
