"""Tensors that an engine keeps in one place: both are what the trainer has, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from support.workers import ThreadEngine

import wsync
from wsync._core import (
    BufferTable,
    InvalidArgumentError,
    Layout,
    LayoutBuilder,
    LayoutError,
    WsyncError,
    describe,
)
from wsync.engine.ring_loaders import LayoutLoader, ModuleLoader

OPTIONS = wsync.Options(deadline=20, progress=False, round_nbytes=64)
Tensors = dict[str, torch.Tensor]


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def module_of(**tensors: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, parameter(tensor))
    return module


def views(kind: str) -> torch.nn.Module:
    base = torch.zeros(6, 4)
    if kind == "rows":
        return module_of(a=base[:4], b=base[2:])
    if kind == "inside":
        return module_of(a=base, b=base[1:3, 1:3])
    assert kind == "interleaved"
    return module_of(a=base[:, ::2], b=base[:, 2:])


KINDS = ["rows", "inside", "interleaved"]


def weights_of(module: torch.nn.Module, value: float = 1.0) -> Tensors:
    return {
        name: torch.full(tensor.shape, value + number).to(tensor.dtype)
        for number, (name, tensor) in enumerate(module.state_dict().items())
    }


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_share_memory_are_refused_by_name(kind: str) -> None:
    module = views(kind)
    engine = ThreadEngine([ModuleLoader(module)])
    with wsync.connect(weights_of(module), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="a and b are kept in the same memory"):
            sync.update()
    assert engine.receivers[0].state.consistent  # nothing was written
    assert not any(tensor.any() for tensor in module.state_dict().values())


def test_parameters_that_lie_between_each_other_are_not_refused() -> None:
    base = torch.zeros(6, 4)
    module = module_of(a=base[:, ::2], b=base[:, 1::2])
    with wsync.connect(
        weights_of(module), engines=[ThreadEngine([ModuleLoader(module)])], options=OPTIONS
    ) as sync:
        sync.update()
    assert base[0].tolist() == [1.0, 2.0, 1.0, 2.0]


def test_parameters_that_come_to_share_memory_later_are_refused() -> None:
    module = module_of(a=torch.zeros(6, 4), b=torch.zeros(6, 4))
    engine = ThreadEngine([ModuleLoader(module)])
    with wsync.connect(weights_of(module), engines=[engine], options=OPTIONS) as sync:
        sync.update()
        base = torch.zeros(7, 4)
        module.get_parameter("a").data, module.get_parameter("b").data = base[:6], base[1:]
        with pytest.raises(WsyncError, match="a and b are kept in the same memory"):
            sync.update()
    assert not base.any()


def test_boxes_of_a_worker_that_share_memory_are_refused() -> None:
    base = torch.zeros(6, 4)
    tensors = [base[:4], base[2:]]
    loader = LayoutLoader(layout_of(tensors), tensors)
    weights = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        with pytest.raises(WsyncError, match="a and b are kept in the same memory"):
            sync.update()
    assert not base.any()


def box(dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Layout:
    """All of one tensor, in buffer 0."""
    builder = LayoutBuilder()
    builder.add_shard("a", dtype, shape, [0] * len(shape), shape, 0, offset, strides)
    return builder.build()


ROWS = (32, 4)
BYTES = torch.zeros(8, 32, dtype=torch.uint8)
MANY_WAYS: dict[str, tuple[Layout, torch.Tensor, Any]] = {
    "raw": (box("float32", (8, 8), ROWS), BYTES, lambda held: held.view(torch.float32)),
    "other shape": (box("float32", (8, 8), ROWS), torch.zeros(2, 4, 1, 8), lambda h: h.view(8, 8)),
    "kept transposed": (box("float32", (8, 8), (4, 32)), torch.zeros(8, 8), torch.Tensor.t),
    "a transpose": (box("float32", (8, 8), (4, 32)), torch.zeros(8, 8).t(), torch.clone),
    "columns": (box("float32", (8, 8), (80, 4)), torch.zeros(8, 20)[:, 2:10], torch.clone),
    "every other row": (box("float32", (8, 8), (64, 4)), torch.zeros(16, 8), lambda h: h[::2]),
    "rows of columns": (
        box("float32", (8, 8), (160, 4), 8),
        torch.zeros(16, 20)[:, :10],
        lambda held: held[::2, 2:],
    ),
}


@pytest.mark.parametrize("case", MANY_WAYS)
def test_boxes_lie_in_their_tensors_in_many_ways(case: str) -> None:
    layout, tensor, read = MANY_WAYS[case]
    weights = {"a": torch.arange(1.0, 65.0).view(8, 8)}
    loader = LayoutLoader(layout, [tensor])
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
    assert torch.equal(read(tensor), weights["a"])


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (lambda: torch.zeros(8, 8).t(), r"float32 \[8, 8\] with strides \[1, 8\]"),
        (lambda: torch.zeros(8, 12)[:, :8], r"float32 \[8, 8\] with strides \[12, 1\]"),
        (lambda: torch.zeros(8, 8, dtype=torch.float64), r"float64 \[8, 8\]"),
        (lambda: torch.zeros(4, 16), r"float32 \[4, 16\]"),
    ],
)
def test_a_layout_is_for_tensors_of_one_form(later: Any, said: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    loader = LayoutLoader(layout_of([parameter.data]), [parameter])
    weights = {"a": torch.arange(64.0).view(8, 8)}
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update()
        parameter.data = torch.zeros(8, 8)
        sync.update()
        assert torch.equal(parameter.data, weights["a"])
        parameter.data = later()
        with pytest.raises(WsyncError, match=said):
            sync.update()


def test_buffers_that_are_not_there_are_named() -> None:
    layout = layout_of([torch.zeros(4), torch.zeros(4)])
    with pytest.raises(InvalidArgumentError, match="1 spans for 2 buffers"):
        layout.check_apart(BufferTable([(4096, 16)]))
    layout.check_apart(BufferTable([(4096, 16), (4112, 16)]))
    with pytest.raises(LayoutError, match=r"a and b .* 0x100c"):
        layout.check_apart(BufferTable([(4096, 16), (4108, 16)]))


def layout_of(tensors: list[torch.Tensor]) -> Layout:
    builder = LayoutBuilder()
    builder.add_tensors(["a", "b"][: len(tensors)], describe(tensors))
    return builder.build()


def test_names_of_one_tensor_may_bring_the_same_values_and_no_others() -> None:
    module = module_of(a=torch.zeros(6, 4), c=torch.zeros(3))
    module.register_parameter("b", module.get_parameter("a"))
    engine = ThreadEngine([ModuleLoader(module)])
    values = torch.arange(24.0).view(6, 4)
    same = {"a": values, "b": values.clone(), "c": torch.ones(3)}
    with wsync.connect(same, engines=[engine], options=OPTIONS) as sync:
        sync.update(same)
        assert torch.equal(module.get_parameter("a"), values)
        with pytest.raises(WsyncError, match="b and a are one tensor of the module"):
            sync.update({**same, "b": values + 1})
        assert not engine.receivers[0].state.consistent
        sync.update(same)
        assert engine.receivers[0].state.consistent


@pytest.mark.parametrize("ffn", [3, 4])
def test_experts_whose_axes_a_module_has_turned(ffn: int) -> None:
    """As transformers 5 has Qwen3-VL-MoE's; gate_up_proj of 2 x 4 and 8 has one shape in both."""
    base, experts = "model.language_model.layers.0.mlp.experts", torch.nn.Module()
    for name, shape in {"gate_up_proj": (2, 2 * ffn, 8), "down_proj": (2, 8, ffn)}.items():
        experts.register_parameter(name, parameter(torch.zeros(shape)))
    module = experts
    for part in reversed(base.split(".")):
        module = torch.nn.ModuleDict({part: module})
    text = {"hidden_size": 8, "num_experts": 2, "moe_intermediate_size": ffn}
    module.config = transformers.Qwen3VLMoeConfig(text_config=text)
    sent = {n: torch.randn(t.mT.shape) for n, t in module.state_dict().items()}
    with wsync.connect(
        sent, engines=[ThreadEngine([ModuleLoader(module)])], options=OPTIONS
    ) as sync:
        sync.update()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, sent[name].mT)


def test_tensors_that_no_engine_makes_use_of_are_named(caplog: pytest.LogCaptureFixture) -> None:
    tensors = [torch.zeros(4, 4), torch.zeros(3)]
    loader = LayoutLoader(layout_of(tensors), tensors)
    weights = {
        "a": torch.ones(4, 4),
        "b": torch.ones(3),
        **{f"extra{number}": torch.ones(2) for number in range(6)},
        "empty": torch.ones(0),
    }
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        reports = [sync.update() for _ in range(2)]
    assert [report.unused for report in reports] == [tuple(f"extra{n}" for n in range(6))] * 2
    texts = [record.getMessage() for record in caplog.records if "no engine" in record.getMessage()]
    names = "extra0, extra1, extra2, extra3, extra4 and 1 more"
    assert texts == [f"wsync: no engine uses {names}: these tensors are not delivered"]
    assert torch.equal(tensors[0], weights["a"])
