"""Which of SGLang's layers are known to be rewritten after loading."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import wsync
from wsync import sglang
from wsync.sglang import rewritten


def layer(*shape: int) -> Any:
    """A layer as SGLang makes it: with a loader at every weight."""
    made: Any = torch.nn.Module()
    made.quant_method = SimpleNamespace()
    made.w13_weight = torch.nn.Parameter(torch.zeros(shape))
    made.w13_weight.weight_loader = lambda *_: None
    made.bias = torch.nn.Parameter(torch.zeros(2))
    return made


def swap(made: Any) -> None:
    made.w13_weight = torch.nn.Parameter(torch.zeros(3, 2))


def mark_scales(made: Any) -> None:
    made.w13_weight.format_ue8m0 = True


def pack(made: Any) -> None:
    made.use_intel_amx_backend = True


def mark_bytes(made: Any) -> None:
    made.scales = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    made.scales.format_ue8m0 = True


def mark_words(made: Any) -> None:
    made.scales = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)
    made.scales.format_ue8m0 = True


@pytest.mark.parametrize(
    ("columns", "facts", "cut"),
    [
        (384, {"input_size": 768, "input_size_per_partition": 384}, True),
        (384, {"input_size": 384, "input_size_per_partition": 384}, False),
        (1024, {"input_size": 2048, "input_size_per_partition": 1024}, False),
        (384, {"moe_tp_size": 2}, True),
        (384, {"moe_tp_size": 1}, False),
    ],
)
def test_words_of_scales_that_ranks_cut_are_named(
    columns: int, facts: dict[str, int], cut: bool
) -> None:
    words = -(-columns // 512)
    model: Any = torch.nn.Module()
    model.load_weights = lambda _: None
    model.layer = layer(8, columns)
    model.layer.w2_weight = model.layer.w13_weight
    del model.layer.w13_weight
    scales = torch.nn.Parameter(torch.zeros(8, words, dtype=torch.int32), requires_grad=False)
    model.layer.w2_weight_scale_inv = scales
    scales.format_ue8m0 = True  # type: ignore[attr-defined]
    scales.weight_loader = None  # type: ignore[attr-defined]
    vars(model.layer).update(facts)
    whole = {"layer.w2_weight_scale_inv": torch.zeros(8, 2 * words, dtype=torch.int32)}
    trainer = wsync.layout.from_tensors(whole).layout
    with pytest.raises(wsync.WsyncError) as error:
        sglang.SglangLoader(model).learn(trainer)
    text = "layer.w2_weight_scale_inv: each tensor-parallel rank has 384 columns, but a word"
    assert str(error.value).startswith(text) == cut


def empty(made: Any) -> None:
    made.w13_weight_g_idx = torch.nn.Parameter(torch.zeros(2, 0))


def pack_for_marlin(made: Any) -> None:
    made.is_marlin_converted = True


def interleave(made: Any) -> None:
    made.quant_method.w13_swiglu_interleaved = True


def cut_into_blocks(made: Any) -> None:
    made.quant_method.use_flashinfer_trtllm_moe = True


def can_restore(made: Any) -> None:
    made.quant_method.restore_weights_before_loading = lambda _: None
    cut_into_blocks(made)


@pytest.mark.parametrize(
    ("change", "shape", "reason"),
    [
        (swap, (2, 3), "experts.w13_weight: SimpleNamespace has replaced it after loading"),
        (mark_scales, (2, 3), "experts.w13_weight: its scales are packed as UE8M0"),
        (pack, (2, 3), "experts: its weights are packed for AMX"),
        (pack_for_marlin, (2, 3), "experts: its weights are packed for Marlin"),
        (interleave, (2, 3), "experts: its gate and up rows are interleaved"),
        (
            cut_into_blocks,
            (2, 3, 4),
            "experts: its weights are stored in blocks for flashinfer_trtllm",
        ),
        (
            can_restore,
            (2, 1, 3, 4),
            "experts: its weights are stored in blocks for flashinfer_trtllm",
        ),
    ],
)
def test_a_rewritten_layer_is_named(
    change: Callable[[Any], None], shape: tuple[int, ...], reason: str
) -> None:
    model = torch.nn.Module()
    model.experts = layer(*shape)
    assert rewritten(model) == ""
    change(model.experts)
    assert rewritten(model).startswith(reason)


@pytest.mark.parametrize("change", [mark_bytes, mark_words, empty])
def test_what_a_layer_is_made_with_is_as_it_was_loaded(change: Callable[[Any], None]) -> None:
    """Scales of MXFP8, those that DeepGEMM takes, which loaders take from then on, and the order of
    groups where there is none."""
    model = torch.nn.Module()
    model.experts = layer(2, 3)
    change(model.experts)
    assert rewritten(model) == ""


class Updater:
    def end_weight_update(self) -> None: ...


@pytest.mark.parametrize(("updater", "reason"), [(Updater, ""), (object, "replaced it after")])
def test_copies_of_scales_are_made_anew_where_a_session_ends(
    updater: type, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = sglang._UPDATER.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    monkeypatch.setattr(sys.modules[sglang._UPDATER], "WeightUpdater", updater, raising=False)
    model = torch.nn.Module()
    model.experts = layer(2, 3)
    model.experts.weight_scale_inv_swizzled = torch.nn.Parameter(torch.zeros(2, 2))
    assert reason in rewritten(model) and bool(reason) == bool(rewritten(model))


def test_blocks_that_sglang_has_undone_are_as_they_were_loaded() -> None:
    model = torch.nn.Module()
    model.experts = layer(2, 3, 4)
    can_restore(model.experts)
    assert rewritten(model) == ""
