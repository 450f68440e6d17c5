"""Layouts of real Megatron-Core trainers: 4 processes over gloo, every byte compared.

A known checkpoint is cut into what each rank must hold (tests/support/megatron_reference.py, the
opposite way of wsync's rules), the trainer is filled with it, and the shards of the merged layout
must give the checkpoint back.  mbridge's export and transformers' logits check the reference.
"""

from pathlib import Path

import pytest
from support import megatron_cases as cases
from support.procs import Ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

SUPPORT = Path(__file__).parent / "support"


def _ranks(*extra):
    tests = str(Path(__file__).parent)
    modules = ["support.megatron_cases", "megatron.core.models.gpt.gpt_model"]
    place = {"path": [tests, *extra], "fresh": bool(extra)}  # another version of Megatron
    with Ranks(4, **place, modules=modules, setup=cases.use_cpu) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def local():
    """Four ranks with Megatron's own modules."""
    yield from _ranks()


@pytest.fixture(scope="module")
def engine():
    """Four ranks where TransformerEngine has a stand-in."""
    yield from _ranks(str(SUPPORT / "fake_te"))


TIED = {"tie_word_embeddings": True}
TE = {"engine": True}
GROUPED = {"moe_grouped_gemm": True}

LOCAL = {
    "tp1-dp4": ("qwen3", {}, {"tp": 1}, {}),
    "tp2-pp2": ("qwen3", {}, {"tp": 2, "pp": 2}, {}),
    "tp2-pp2-tied": ("qwen3", TIED, {"tp": 2, "pp": 2}, {}),
    "tp2-dp2-tied": ("qwen3", TIED, {"tp": 2}, {}),
    "tp4-two-query-groups": ("qwen3", {}, {"tp": 4}, {}),
    "tp2-pp2-vpp2-bias": ("qwen2", {}, {"tp": 2, "pp": 2, "vpp": 2}, {}),
    "pp2-vpp2-tied": ("qwen3", TIED, {"pp": 2, "vpp": 2}, {}),
    "pp4": ("llama", {}, {"pp": 4}, {}),
    "tp4-bias": ("qwen2", {"vocab_size": 97}, {"tp": 4}, {}),
    "tp2-cp2": ("llama", {}, {"tp": 2, "cp": 2}, {}),
    "uneven-stages": (
        "qwen3",
        {"num_hidden_layers": 3},
        {"pp": 2},
        {"num_layers_in_first_pipeline_stage": 2},
    ),
    "bf16": ("qwen3", {}, {"tp": 2, "pp": 2}, {"dtype": "bfloat16"}),
    "moe-tp2-pp2-ep2-etp1": ("qwen3_moe", {}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {}),
    "moe-tp2-ep2-etp2": ("qwen3_moe", {}, {"tp": 2, "ep": 2, "etp": 2}, {}),
    "moe-tp4-etp2-ep1": ("qwen3_moe", {}, {"tp": 4, "ep": 1, "etp": 2}, {}),
    "moe-ep4": ("qwen3_moe", {}, {"ep": 4, "etp": 1}, {}),
    "moe-shared-ep2": ("qwen2_moe", {}, {"tp": 2, "ep": 2, "etp": 1}, {}),
    "moe-expert-bias": (
        "qwen3_moe",
        {},
        {"ep": 2, "pp": 2, "etp": 1},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ),
}
ENGINE = {
    "te-tp2-pp2": ("qwen3", {}, {"tp": 2, "pp": 2}, TE),
    "te-tp2-pp2-vpp2-tied": ("qwen2", TIED, {"tp": 2, "pp": 2, "vpp": 2}, TE),
    "te-sequential-tp2-pp2-ep2": ("qwen3_moe", {}, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, TE),
    "te-sequential-etp2": ("qwen3_moe", {}, {"tp": 2, "ep": 2, "etp": 2}, TE),
    "te-grouped-tp2-pp2-ep2": (
        "qwen3_moe",
        {},
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        TE | GROUPED,
    ),
    "te-grouped-etp2": ("qwen3_moe", {}, {"tp": 2, "ep": 2, "etp": 2}, TE | GROUPED),
    "te-grouped-ep4": ("qwen3_moe", {}, {"tp": 2, "ep": 4, "etp": 1}, TE | GROUPED),
    "te-grouped-shared": ("qwen2_moe", {}, {"tp": 2, "ep": 2, "etp": 2}, TE | GROUPED),
}


def _matches(ranks, case):
    facts = ranks.run(cases.layout_matches, *case)
    assert [fact["rank"] for fact in facts] == [0, 1, 2, 3]
    assert {fact["ranks"] for fact in facts} == {4}
    assert all(fact["nbytes"] for fact in facts)
    assert facts[0]["shards"] >= facts[0]["tensors"] > 20
    return facts


@pytest.mark.parametrize("case", LOCAL.values(), ids=LOCAL)
def test_shards_give_the_checkpoint_back(local, case):
    _matches(local, case)


@pytest.mark.parametrize("case", ENGINE.values(), ids=ENGINE)
def test_shards_of_transformer_engine_names(engine, case):
    _matches(engine, case)


def test_backups_of_local_experts_are_found(local):
    case = ("qwen3_moe", {"num_hidden_layers": 2}, {"pp": 2, "ep": 2, "etp": 1}, {})
    for found in local.run(cases.backups_match, *case):
        assert len(found) > 10
        assert all(found)


@pytest.mark.parametrize("name", ["tp2-pp2", "tp4-bias", "moe-tp2-ep2-etp2"])
def test_cut_parameters_that_nobody_has_described(local, name):
    """Megatron-Core 0.16 describes a weight when it initializes it, which Megatron-Bridge does
    without: it loads weights instead."""
    for described, undescribed in local.run(cases.undescribed, *LOCAL[name]):
        assert described == undescribed


@pytest.mark.parametrize("reordered", [False, True], ids=["forgotten", "reordered"])
@pytest.mark.parametrize("name", ["tp2-pp2", "moe-tp2-pp2-ep2-etp1"])
def test_a_model_goes_by_the_groups_that_it_was_built_with(local, name, reordered):
    """Whatever parallel_state has by then: another model's, or none."""
    for before, after in local.run(cases.own_groups, reordered, False, *LOCAL[name]):
        assert before == after


def test_parameters_that_are_gathered_by_the_next_forward_pass_are_refused(local):
    for text in local.run(cases.gathered_late, "qwen3", TIED, {"tp": 2, "pp": 2}, {}):
        assert "overlap_param_gather" in text and "disable_forward_pre_hook" in text


def test_parameters_that_nobody_has_gathered_since_a_step_are_refused(local):
    case = ("qwen3", TIED, {"tp": 2, "pp": 2}, {})
    for said, unknown in local.run(cases.gathered_by_nobody, *case):
        late = ["they have not been gathered since" in text for text in said]
        assert late == [False, True, True, False, True, False], said
        assert unknown == []


@pytest.mark.parametrize("what", ["module", "parameter"])
def test_what_layers_share_is_delivered_under_each_name(local, what):
    for lacking in local.run(cases.shared_names, what):
        assert lacking == []


def test_tied_head_is_left_to_the_embedding(local):
    facts = _matches(local, ("qwen3", TIED, {"tp": 2, "pp": 2}, {}))
    assert not any("output_layer.weight" in fact["names"] for fact in facts)


@pytest.mark.parametrize(
    "case",
    [LOCAL[k] for k in ("tp2-pp2", "tp2-pp2-vpp2-bias", "tp4-two-query-groups", "moe-shared-ep2")],
    ids=["tp2-pp2", "vpp2-bias", "tp4-two-query-groups", "moe-shared-ep2"],
)
def test_the_reference_is_what_transformers_computes(local, case):
    assert max(local.run(cases.logits_match, *case)) < 1e-4


@pytest.mark.parametrize("name", ["tp2-pp2", "moe-tp2-ep2-etp2", "moe-tp2-pp2-ep2-etp1"])
def test_training_keeps_replicas_equal(local, name):
    for replicas, changed, count in local.run(cases.step_keeps_replicas, *LOCAL[name]):
        assert replicas > 0
        assert changed == count > 10


BRIDGED = ("te-tp2-pp2", "te-grouped-tp2-pp2-ep2", "te-grouped-etp2", "te-grouped-shared")


@pytest.mark.parametrize("name", BRIDGED)
def test_the_reference_is_what_mbridge_exports(engine, name):
    pytest.importorskip("mbridge", reason="mbridge is not installed")
    family, changes, parallel, options = ENGINE[name]
    if family == "qwen2_moe":
        changes = {"mlp_only_layers": []}  # mbridge knows no dense layers in this family
    assert min(engine.run(cases.bridge_exports, family, changes, parallel, options)) > 20


DENSE = ("qwen3", {}, {"tp": 2, "pp": 2}, {})
MOE = ("qwen3_moe", {}, {"ep": 2, "pp": 2, "etp": 1}, {})
PLAIN = ("llama", {"head_dim": 16}, {"tp": 2, "pp": 2}, {})


@pytest.mark.parametrize(
    ("damage", "case", "kind", "parts"),
    [
        ("unknown_name", DENSE, "LayoutError", ["layers.0.surprise", "'qwen3'"]),
        ("other_hidden", DENSE, "LayoutError", ["(64, 32)", "(64, 64)", "2 tensor-parallel"]),
        ("other_vocabulary", DENSE, "LayoutError", ["word_embeddings", "128", "1000"]),
        ("fewer_layers", DENSE, "LayoutError", ["layer 2", "2 layers"]),
        (
            "one_query_group",
            DENSE,
            "LayoutError",
            [
                "layers.0: the trainer's num_query_groups is 2, "
                "but the configuration says 1 (num_key_value_heads 1)"
            ],
        ),
        ("other_tie", DENSE, "LayoutError", ["share_embeddings_and_output_weights is False"]),
        ("other_family", DENSE, "UnsupportedError", ["'mamba'", "qwen3_moe"]),
        (
            "other_experts",
            MOE,
            "LayoutError",
            ["linear_fc1.weight: this rank's expert is 2", "4 experts over 2"],
        ),
        (
            "zero_centered",
            DENSE,
            "LayoutError",
            [
                "decoder.layers.0: the trainer's layernorm_zero_centered_gamma is True, "
                "but the family 'qwen3' needs False"
            ],
        ),
        ("interleaved", DENSE, "LayoutError", ["rotary_interleaved is True", "needs False"]),
        ("blocks_of_gates", MOE, "LayoutError", ["glu_interleave_size is 8", "needs None"]),
        ("halved_heads", PLAIN, "LayoutError", ["num_query_groups is 2", "says 4"]),
    ],
)
def test_input_that_cannot_be(local, damage, case, kind, parts):
    errors = local.run(cases.rejected, damage, *case)
    found = [error for error in errors if error is not None]
    assert found, "no rank noticed"
    assert {name for name, _ in found} == {kind}
    for part in parts:
        assert any(part in text for _, text in found), (part, found)
