"""Which tensors of a model are quantised: by a checkpoint, or by lists."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import wsync
from wsync.layout import from_tensors
from wsync.quantise.config import Method, TensorFacts
from wsync.quantise.selection import Row, Selection, select
from wsync.trainer.quantise_option import config_of, select_quantised

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BLOCKS = Method.of(FP8)
INT4_WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32}


def int4(targets: list[str], **others: Any) -> dict[str, Any]:
    group = {"targets": targets, "weights": INT4_WEIGHTS}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        **others,
    }


def weights(*modules: str, shape: tuple[int, ...] = (64, 64)) -> list[TensorFacts]:
    return [TensorFacts(f"{module}.weight", "bfloat16", shape) for module in modules]


def chosen(found: Selection) -> list[str]:
    return [row.weight.name.removesuffix(".weight") for row in found.rows]


LINEAR = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "model.layers.0.self_attn.indexer.wk",
    "model.layers.0.linear_attn.in_proj_ba",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.mlp.experts.3.gate_proj",
    "model.layers.0.mlp.shared_expert.up_proj",
    "model.layers.0.mlp.fc",
)
KEPT = (
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert_gate",
    "model.layers.0.mlp.router",
    "model.layers.0.linear_attn.conv1d",
    "model.layers.0.self_attn.indexer.weights_proj",
    "model.layers.61.eh_proj",
    "model.visual.blocks.0.attn.qkv",
    "lm_head",
    *("score", "classifier", "v_head.summary", "value_head", "reward_head"),
    *("thinker.audio_tower.layers.0.fc1", "audio_model.proj", "mtp.fc", "model.mtp.fc"),
    "model.mtp_layers.0.input_proj",
)
# of LFM2, Kimi-Linear, GPT-2, T5, InternLM2 and towers
NO_LINEAR = (
    *("model.layers.0.self_attn.q_conv1d", "model.layers.0.short_conv"),
    *("transformer.wte", "transformer.wpe", "shared", "encoder.pos_emb"),
    *("block.0.SelfAttention.relative_attention_bias", "output", "language_model.output"),
    *("vision_encoder.layers.0.fc1", "model.speech_encoder.layers.0.fc1"),
)
# of LFM2, BERT and GPT-J, whose names have such parts
LIKE_THEM = (
    *("model.layers.0.conv.in_proj", "model.layers.0.shared.up_proj"),
    *("layer.0.attention.output", "h.0.wte_proj"),
)
BIASES = [
    TensorFacts("model.layers.0.self_attn.q_proj.bias", "bfloat16", (64,)),
    TensorFacts("model.layers.0.mlp.experts.gate_up_proj_bias", "bfloat16", (8, 64)),
    TensorFacts("model.norm.weight", "bfloat16", (64,)),
    TensorFacts("model.layers.0.linear_attn.A_log", "float32", (64,)),
]


def test_without_a_checkpoint_all_linear_layers_are_quantised() -> None:
    found = select(BLOCKS, [*weights(*KEPT, *LINEAR), *BIASES])
    assert chosen(found) == list(LINEAR)


def test_embeddings_and_convolutions_of_any_name_are_not_quantised() -> None:
    assert chosen(select(BLOCKS, weights(*NO_LINEAR, *LIKE_THEM))) == list(LIKE_THEM)
    convolution = weights("model.layers.0.conv.conv", "a.depthwise", shape=(64, 1, 3))
    stacked = weights("a.experts.up_proj", "a.block_sparse_moe.up_proj", shape=(2, 64, 64))
    found = select(BLOCKS, [*convolution, *stacked])
    assert chosen(found) == ["a.experts.up_proj", "a.block_sparse_moe.up_proj"]


def test_the_lists_of_the_configuration_keep_modules() -> None:
    method = Method.of(int4(["Linear"], ignore=["re:.*in_proj_ba", "re:.*experts.*"]))
    found = select(method, weights(*LINEAR))
    assert chosen(found) == [
        name for name in LINEAR if "in_proj_ba" not in name and "experts" not in name
    ]


# What Qwen3-30B-A3B-Thinking-2507-FP8 consists of: modules and shapes in a layer, of which those in
# capitals have scales, and what its configuration excepts.
PUBLISHED = {
    "input_layernorm": (2048,),
    "mlp.experts.0.DOWN_PROJ": (2048, 768),
    "mlp.experts.0.GATE_PROJ": (768, 2048),
    "mlp.experts.0.UP_PROJ": (768, 2048),
    "mlp.experts.127.DOWN_PROJ": (2048, 768),
    "mlp.experts.127.GATE_PROJ": (768, 2048),
    "mlp.experts.127.UP_PROJ": (768, 2048),
    "mlp.gate": (128, 2048),
    "post_attention_layernorm": (2048,),
    "self_attn.k_norm": (128,),
    "self_attn.K_PROJ": (512, 2048),
    "self_attn.O_PROJ": (2048, 4096),
    "self_attn.q_norm": (128,),
    "self_attn.Q_PROJ": (4096, 2048),
    "self_attn.V_PROJ": (512, 2048),
}
EXCEPTED = ("input_layernorm", "mlp.gate", "post_attention_layernorm")


def test_lists_and_scales_of_a_published_checkpoint_select_the_same() -> None:
    layers = [f"model.layers.{layer}." for layer in (0, 47)]
    method = Method.of(
        {
            **{"activation_scheme": "dynamic", "fmt": "e4m3", **FP8},
            "modules_to_not_convert": ["lm_head", *(p + m for p in layers for m in EXCEPTED)],
        }
    )
    model = weights("lm_head", "model.embed_tokens", shape=(151936, 2048))
    model += weights("model.norm", shape=(2048,))
    for prefix in layers:
        for module, shape in PUBLISHED.items():
            model += weights(prefix + module.lower(), shape=shape)
    stored = {p + m.lower() for p in layers for m in PUBLISHED if m != m.lower()}
    held = {fact.name for fact in model} | {f"{name}.weight_scale_inv" for name in stored}
    for found in (select(method, model), select(method, model, held)):
        assert set(chosen(found)) == stored and len(stored) == 20
        scales = {t.name: t.shape for t in found.tensors if t.name.endswith("_scale_inv")}
        assert scales["model.layers.47.mlp.experts.127.down_proj.weight_scale_inv"] == (16, 6)
        assert scales["model.layers.0.self_attn.o_proj.weight_scale_inv"] == (16, 32)


def test_targets_name_modules() -> None:
    method = Method.of(int4(["re:.*experts.*", "model.layers.0.mlp.down_proj"]))
    assert chosen(select(method, weights(*LINEAR))) == list(LINEAR[4:6])


def test_a_row_says_what_the_quantiser_needs() -> None:
    (fact,) = weights("a.b", shape=(200, 256))
    (row,) = select(BLOCKS, [fact]).rows
    assert row == Row(fact, BLOCKS.derived(fact), "")
    assert (row.derived.codes.name, row.derived.scales.name) == (
        fact.name,
        f"{fact.name}_scale_inv",
    )
    (row,) = select(Method.of(int4(["Linear"])), weights("a.b")).rows
    codes, scales, second, shape = row.derived
    assert (codes.name, scales.name) == ("a.b.weight_packed", "a.b.weight_scale")
    assert second is None and shape is not None and shape.name == "a.b.weight_shape"
    (row,) = select(Method.of({"quant_method": "nvfp4"}), weights("a.b")).rows
    codes, scales, second, shape = row.derived
    assert second is not None and second.name == "a.b.weight_scale_2" and shape is None


def test_a_checkpoint_without_any_scale_is_refused() -> None:
    with pytest.raises(wsync.LayoutError, match=r"fp8_block: .*the checkpoint has no _scale_inv"):
        select(BLOCKS, weights("a"), ["a.weight"])
    with pytest.raises(wsync.LayoutError, match="by the quantization_config, none"):
        select(BLOCKS, weights("lm_head"))


def test_shapes_that_a_method_cannot_take_are_named_before_anything_else() -> None:
    with pytest.raises(wsync.UnsupportedError, match=r"a\.weight \(8, 48\): int4: its 48 columns"):
        select(Method.of(int4(["Linear"])), weights("a", shape=(8, 48)))


FUSED = TensorFacts("model.layers.0.mlp.experts.gate_up_proj", "bfloat16", (4, 256, 128))


def test_stacked_experts_are_quantised_in_blocks_of_each() -> None:
    stacked = weights("model.layers.0.moe.up_proj", shape=(4, 256, 128))
    found = select(BLOCKS, stacked)
    assert [each.shape for each in found.tensors] == [(4, 256, 128), (4, 2, 1)]


def test_fused_experts_go_by_the_checkpoint_alone() -> None:
    found = select(BLOCKS, [FUSED], [FUSED.name, f"{FUSED.name}_scale_inv"])
    assert [each.name for each in found.tensors] == [FUSED.name, f"{FUSED.name}_scale_inv"]
    assert found.tensors[1].shape == (4, 2, 1)
    with pytest.raises(wsync.UnsupportedError, match=r"gate_up_proj \(4, 256, 128\): experts in"):
        select(BLOCKS, [FUSED, *weights("a")])
    kept = Method.of({**FP8, "ignored_layers": ["mlp.experts"]})
    assert chosen(select(kept, [FUSED, *weights("a")])) == ["a"]


def test_second_scales_are_shared_by_what_engines_fuse() -> None:
    names = [f"layers.0.mlp.experts.{e}.{m}" for e in "01" for m in ("gate_proj", "up_proj")]
    names += ["layers.0.mlp.experts.0.down_proj", "layers.1.experts.0.w3", "layers.1.experts.0.w1"]
    names += [f"layers.0.self_attn.{m}_proj" for m in "qkvo"] + ["layers.1.self_attn.q_proj"]
    nvfp4 = Method.of({"quant_method": "nvfp4"})
    shares = {
        row.weight.name.removesuffix(".weight"): row.share
        for row in select(nvfp4, weights(*names)).rows
    }
    assert shares == dict(
        zip(
            names,
            [
                *["layers.0.mlp.experts.0.gate_proj"] * 2,
                *["layers.0.mlp.experts.1.gate_proj"] * 2,
                *("", "layers.1.experts.0.w1", "layers.1.experts.0.w1"),
                *["layers.0.self_attn.q_proj"] * 3,
                *("", ""),  # o_proj, and a q_proj without the others
            ],
            strict=True,
        )
    )
    assert {row.share for row in select(BLOCKS, weights(*names)).rows} == {""}


@pytest.mark.parametrize(
    "pair",
    [
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        ("self_attn.index_q_proj", "self_attn.index_k_proj"),
    ],
)
def test_attentions_fused_layers_share_second_scales(pair: tuple[str, str]) -> None:
    """Engines take one of a fused layer's for all of its parts."""
    names = [f"model.layers.{n}.{each}" for n in (0, 1) for each in pair]
    nvfp4 = Method.of({"quant_method": "nvfp4"})
    shares = [row.share for row in select(nvfp4, weights(*names)).rows]
    assert shares == [f"model.layers.{n}.{pair[0]}" for n in (0, 0, 1, 1)]
    assert [row.share for row in select(nvfp4, weights(names[1])).rows] == [""]


def test_one_of_a_pair_that_stays_as_it_is_is_named() -> None:
    method = Method.of({"quant_method": "nvfp4", "ignore": ["a.up_proj"]})
    with pytest.raises(wsync.LayoutError) as error:
        select(method, weights("a.gate_proj", "a.up_proj"))
    assert str(error.value) == (
        "a.gate_proj.weight: it shares its second scale with a.up_proj.weight, which is not "
        "quantised"
    )


MODEL = {
    "model.layers.0.mlp.up_proj.weight": torch.zeros(256, 128, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(128, dtype=torch.bfloat16),
}
LAYOUT = from_tensors(MODEL).layout
CODES = {
    "model.layers.0.mlp.up_proj.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn),
    "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1),
    "model.norm.weight": torch.zeros(128, dtype=torch.bfloat16),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(CODES, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    return tmp_path


def test_a_quantised_checkpoint_is_compared_with_what_weights_become(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = select_quantised(LAYOUT, FP8, str(checkpoint))
    assert chosen(found) == ["model.layers.0.mlp.up_proj"]
    assert caplog.messages == []


def test_other_blocks_and_names_than_the_checkpoints_are_errors(checkpoint: Path) -> None:
    with pytest.raises(wsync.LayoutError) as error:
        select_quantised(LAYOUT, {**FP8, "weight_block_size": [64, 128]}, str(checkpoint))
    assert (
        "other shapes: model.layers.0.mlp.up_proj.weight_scale_inv ((2, 1) there, (4, 1) delivered)"
        in str(error.value)
    )
    more = from_tensors({**MODEL, "c.weight": torch.zeros(2, 2)}).layout
    with pytest.raises(wsync.LayoutError, match=r"not there: c\.weight"):
        select_quantised(more, FP8, str(checkpoint))


NAME = "model.layers.0.mlp.up_proj.weight"


def test_what_only_the_checkpoint_has_is_a_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3's FP8 checkpoints have scales in bfloat16, which engines read into float32."""
    scales = f"{NAME}_scale_inv"
    odd = {**CODES, scales: CODES[scales].bfloat16(), "other.weight": torch.zeros(1, 1)}
    save_file(odd, checkpoint / "model.safetensors")
    select_quantised(LAYOUT, FP8, str(checkpoint))
    assert caplog.messages == [f"{checkpoint} has other.weight, but the trainer does not"]


PACKED = {
    f"{NAME}_packed": torch.zeros(256, 16, dtype=torch.int32),
    f"{NAME}_scale": torch.ones(256, 4, dtype=torch.bfloat16),
    f"{NAME}_shape": torch.tensor([256, 128], dtype=torch.int32),
    "model.norm.weight": torch.zeros(128),
}
NVFP4 = {
    NAME: torch.zeros(256, 64, dtype=torch.uint8),
    f"{NAME}_scale": torch.ones(256, 8).to(torch.float8_e4m3fn),
    f"{NAME}_scale_2": torch.ones(()),
    "model.norm.weight": torch.zeros(128),
}


@pytest.mark.parametrize(
    ("config", "held", "suffix", "dtype", "text"),
    [
        (
            {"quant_method": "nvfp4"},
            NVFP4,
            "_scale_2",
            torch.float16,
            "(float16 there, float32 delivered)",
        ),
        (FP8, CODES, "", torch.float8_e5m2, "(float8_e5m2 there, float8_e4m3fn delivered)"),
        (FP8, CODES, "_scale_inv", torch.uint8, "(uint8 there, float32 delivered)"),
        (int4(["Linear"]), PACKED, "_packed", torch.float32, "(float32 there, int32 delivered)"),
        (int4(["Linear"]), PACKED, "_scale", torch.float32, "(float32 there, bfloat16 delivered)"),
    ],
)
def test_codes_and_scales_of_other_dtypes_are_errors(
    checkpoint: Path, config: Any, held: Any, suffix: str, dtype: torch.dtype, text: str
) -> None:
    """With a float32 trainer INT4 scales would be float32, too."""
    file, name = checkpoint / "model.safetensors", NAME + suffix
    save_file(held, file)
    select_quantised(LAYOUT, config, str(checkpoint))
    save_file({**held, name: held[name].to(dtype)}, file)
    with pytest.raises(wsync.LayoutError) as error:
        select_quantised(LAYOUT, config, str(checkpoint))
    assert f"other dtypes: {name} {text}" in str(error.value)


def test_a_checkpoint_that_cannot_be_read_does_not_leave_the_choice_to_lists(
    checkpoint: Path,
) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"short")
    with pytest.raises(wsync.LayoutError, match=r"model\.safetensors: .*header too small"):
        select_quantised(LAYOUT, FP8, str(checkpoint))


def test_the_checkpoint_says_how_it_is_quantised(checkpoint: Path) -> None:
    options = wsync.Options(quantise="checkpoint", checkpoint=str(checkpoint))
    assert config_of(options) == FP8
    assert config_of(wsync.Options(quantise=FP8)) == FP8
    assert config_of(wsync.Options(checkpoint=str(checkpoint))) is None
    (checkpoint / "config.json").write_text("{}")
    assert config_of(options) is None
    modelopt = {"quantization": {"quant_algo": "NVFP4"}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert config_of(options) == modelopt["quantization"]


WHOLE = {"model_type": "qwen3", "quantization_config": FP8 | {"producer": {"name": "other"}}}
UPDATERS = (
    *(wsync.UpdateWeightFromTensor, wsync.UpdateWeightFromDistributed),
    wsync.UpdateWeightFromDisk,
)


@pytest.mark.parametrize("config", ["checkpoint", FP8, WHOLE, {"text_config": WHOLE}])
@pytest.mark.parametrize("kind", UPDATERS)
def test_slimes_updaters_have_slimes_arithmetic(checkpoint: Path, kind: Any, config: Any) -> None:
    args = SimpleNamespace(hf_checkpoint=str(checkpoint), update_weight_disk_dir="versions")
    for given in ({"quantization_config": config}, {"options": wsync.Options(quantise=config)}):
        updater = kind(args, from_tensors(MODEL), None, model_name="any", **given)
        found = config_of(updater._options)
        assert found is not None
        assert Method.of(found).reciprocal


def test_a_checkpoint_that_cannot_say_it_is_named(checkpoint: Path) -> None:
    options = wsync.Options(quantise="checkpoint", checkpoint=str(checkpoint))
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(
        wsync.LayoutError, match=r"config\.json: expected a JSON object, not a list"
    ):
        config_of(options)
    (checkpoint / "config.json").unlink()
    with pytest.raises(wsync.SystemCallError, match=r"config\.json: No such file"):
        config_of(options)
    for folder in (None, ""):
        with pytest.raises(wsync.InvalidArgumentError, match=f"checkpoint={folder!r} names no"):
            config_of(wsync.Options(quantise="checkpoint", checkpoint=folder))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("fp8", "quantise='fp8' is not a quantization_config, 'checkpoint' or None"),
        (True, "quantise=True is no"),
        (["fp8"], r"quantise=\['fp8'\] is no"),
    ],
)
def test_other_choices_are_refused(value: Any, text: str) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        wsync.Options(quantise=value)
