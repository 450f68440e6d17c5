"""A trainer's tensors against the names, shapes and dtypes of the model's checkpoint."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import wsync
from wsync import _core
from wsync.layout import from_tensors
from wsync.trainer.compare_checkpoint import compare

TENSORS = {"a.weight": torch.zeros(4, 2), "b.weight": torch.zeros(3)}


def model(tensors):
    return from_tensors(tensors).layout


@pytest.fixture
def checkpoint(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_the_same_tensors_say_nothing(checkpoint, caplog):
    caplog.set_level(logging.INFO)
    compare(model(TENSORS), checkpoint)
    assert caplog.messages == []


def test_unknown_names_and_other_shapes_are_errors(checkpoint):
    odd = {**TENSORS, "c.weight": torch.zeros(2), "b.weight": torch.zeros(4)}
    with pytest.raises(_core.LayoutError) as error:
        compare(model(odd), checkpoint)
    assert f"not those of {checkpoint}: it has no: c.weight; other shapes: b.weight (4,)" in str(
        error.value
    )


def test_what_only_the_checkpoint_has_and_other_dtypes_are_warnings(checkpoint, caplog):
    compare(model({"a.weight": TENSORS["a.weight"].bfloat16()}), checkpoint)
    assert caplog.messages == [
        f"only {checkpoint} has b.weight",
        f"{checkpoint} has another dtype of a.weight (float32, here bfloat16)",
    ]


def test_a_quantised_checkpoint_is_no_error(checkpoint, caplog):
    (checkpoint / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    compare(model({**TENSORS, "c.weight": torch.zeros(2)}), checkpoint)
    assert caplog.messages == [f"{checkpoint}, whose tensors are quantised: it has no: c.weight"]


CODES = {"a.weight": torch.zeros(4, 2, dtype=torch.float8_e4m3fn), "b.bias": torch.zeros(3)}
SCALES = {"a.weight_scale_inv": torch.ones(1, 1)}
NOTE = {"c.weight_shape": torch.zeros(2, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**CODES, **SCALES}, ""),
        (CODES, "only it has: a.weight_scale_inv"),
        (
            {**CODES, "a.weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8)},
            "other dtypes: a.weight_scale_inv (float32, here uint8)",
        ),
        (
            {**CODES, "a.weight_scale_inv": torch.ones(2, 1)},
            "other shapes: a.weight_scale_inv (2, 1) where it has (1, 1)",
        ),
        ({**CODES, "a.weight_scale": torch.ones(1)}, "it has no: a.weight_scale; only it has: a."),
        # the trainer does not quantise
        ({"a.weight": torch.zeros(4, 2), "b.bias": torch.zeros(3)}, ""),
    ],
)
def test_a_trainer_that_quantises_has_the_codes_and_scales_of_the_checkpoint(tmp_path, given, text):
    save_file({**CODES, **SCALES, **NOTE}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"fmt": "e4m3"}}))
    given = {**given, "c.weight_shape": torch.zeros(2, dtype=torch.int32)}
    if not text:
        compare(model(given), tmp_path)
        return
    with pytest.raises(_core.LayoutError) as error:
        compare(model(given), tmp_path)
    assert text in str(error.value)


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("codes", "scales"),
    [("float8_e5m2", "float32"), ("bfloat16", "float32"), ("float8_e4m3fn", "uint8")],
)
@pytest.mark.parametrize("name", [FUSED, "model.layers.0.mlp.down_proj.weight"])
def test_codes_and_scales_of_another_dtype_are_an_error(name, codes, scales, tmp_path):
    """Also those of experts in one parameter."""

    def weights(codes, scales):
        scaled = torch.ones(2, 1, 1, dtype=getattr(torch, scales))
        return {
            name: torch.zeros(2, 4, 4, dtype=getattr(torch, codes)),
            f"{name}_scale_inv": scaled,
        }

    save_file(weights(codes, scales), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"fmt": "e4m3"}}))
    with pytest.raises(_core.LayoutError, match=f"other dtypes: {name}"):
        compare(model(weights("float8_e4m3fn", "float32")), tmp_path)


def test_scales_of_fused_experts_that_the_trainer_lacks_are_an_error(tmp_path):
    codes = {FUSED: torch.zeros(2, 4, 4, dtype=torch.float8_e4m3fn)}
    save_file(codes | {f"{FUSED}_scale_inv": torch.ones(2, 1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(_core.LayoutError, match=f"only it has: {FUSED}_scale_inv"):
        compare(model(codes), tmp_path)


def test_a_quantised_layer_that_only_the_checkpoint_has_is_a_warning(tmp_path, caplog):
    """Trainers without MTP layers are compared with folders that have them."""
    made = CODES | SCALES
    layers = {f"model.layers.{n}.{name}": t.clone() for n in (0, 1) for name, t in made.items()}
    save_file(layers, tmp_path / "model.safetensors")
    one = {name: t for name, t in layers.items() if ".0." in name}
    compare(model(one), tmp_path)
    (text,) = caplog.messages
    assert text.startswith(f"only {tmp_path} has model.layers.1.")
    part = {name: t for name, t in layers.items() if name != "model.layers.1.a.weight_scale_inv"}
    with pytest.raises(_core.LayoutError, match=r"only it has: model\.layers\.1\.a\.weight_scale"):
        compare(model(part), tmp_path)


def test_a_folder_that_cannot_be_read_is_not_compared(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    compare(model(TENSORS), "some/name-on-the-hub")
    (checkpoint / "model.safetensors").write_bytes(b"short")
    compare(model(TENSORS), checkpoint)
    assert [m.split(":")[0] for m in caplog.messages] == [
        "some/name-on-the-hub has no safetensors files",
        "the trainer's names are not compared with a checkpoint",
    ]


def test_a_connection_compares_once_and_an_option_turns_it_off(checkpoint):
    weights = {**TENSORS, "c.weight": torch.zeros(2)}
    options = wsync.Options(checkpoint=str(checkpoint))
    with pytest.raises(_core.LayoutError, match=r"it has no: c\.weight"):
        wsync.connect(weights, [], options=options)
    with pytest.raises(_core.LayoutError, match=r"it has no: c\.weight"):
        wsync.DiskSync(weights, folder=checkpoint / "versions", options=options)
    unread = wsync.Options(checkpoint="")
    wsync.DiskSync(weights, folder=checkpoint / "versions", options=unread).close()
    args = SimpleNamespace(hf_checkpoint=checkpoint)
    updater = wsync.UpdateWeightFromTensor(args, from_tensors(weights), None, model_name="any")
    with pytest.raises(_core.LayoutError, match=r"it has no: c\.weight"):
        updater.connect_rollout_engines([])
    updater = wsync.UpdateWeightFromTensor(
        args, from_tensors(weights), None, model_name="any", options=unread
    )
    with pytest.raises(_core.InvalidArgumentError, match="no engines to connect to"):
        updater.connect_rollout_engines([])
    with pytest.raises(_core.InvalidArgumentError, match="checkpoint=3 is no text"):
        wsync.Options(checkpoint=3)
