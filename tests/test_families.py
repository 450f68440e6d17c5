"""Which families there are, how one is chosen and added, and what a table is checked for."""

import itertools
import json
import subprocess
import sys
import types

import pytest
import torch
from support import published_models
from support.published_models import Model

import wsync.families
from wsync import _core, cli
from wsync.families import Rule, Target, blocks, registry
from wsync.families.registry import FAMILIES, family_of, read_model
from wsync.families.rules import PLACEHOLDER
from wsync.trainer import planning


class Config:
    def __init__(self, **fields):
        self.__dict__.update(fields)


# parameters of which the first of two rules is taken: its norms are of all heads
TWICE = {"minimax_m2": {f"{blocks.LAYER}self_attention.{n}_layernorm.weight" for n in "qk"}}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_table_has_each_name_once_and_sizes_that_configurations_give(family):
    known = {*registry.FIELDS, *family.fields, *registry.DERIVED}
    for rules in (family.rules, *family.loaders.values()):
        names = [name for rule in rules for name in rule.names]
        assert names and {n for n in names if names.count(n) > 1} == TWICE.get(family.name, set())
        assert {size for rule in rules for size in rule.sizes} <= known
    names = [name for rule in family.rules for name in rule.names]
    for loader, name in itertools.product(registry.LOADERS, names):
        family.loaded_by(loader).find(PLACEHOLDER.sub("0", name))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3_moe", "qwen3_moe"),
        ("Qwen3MoeConfig", "qwen3_moe"),
        ("qwen3moeforcausallm", "qwen3_moe"),
        ("Qwen2MoeForCausalLM", "qwen2_moe"),
        ("Glm4MoeConfig", "glm4_moe"),
        ("GptOssForCausalLM", "gpt_oss"),
        ("MiniMaxM2Config", "minimax_m2"),
        ("LlamaModel", "llama"),
        ("Qwen3TextConfig", "qwen3"),
    ],
)
def test_a_family_by_its_model_type_and_its_classes(name, family):
    assert family_of(name).name == family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("GLM-4.5-Air glm4_moe", "glm4_moe"),
        ("qwen3-30b-a3b", "qwen3"),
        ("my_qwen2.5", "qwen2"),
        ("kimi-k2-instruct", "kimi_k2"),
        ("Kimi-K2.5-Instruct", "kimi_k25"),
        ("Qwen3.6-35B-A3B", "qwen3_6_moe"),
    ],
)
def test_a_given_name_is_searched_as_slime_does(name, family):
    config = Config(hidden_size=8, num_attention_heads=2, model_type="llama")
    assert read_model(config, name).family.name == family
    with pytest.raises(_core.UnsupportedError):  # but not that of a configuration
        read_model(Config(hidden_size=8, num_attention_heads=2, model_type=name))


@pytest.mark.parametrize(
    ("name", "part", "text"),
    [
        ("step3p5", False, "'step3p5': Megatron-Core has a gate for each channel"),
        ("Step3p5ForCausalLM", False, "'step3p5'"),
        ("mimo_v2_flash", False, "'mimo_v2_flash': its layers differ in their"),
        ("XiaomiMiMo/MiMo-V2-Flash", True, "'mimo_v2_flash'"),
    ],
)
def test_a_family_that_only_megatron_bridge_maps_is_refused_by_name(name, part, text):
    with pytest.raises(_core.UnsupportedError, match=text) as error:
        family_of(name, part=part)
    assert "bridge=AutoBridge" in str(error.value)


def test_an_unknown_family_names_those_known_and_the_way_to_add_it():
    with pytest.raises(_core.UnsupportedError, match=r"family 'qwen3_mo'; it knows bailing") as e:
        family_of("qwen3_mo")
    assert "wsync.families.register" in str(e.value)


FFN = Rule(
    "decoder.layers.{layer}.mlp.linear_fc1.weight",
    "(*gate:own | *up:own) h",
    Target("model.layers.{layer}.w1", "gate h"),
    Target("model.layers.{layer}.w3", "up h"),
)
FIELDS = {"own": ("own_size",)}


@pytest.fixture
def register():
    before = dict(FAMILIES)
    yield wsync.families.register
    FAMILIES.clear()
    FAMILIES.update(before)


def test_a_family_of_ones_own(register):
    register("mine", (*blocks.EMBEDDING, FFN), fields=FIELDS)
    model = read_model(Config(hidden_size=6, num_attention_heads=2, own_size=4), "mine")
    rule, numbers = model.family.find("decoder.layers.3.mlp.linear_fc1.weight")
    pieces = model.family.expand(rule, "x", model.sizes).pieces
    assert [(p.name.format(**numbers), p.shape) for p in pieces] == [
        ("model.layers.3.w1", (4, 6)),
        ("model.layers.3.w3", (4, 6)),
    ]
    with pytest.raises(_core.LayoutError, match="does not give own_size, which"):
        model.family.expand(rule, "x", {"h": 6})
    register("mine", (FFN,), fields=FIELDS)  # a cell of a notebook, run once more
    assert [rule.name for rule in FAMILIES["mine"].rules] == [FFN.name]
    with pytest.raises(wsync.InvalidArgumentError, match="wsync has a family 'qwen3' already"):
        register("qwen3", (FFN,), fields=FIELDS)


def test_the_command_lists_every_family():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wsync", "families"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    listed = {line.split()[0] for line in done.stdout.split("\n\n")[1].splitlines()}
    assert listed == set(FAMILIES)


def test_every_family_names_its_oracle(capsys):
    assert cli.main(["families"]) == 0
    assert "added by the user" not in capsys.readouterr().out


PUBLISHED = published_models.models()


def as_slime_builds(model: Model, rank: int = 0, ranks: int = 1) -> torch.nn.Module:
    """What a tensor-parallel rank holds of each kind of layer; its shapes take no memory."""
    groups = {key: types.SimpleNamespace(rank=lambda: 0, size=lambda: 1) for key in ("pp", "ep")}
    groups["expt_tp"] = groups["ep"]
    groups["tp"] = types.SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    root = torch.nn.Module()
    root.share_embeddings_and_output_weights = model.tied
    root.pg_collection = types.SimpleNamespace(**groups)
    for name, shape, axis, _ in published_models.parts(model):
        cut = axis if ".experts." not in name else -1
        local = [n // ranks if i == cut else n for i, n in enumerate(shape)]
        home, (*path, last) = root, name.split(".")
        for part in path:
            if part not in home._modules:
                home.add_module(part, torch.nn.Module())
            home = home._modules[part]
            if part.isdigit():
                home.layer_number = int(part) + 1
        tensor = torch.ones(1, dtype=torch.bfloat16).expand(local)
        home.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def slimes_updater(model: Model, folder, rank: int = 0, ranks: int = 1, **changes):
    (folder / "config.json").write_text(json.dumps(model.json()))
    args = model.arguments(str(folder))
    vars(args).update(changes)
    name = model.family.replace("_", "") + "config"
    return wsync.UpdateWeightFromTensor(
        args, [as_slime_builds(model, rank, ranks)], None, model_name=name
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_size_has_a_layout_by_slimes_arguments(name, tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    model = PUBLISHED[name]
    wanted = {n: s for part in published_models.parts(model) for n, s in part.tensors.items()}
    found = [slimes_updater(model, tmp_path, rank, 2)._source.layout for rank in (0, 1)]
    for layout in found:
        assert {
            layout.tensor(i).name: layout.tensor(i).shape for i in range(layout.tensor_count)
        } == wanted
    merged = _core.Layout.merge(found)
    whole = planning.whole(merged, range(merged.tensor_count))
    _core.Plan(merged, [(whole, False)], [(0, 0)], [0, 0], 0)  # which misses no element


def test_an_error_of_a_shape_names_the_field_of_the_checkpoint(tmp_path):
    """Megatron's arguments have its defaults where a model is built from config.json."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    model = PUBLISHED["Qwen3.5-27B"]  # of 48 heads, and Megatron's default is 32
    config = model._replace(config={**model.config, "linear_num_value_heads": 64}).json()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    text = r"linear_attn\.A_log: local shape \(48,\) .*\(linear_num_value_heads 64\)$"
    with pytest.raises(_core.LayoutError, match=text):
        slimes_updater(model, tmp_path, hf_checkpoint=str(tmp_path / "other"))
