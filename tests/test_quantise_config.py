"""quantization_config: what published checkpoints say, what is refused, what tensors become."""

from typing import Any

import pytest
import torch

import wsync
from wsync import _core
from wsync.quantise.config import Method, Modules, TensorFacts

DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V31 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
QWEN3_30B_A3B_FP8 = {
    **DEEPSEEK_V3,
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp.gate",
        "model.layers.0.post_attention_layernorm",
    ],
}
QWEN3_NEXT_FP8 = {
    **DEEPSEEK_V3,
    "modules_to_not_convert": [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.linear_attn.conv1d",
        "model.layers.0.linear_attn.in_proj_ba",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "mtp.fc",
    ],
}
GLM_45_FP8 = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "type": "float"},
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head", "model.layers.1.mlp.gate"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
INT4_WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **others,
    }


KIMI_K2_THINKING = compressed(
    INT4_WEIGHTS,
    ignore=[
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
)
LLM_COMPRESSOR = compressed(
    {
        **INT4_WEIGHTS,
        "group_size": 128,
        "actorder": "weight",
        "observer": "mse",
        "scale_dtype": None,
        "zp_dtype": "torch.int8",
    },
    global_compression_ratio=None,
    ignore=["lm_head"],
    sparsity_config={},
    transform_config={},
    version="0.12.2",
)
# of 2024: it also counts zeros
LLM_COMPRESSOR_DENSE = compressed(
    {**INT4_WEIGHTS, "group_size": 128},
    global_compression_ratio=1.883165566487463,
    ignore=["lm_head"],
    sparsity_config={
        "format": "dense",
        "global_sparsity": 0.14297135853065746,
        "ignore": ["model.layers.0.self_attn.o_proj"],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
    },
)
FP4 = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
NVFP4 = {
    "config_groups": {"group_0": {"input_activations": FP4, "targets": ["Linear"], "weights": FP4}},
    "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
NVFP4_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "exclude_modules": ["lm_head"],
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "quant_algo": "NVFP4",
    },
}
MXFP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "ignored_layers": ["lm_head", "model.embed_tokens"],
    "quant_method": "mxfp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [1, 32],
}
SLIME = {"producer": {"name": "slime"}}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (DEEPSEEK_V3, Method("fp8_block", 128, 128)),
        (DEEPSEEK_V31, Method("fp8_ue8m0", 128, 128)),
        (LLM_COMPRESSOR_DENSE, Method("int4", 1, 128, kept=("lm_head",))),
        (
            QWEN3_30B_A3B_FP8,
            Method(
                *("fp8_block", 128, 128),
                kept=tuple(QWEN3_30B_A3B_FP8["modules_to_not_convert"]),
            ),
        ),
        (
            QWEN3_NEXT_FP8,
            Method("fp8_block", 128, 128, kept=tuple(QWEN3_NEXT_FP8["modules_to_not_convert"])),
        ),
        (KIMI_K2_THINKING, Method("int4", 1, 32, kept=tuple(KIMI_K2_THINKING["ignore"]))),
        (LLM_COMPRESSOR, Method("int4", 1, 128, kept=("lm_head",))),
        (NVFP4, Method("nvfp4", 1, 16, kept=tuple(NVFP4["ignore"]))),
        (NVFP4_FILE, Method("nvfp4", 1, 16, kept=("lm_head",))),
        ({"quant_method": "nvfp4", "ignore": "lm_head"}, Method("nvfp4", 1, 16, kept=("lm_head",))),
        (MXFP8, Method("mxfp8", 1, 32, kept=("lm_head", "model.embed_tokens"))),
        ({"quant_method": "mxfp8"}, Method("mxfp8", 1, 32)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Method("fp8_tensor", 0, 0)),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, Method("fp8_block", 64, 32)),
        (DEEPSEEK_V3 | SLIME, Method("fp8_block", 128, 128, reciprocal=True)),
        (DEEPSEEK_V31 | SLIME, Method("fp8_ue8m0", 128, 128)),
        (DEEPSEEK_V3 | {"transform_ue8m0": False}, Method("fp8_block", 128, 128)),
        (DEEPSEEK_V3 | {"transform_ue8m0": True}, Method("fp8_packed", 128, 128)),
        (DEEPSEEK_V31 | SLIME | {"transform_ue8m0": True}, Method("fp8_packed", 128, 128)),
        (LLM_COMPRESSOR | SLIME, Method("int4_slime", 1, 128, kept=("lm_head",))),
    ],
)
def test_the_configurations_of_published_checkpoints(
    config: dict[str, Any], method: Method
) -> None:
    assert Method.of(config) == method
    if config is not NVFP4_FILE:
        model = {"model_type": "any", "hidden_size": 8}
        assert Method.of({**model, "quantization_config": config}) == method
        assert Method.of({**model, "text_config": {"quantization_config": config}}) == method


def test_a_list_has_either_name() -> None:
    both = {"ignored_layers": ["a", "b"], "modules_to_not_convert": ["b", "c"]}
    assert Method.of({"quant_method": "fp8"} | both).kept == ("a", "b", "c")
    empty = {"ignored_layers": [], "modules_to_not_convert": "a"}
    assert Method.of({"quant_method": "mxfp8"} | empty).kept == ("a",)
    assert Method.of(NVFP4 | {"ignore": None, "exclude_modules": ["a"]}).kept == ("a",)


def group(**weights: Any) -> dict[str, Any]:
    return compressed({**INT4_WEIGHTS, **weights})


def with_group(**others: Any) -> dict[str, Any]:
    found = compressed(INT4_WEIGHTS)
    found["config_groups"]["group_0"].update(others)
    return found


def two_groups(size: int) -> dict[str, Any]:
    found = compressed(INT4_WEIGHTS)
    second = {"targets": ["re:.*down_proj"], "weights": {**INT4_WEIGHTS, "group_size": size}}
    found["config_groups"]["group_1"] = second
    return found


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quant_method": "awq", "bits": 4},
            "quant_method='awq': wsync knows only compressed-tensors, fp8, modelopt, modelopt_fp4, "
            "mxfp8, nvfp4",
        ),
        ({"quant_method": "gptq"}, "quant_method='gptq': wsync knows only"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes': wsync knows only"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4': wsync knows only"),
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "fmt='e5m2': wsync knows only None or 'e4m3'"),
        (
            DEEPSEEK_V3 | {"activation_scheme": "static"},
            "activation_scheme='static': wsync knows only None or 'dynamic'",
        ),
        (DEEPSEEK_V3 | {"scale_fmt": "e8m0"}, "scale_fmt='e8m0': wsync knows only None or 'ue8m0'"),
        (
            DEEPSEEK_V31 | {"weight_block_size": [64, 64]},
            "weight_block_size=[64, 64]: with scale_fmt it must be [128, 128]",
        ),
        (
            {"quant_method": "fp8", "scale_fmt": "ue8m0"},
            "weight_block_size=None: with scale_fmt it must be [128, 128]",
        ),
        (
            {"quant_method": "fp8", "transform_ue8m0": True},
            "weight_block_size=None: with transform_ue8m0 it must be [128, 128]",
        ),
        (
            MXFP8 | {"weight_block_size": [1, 16]},
            "weight_block_size=[1, 16]: wsync knows only None or [1, 32]",
        ),
        (MXFP8 | {"scale_fmt": "float"}, "scale_fmt='float': wsync knows only None or 'ue8m0'"),
        (GLM_45_FP8, "format='float-quantized': wsync knows only 'pack-quantized'"),
        (two_groups(64), "config_groups=[32, 64]: all groups must have one group_size, a multiple"),
        (
            compressed(INT4_WEIGHTS, sparsity_config={"format": "sparse-bitmask"}),
            "sparsity_config={'format': 'sparse-bitmask'}: wsync does not know its effect",
        ),
        (
            compressed(INT4_WEIGHTS, config_groups={"W4A16": ["Linear"]}),
            "config_groups.W4A16=['Linear']: it must be a mapping",
        ),
        (with_group(weights=[4]), "config_groups.group_0.weights=[4]: it must be a mapping"),
        (compressed(INT4_WEIGHTS, config_groups=["W4A16"]), "config_groups=['W4A16']: it must be"),
        (group(num_bits=8), "config_groups.group_0.weights.num_bits=8: wsync knows only 4"),
        (group(symmetric=False), "weights.symmetric=False: wsync knows only None or True"),
        (group(strategy="channel"), "weights.strategy='channel': wsync knows only 'group'"),
        (
            group(actorder="group"),
            "weights.actorder='group': wsync knows only None or False or 'weight'",
        ),
        (
            group(group_size=-1),
            "config_groups=[-1]: all groups must have one group_size, a multiple of 8",
        ),
        (
            with_group(input_activations={"num_bits": 8}),
            "config_groups.group_0.input_activations={'num_bits': 8}: wsync knows only None",
        ),
        (NVFP4 | {"quant_algo": "FP8"}, "quant_algo='FP8': wsync knows only 'NVFP4'"),
        (NVFP4 | {"group_size": 32}, "group_size=32: wsync knows only None or 16"),
        (
            NVFP4 | {"quantized_layers": {"a": {"quant_algo": "FP8"}}},
            "quantized_layers={'a': {'quant_algo': 'FP8'}}: wsync does not know its effect",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], text: str) -> None:
    with pytest.raises(wsync.UnsupportedError) as error:
        Method.of(config)
    assert str(error.value).startswith("quantization_config: ")
    assert text in str(error.value)


def test_groups_of_one_size_are_one_method() -> None:
    method = Method.of(two_groups(32))
    assert method.targets == ("Linear", "re:.*down_proj")


@pytest.mark.parametrize(
    ("entry", "name", "kept"),
    [
        ("lm_head", "lm_head.weight", True),
        ("lm_head", "model.lm_head_norm.weight", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj.weight", True),
        ("mlp.gate", "model.layers.1.mlp.gate.weight", True),
        ("mlp.gate", "model.layers.1.mlp.gate_proj.weight", False),
        ("a.gate", "a.gate.weight", True),
        ("", "a.gate.weight", False),
        ("lm_*", "lm_head.weight", True),
        ("*.mlp.gate", "model.layers.2.mlp.gate.weight", True),
        ("re:.*self_attn.*", "model.layers.1.self_attn.q_proj.weight", True),
        ("re:self_attn", "model.layers.1.self_attn.q_proj.weight", False),
        ("re:.*q_proj$", "model.layers.1.self_attn.q_proj.weight", True),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj.weight", True),
        ("model.layers.1.self_attn*", "model.layers.2.self_attn.q_proj.weight", False),
        ("model.layers.*.mlp.gate", "model.layers.2.mlp.gate.weight", True),
        ("model.layers.*.mlp.gate", "modelXlayers.2.mlp.gate.weight", False),
        ("mtp*", "model.mtp_layers.0.up_proj.weight", True),
    ],
)
def test_lists_name_whole_parts_patterns_and_expressions(entry: str, name: str, kept: bool) -> None:
    assert Modules(["other", entry]).find(name) == (entry if kept else "")


def derived(method: Method, shape: tuple[int, ...], dtype: str = "bfloat16") -> list[TensorFacts]:
    weight = TensorFacts("a.weight", dtype, shape)
    method.check(weight)
    return [each for each in method.derived(weight, 7) if each is not None]


@pytest.mark.parametrize(
    ("config", "shape", "expected"),
    [
        (
            DEEPSEEK_V3,
            (200, 129),
            [
                ("a.weight", "float8_e4m3fn", (200, 129)),
                ("a.weight_scale_inv", "float32", (2, 2)),
            ],
        ),
        (
            DEEPSEEK_V31,
            (3, 128, 256),
            [
                ("a.weight", "float8_e4m3fn", (3, 128, 256)),
                ("a.weight_scale_inv", "float32", (3, 1, 2)),
            ],
        ),
        (
            {"quant_method": "fp8"},
            (5, 3),
            [("a.weight", "float8_e4m3fn", (5, 3)), ("a.weight_scale", "float32", (1,))],
        ),
        (
            KIMI_K2_THINKING,
            (5, 64),
            [
                ("a.weight_packed", "int32", (5, 8)),
                ("a.weight_scale", "bfloat16", (5, 2)),
                ("a.weight_shape", "int64", (2,)),
            ],
        ),
        (
            DEEPSEEK_V3 | {"transform_ue8m0": True},
            (2, 130, 513),
            [
                ("a.weight", "float8_e4m3fn", (2, 130, 513)),
                ("a.weight_scale_inv", "int32", (2, 130, 2)),
            ],
        ),
        (
            MXFP8,
            (5, 64),
            [("a.weight", "float8_e4m3fn", (5, 64)), ("a.weight_scale_inv", "uint8", (5, 2))],
        ),
        (
            NVFP4,
            (5, 48),
            [
                ("a.weight", "uint8", (5, 24)),
                ("a.weight_scale", "float8_e4m3fn", (5, 3)),
                ("a.weight_scale_2", "float32", ()),
            ],
        ),
    ],
)
def test_what_a_weight_becomes(
    config: dict[str, Any], shape: tuple[int, ...], expected: list[tuple[Any, ...]]
) -> None:
    found = derived(Method.of(config), shape)
    assert found == [TensorFacts(*each, 7) for each in expected]
    builder = _core.LayoutBuilder()
    for each in found:
        builder.add_tensor(each.name, each.dtype, each.shape, each.group)
        assert isinstance(getattr(torch, each.dtype), torch.dtype)
    assert builder.build().tensor_count == len(found)


def test_scales_of_int4_are_as_wide_as_weights() -> None:
    assert derived(Method.of(KIMI_K2_THINKING), (2, 32), "float32")[1].dtype == "float32"


@pytest.mark.parametrize(
    ("config", "shape", "text"),
    [
        (DEEPSEEK_V3, (128,), "a.weight (128,): fp8_block: only matrices can be quantised"),
        (DEEPSEEK_V3, (2, 2, 2, 2), "only matrices can be quantised"),
        (KIMI_K2_THINKING, (8, 48), "its 48 columns are not a multiple of 32"),
        (KIMI_K2_THINKING, (2, 8, 32), "only matrices can be quantised"),
        (group(), (2, 8, 32), "only matrices can be quantised"),
        (MXFP8, (8, 33), "mxfp8: its 33 columns are not a multiple of 32"),
        (MXFP8, (2, 8, 32), "only matrices can be quantised"),
        (NVFP4, (8, 24), "nvfp4: its 24 columns are not a multiple of 16"),
        (NVFP4, (2, 8, 32), "only matrices can be quantised"),
        ({"quant_method": "fp8"}, (2, 8, 8), "only matrices can be quantised"),
    ],
)
def test_what_a_method_cannot_take_is_named(
    config: dict[str, Any], shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(wsync.UnsupportedError) as error:
        Method.of(config).check(TensorFacts("a.weight", "bfloat16", shape))
    assert text in str(error.value)
