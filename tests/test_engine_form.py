"""In which form engines without wsync's receiver hold weights against what they are sent, and codes
and scales against those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support.local_servers import Engine, Packing
from support.quantised_cases import METHODS, PER_TENSOR, blocks, quantised

import wsync
from wsync.handles.sglang_http import HttpHandle
from wsync.layout import from_tensors
from wsync.trainer.checkpoint_check import compare

REFUSAL = wsync.InvalidArgumentError
PLAIN: dict[str, Any] = {"model_type": "any"}
WEIGHTS = {"model.layers.0.mlp.x_proj.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}


def model(
    folder: Path, config: Any, name: str = "model", weights: dict[str, torch.Tensor] = WEIGHTS
) -> str:
    """A folder whose config.json has a quantization_config, or none."""
    made = folder / name
    made.mkdir()
    save_file(weights, made / "model.safetensors")
    facts = PLAIN if config is None else PLAIN | {"quantization_config": config}
    (made / "config.json").write_text(json.dumps(facts))
    return str(made)


def connect(engines: Any, quantise: Any, **options: Any) -> None:
    chosen = wsync.Options(quantise=quantise, progress=False, **options)
    wsync.connect(WEIGHTS, engines, options=chosen).close()


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "quantised": (blocks(128, 128), None, "fp8_block of 128 x 128.* delivered is not quantised"),
    "plain": (None, blocks(128, 128), "not quantised.* delivered is fp8_block of 128 x 128"),
    "block": (blocks(128, 128), blocks(8, 16), "of 128 x 128.* delivered is fp8_block of 8 x 16"),
    "method": (PER_TENSOR, METHODS["int4"][0], "fp8_tensor.* delivered is int4 of 1 x 16"),
    "unknown": ({"quant_method": "awq"}, None, "quant_method='awq'.* delivered is not quantised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_that_holds_another_form_is_refused(case: str, tmp_path: Path) -> None:
    config, quantise, text = REFUSED[case]
    path = model(tmp_path, config)
    with pytest.raises(REFUSAL, match=f"engine e: its weights are .*{text}") as error:
        connect([Engine(model_path=path)], quantise)
    assert path in str(error.value)
    options = wsync.Options(quantise=quantise, progress=False)
    with pytest.raises(REFUSAL, match=text):
        wsync.DiskSync(WEIGHTS, [Engine(model_path=path)], folder=tmp_path, options=options)


def test_what_an_engine_holds_is_compared_or_nothing_is_sent(tmp_path: Path) -> None:
    found = {"tp_size": 1, "model_path": model(tmp_path, blocks(128, 128))}
    answers = [(200, json.dumps(found)), *[(503, "no route")] * 2]
    with mock.patch.object(HttpHandle, "request", side_effect=lambda *_: answers.pop(0)):
        with pytest.raises(wsync.RemoteError, match="HTTP 503: no route"):
            connect(["http://127.0.0.1:1"], None)


@pytest.mark.parametrize("way", ["buckets", "disk"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_comes_again_in_another_form_is_refused(
    way: str, fails: bool, tmp_path: Path
) -> None:
    """fails: the update in which it went."""
    engine = Packing()
    engine.started["model_path"] = model(tmp_path, None)
    options = wsync.Options(progress=False, deadline=30.0)
    with (
        wsync.connect(WEIGHTS, [engine], options=options)
        if way == "buckets"
        else wsync.DiskSync(WEIGHTS, [engine], folder=tmp_path / "versions", options=options)
    ) as sync:
        sync.update()
        if fails:
            with mock.patch.object(engine, "flush_cache", side_effect=OSError("gone")):
                with pytest.raises(wsync.RemoteError, match="gone"):
                    sync.update()
        engine.calls.clear()
        engine.version = "default"
        engine.started["model_path"] = model(tmp_path, blocks(128, 128), "again")
        for _ in range(2):
            with pytest.raises(REFUSAL, match=r"fp8_block of 128 x 128.* delivered is not"):
                sync.update()
        # each time it is paused and sent nothing, so that it goes on
        assert engine.calls == ["continue"] * 2
        engine.started["model_path"] = model(tmp_path, None, "plain")
        sync.update()
        assert engine.calls[-1] == "continue"


@pytest.mark.parametrize(
    ("config", "quantise"),
    [
        (None, None),
        (blocks(8, 16), blocks(8, 16)),
        (METHODS["int4"][0] | {"producer": "other"}, METHODS["int4"][0]),
        (blocks(128, 128), blocks(128, 128) | {"scale_fmt": "ue8m0"}),
    ],
)
def test_one_that_holds_the_same_is_taken(
    config: Any, quantise: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(model_path=model(tmp_path, config), quantization=config and "fp8")
    connect([engine], quantise)
    assert caplog.messages == []


def test_arguments_of_the_server_are_read(tmp_path: Path) -> None:
    """verl starts SGLang so: the checkpoint is plain, and its configuration is overridden."""
    path = model(tmp_path, None)
    override = json.dumps({"quantization_config": blocks(8, 16)})
    engine = Engine(model_path=path, json_model_override_args=override, quantization="fp8")
    connect([engine], blocks(8, 16))
    with pytest.raises(REFUSAL, match="fp8_block of 8 x 16, by its json_model_override"):
        connect([engine], None)
    online = Engine(model_path=path, quantization="fp8", json_model_override_args="{}")
    for quantise in (None, PER_TENSOR):
        with pytest.raises(REFUSAL, match="quantised, when it loads them, by quantization='fp8'"):
            connect([online], quantise)
    quantising = Engine(model_path=path, quantization="fp8", load_format="flash_rl")
    connect([quantising], None)
    with pytest.raises(REFUSAL, match="not quantised, by load_format='flash_rl'"):
        connect([quantising], PER_TENSOR)


@pytest.mark.parametrize(
    "started",
    [
        {"enable_lora": True},
        {"enable_lora": True, "lora_target_modules": ["mlp.up_proj", "mlp.down_proj"]},
    ],
)
def test_experts_are_not_sent_where_adapters_rename_them(
    started: dict[str, Any], tmp_path: Path
) -> None:
    """SGLang wraps them, and its own load_weights passes over names that it does not find."""
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    weights = {name: torch.zeros(16, 64, dtype=torch.bfloat16)}
    with pytest.raises(wsync.UnsupportedError, match=r"engine e: .* LoRA \(enable_lora\)"):
        wsync.connect(weights, [Engine(**started)])
    with pytest.raises(wsync.UnsupportedError, match="LoRA"):
        wsync.DiskSync(weights, [Engine(**started)], folder=tmp_path)
    connect([Engine(**started)], None)  # dense layers keep their names
    wsync.connect(weights, [Engine(**started | {"enable_lora": False})]).close()


def test_plain_weights_for_a_quantised_checkpoint_are_refused(tmp_path: Path) -> None:
    """A stock engine that was started from it would keep the scales of other codes."""
    made = quantised(WEIGHTS, "one block")
    named = model(tmp_path, METHODS["one block"][0], weights=made)
    options = wsync.Options(checkpoint=named, progress=False)
    text = "engine a: its weights are fp8_block.* not quantised: .* without a message"
    with pytest.raises(REFUSAL, match=text):
        wsync.connect(WEIGHTS, [Engine("a"), Engine("b")], options=options)
    with pytest.raises(REFUSAL, match=text):
        wsync.DiskSync(WEIGHTS, [Engine("a")], folder=tmp_path, options=options)
    wsync.connect(made, [Engine()], options=options).close()
    wsync.DiskSync(WEIGHTS, folder=tmp_path / "versions", options=options).close()


@pytest.mark.parametrize(("method", "part"), [("one block", "_scale_inv"), ("int4", "_scale")])
def test_codes_without_scales_are_refused(method: str, part: str, tmp_path: Path) -> None:
    """A stock engine would keep the scales of other codes; one that loads a version has none."""
    made = quantised(WEIGHTS | {"other_proj.weight": torch.zeros(8, 64)}, method)
    lacking = {
        name: tensor for name, tensor in made.items() if not name.endswith(f"x_proj.weight{part}")
    }
    text = r"x_proj.weight(_packed)?: the trainer delivers codes, but no scales"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(lacking, [Engine()])
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.DiskSync(lacking, folder=tmp_path)
    wsync.connect(made, [Engine()]).close()


CONFIGS: dict[str, Any] = {
    "int4": METHODS["int4"][0],
    "mxfp8": {"quant_method": "mxfp8"},
    "nvfp4": {"quant_method": "nvfp4"},
    "blocks": METHODS["one block"][0],
}


def test_after_a_failure_weights_are_restored_again() -> None:
    """The engine may have been started anew."""
    engine = Packing()
    options = wsync.Options(quantise=CONFIGS["int4"], progress=False, stock_memory="host")
    with wsync.connect(WEIGHTS, [engine], options=options) as sync:
        with (
            mock.patch.object(engine, "update_weights_from_tensor", side_effect=ValueError("no")),
            pytest.raises(wsync.RemoteError),
        ):
            sync.update()
        sync.update()
    assert engine.calls == ["restore", "restore", "load", "pack", "continue"]


FP8 = torch.float8_e4m3fn
CODES = {"a.weight": torch.zeros(4, 2, dtype=FP8), "b.bias": torch.zeros(3)}
SCALES = {"a.weight_scale_inv": torch.ones(1, 1)}
NOTE = {"a.weight_shape": torch.zeros(2, dtype=torch.int64)}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
FUSED = {EXPERTS: torch.zeros(2, 4, 4, dtype=FP8), f"{EXPERTS}_scale_inv": torch.ones(2, 1, 1)}
PLAIN_WEIGHTS = {"a.weight": torch.zeros(4, 2), "b.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("there", "given", "text"),
    [
        (CODES | SCALES, CODES | SCALES, ""),
        (CODES | SCALES, CODES, "not delivered: a.weight_scale_inv"),
        (
            *(CODES | SCALES, CODES | {"a.weight_scale_inv": torch.ones(1, 1).byte()}),
            "other dtypes: a.weight_scale_inv (float32 there, uint8 delivered)",
        ),
        (
            *(CODES | SCALES, CODES | {"a.weight_scale_inv": torch.ones(2, 1)}),
            "other shapes: a.weight_scale_inv ((1, 1) there, (2, 1) delivered)",
        ),
        (CODES | SCALES, CODES | {"a.weight_scale": torch.ones(1)}, "not there: a.weight_scale;"),
        # the trainer does not quantise: what there are codes of is compared
        (CODES | SCALES, PLAIN_WEIGHTS, ""),
        (CODES | SCALES, PLAIN_WEIGHTS | {"c": torch.ones(1)}, "not there: c ("),
        (FUSED, FUSED, ""),
        (FUSED, {EXPERTS: FUSED[EXPERTS]}, f"not delivered: {EXPERTS}_scale_inv"),
        (FUSED | {EXPERTS: torch.zeros(2, 4, 4).bfloat16()}, FUSED, f"other dtypes: {EXPERTS}"),
        (FUSED | {EXPERTS: torch.zeros(2, 4, 4).to(torch.float8_e5m2)}, FUSED, "other dtypes"),
        # engines read scales of any floating-point dtype, and none of activations is delivered
        (CODES | {"a.weight_scale_inv": torch.ones(1, 1).bfloat16()}, CODES | SCALES, ""),
        (CODES | SCALES | {"a.input_scale": torch.ones(1)}, CODES | SCALES, ""),
    ],
)
def test_codes_and_scales_are_those_of_the_checkpoint(
    there: dict[str, torch.Tensor], given: dict[str, torch.Tensor], text: str, tmp_path: Path
) -> None:
    folder = model(tmp_path, PER_TENSOR, weights=there | NOTE)
    given = {**given, "a.weight_shape": torch.zeros(2, dtype=torch.int32)}
    if not text:
        assert compare(from_tensors(given).layout, folder, whole=True)
        return
    with pytest.raises(wsync.LayoutError) as error:
        compare(from_tensors(given).layout, folder, whole=True)
    assert text in str(error.value)


def test_what_engines_with_wsyncs_receiver_say_themselves_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that only the checkpoint has; of a method that is not known nothing is compared."""
    more = {"model.layers.1.weight": torch.ones(1, dtype=FP8)}
    folder = model(tmp_path, PER_TENSOR, weights=CODES | SCALES | more)
    assert compare(from_tensors(CODES | SCALES).layout, folder)
    assert caplog.messages == [f"{folder} has model.layers.1.weight, but the trainer does not"]
    caplog.clear()
    assert not compare([], model(tmp_path, {"quant_method": "gptq"}, "other"))
    (text,) = caplog.messages
    assert text.startswith("names, shapes and dtypes are not compared with a checkpoint: ")


def test_an_updater_of_slimes_compares_with_its_checkpoint(tmp_path: Path) -> None:
    path = model(tmp_path, None)
    updater = wsync.UpdateWeightFromTensor(
        SimpleNamespace(hf_checkpoint=path),
        from_tensors(WEIGHTS | {"c.weight": torch.zeros(2, 2)}),
        None,
        model_name="any",
    )
    with pytest.raises(wsync.LayoutError, match=r"not there: c\.weight"):
        updater.connect_rollout_engines([Engine(model_path=path)])
    with pytest.raises(REFUSAL, match="checkpoint=3 is not a path"):
        wsync.Options(checkpoint=3)  # type: ignore[arg-type]
