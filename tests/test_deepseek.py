"""Layouts of Megatron-Core trainers with latent attention: 4 processes, every byte compared.

The trainers are Megatron-Core's own MLA models, with their own linear layers and with
TransformerEngine's (a stand-in), and with MTP.  tests/support/latent_cases.py cuts a checkpoint of
transformers' DeepSeek-V3 into what each rank must hold; transformers' logits check that.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import latent_cases as cases
from support import megatron_cases
from support.procs import Ranks

import wsync.megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def ranks():
    """Four ranks where TransformerEngine has a stand-in, which not every case uses."""
    tests = Path(__file__).parent
    path = [str(tests), str(tests / "support" / "fake_te")]
    modules = ["support.latent_cases", "megatron.core.models.gpt.gpt_model"]
    with Ranks(4, path=path, fresh=True, modules=modules, setup=megatron_cases.use_cpu) as ranks:
        yield ranks


TE = {"engine": True}
GROUPED = {"engine": True, "grouped": True}
NO_QUERY_RANK = {"q_lora_rank": None, "num_nextn_predict_layers": 0}
TWO_MTP = {"num_nextn_predict_layers": 2}

CASES = {
    "tp2-pp2-ep2": ("deepseek_v3", TWO_MTP, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {}),
    "pp2-vpp2": ("kimi_k2", TWO_MTP, {"pp": 2, "vpp": 2}, {"mtp_model_layer": True}),
    "tp2-no-query-rank": ("moonlight", NO_QUERY_RANK, {"tp": 2}, {}),
    "te-tp2-pp2-ep2": ("deepseek_v3", TWO_MTP, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, TE),
    "te-grouped-etp2-bf16": (
        "glm4_moe_lite",
        {},
        {"tp": 2, "ep": 2, "etp": 2},
        GROUPED | {"dtype": "bfloat16"},
    ),
    "te-no-query-rank": ("moonlight", NO_QUERY_RANK, {"tp": 2, "pp": 2}, GROUPED),
    "te-arguments": ("kimi_k2", {}, {"tp": 2, "pp": 2}, TE | {"arguments": True}),
    "own-indexer": ("deepseek_v32", {}, {"tp": 2, "pp": 2}, TE | {"native_indexer": True}),
    "slimes-indexer": ("glm_moe_dsa", {}, {"tp": 2, "pp": 2}, TE | {"plugin_indexer": (0, 3)}),
}


def _matches(ranks, case):
    (names, shards, tensors), *others = ranks.run(cases.layout_matches, *case)
    assert shards >= len(tensors) > 100
    return [names, *others], tensors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shards_give_the_checkpoint_back(ranks, case):
    _matches(ranks, case)


EMBEDDING = "embedding.word_embeddings.weight"


def test_each_rank_gives_the_embedding_once_where_it_has_layers_of_mtp(ranks):
    names, _ = _matches(ranks, CASES["pp2-vpp2"])
    assert [mine.count(EMBEDDING) for mine in names] == [1, 1, 1, 1]
    assert [any("mtp.layers.1.mtp_model_layer." in n for n in mine) for mine in names] == [
        *(False, False, True, True)
    ]


@pytest.mark.parametrize(
    ("family", "known", "text"),
    [
        ("deepseek_v3", {}, "does not give num_hidden_layers or num_layers"),
        (
            *("deepseek_v3", {"num_layers": 4, "mtp_num_layers": 1}),
            "MTP layer 1, but the configuration has 1 MTP",
        ),
        ("nemotron_h", {"num_layers": 4}, "does not give mtp_hybrid_override_pattern"),
    ],
)
def test_layers_of_mtp_that_cannot_be_counted_are_refused(family, known, text):
    layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    layers[1].enorm = torch.nn.LayerNorm(4, bias=False)
    model = torch.nn.Module()
    model.mtp = torch.nn.Module()
    model.mtp.layers = layers
    config = SimpleNamespace(hidden_size=4, num_attention_heads=2, **known)
    with pytest.raises(wsync.LayoutError, match=rf"mtp\.layers\.1\.enorm\.weight: .*{text}"):
        wsync.megatron.layout(model, config, model_name=family)


def test_the_bias_of_the_router_is_float32_whatever_the_model_is(ranks):
    _, tensors = _matches(ranks, CASES["te-grouped-etp2-bf16"])
    kinds = {name: dtype for name, dtype, *_ in tensors}
    wide = [name for name, dtype in kinds.items() if dtype == "float32"]
    assert wide == [name for name in kinds if name.endswith("e_score_correction_bias")]
    assert len(wide) == 4 and set(kinds.values()) == {"float32", "bfloat16"}


def test_biases_that_megatron_narrowed_for_a_while_are_delivered_in_float32(ranks):
    case = ("deepseek_v3", {}, {"tp": 2}, TE | {"dtype": "bfloat16"})
    for before, of_model, of_backups in ranks.run(cases.biases_stay_wide, *case):
        assert before == ["torch.bfloat16"]
        assert of_model == of_backups == {"float32"}


def test_projections_that_engines_join_stay_together(ranks):
    _, tensors = _matches(ranks, CASES["te-tp2-pp2-ep2"])
    groups = {}
    for name, _, _, group in tensors:
        groups.setdefault(group, []).append(name)
    assert all("_a_proj" not in name for name in groups.pop(0))
    joined = ("kv_a_proj_with_mqa", "q_a_proj")
    assert sorted(sorted(names) for names in groups.values()) == [
        [f"model.layers.{layer}.self_attn.{name}.weight" for name in joined]
        for layer in range(4 + 2)  # the last two are those of MTP
    ]


@pytest.mark.parametrize("rank", [24, None], ids=["query-rank", "no-query-rank"])
def test_the_reference_is_what_transformers_computes(ranks, rank):
    changes = {"q_lora_rank": rank, "num_nextn_predict_layers": 0}
    parallel = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    for difference, largest in ranks.run(cases.logits_match, "deepseek_v3", changes, parallel, {}):
        assert difference < 1e-4 < 1 < largest
