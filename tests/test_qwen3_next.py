"""Qwen3-Next and Qwen3.5: real Megatron-Core trainers over gloo, every byte compared.

A known checkpoint is cut into what each rank must hold (tests/support/gdn_families.py), and the
shards of the merged layout must give it back.  TransformerEngine and flash-linear-attention have
stand-ins; slime's delta nets, which are transformers' modules, are bare parameters with their names
and shapes.
"""

from pathlib import Path

import pytest
import torch
from support import gdn_cases as cases
from support import gdn_families as families
from support.megatron_cases import use_cpu
from support.procs import Ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks():
    path = [str(TESTS), *(str(TESTS / "support" / name) for name in ("fake_te", "fake_fla"))]
    modules = ["support.gdn_cases", "megatron.core.models.gpt.gpt_model"]
    with Ranks(4, path=path, fresh=True, modules=modules, setup=use_cpu) as ranks:
        yield ranks


NATIVE, SLIME = True, False
TE = {"engine": True}
GROUPED = {"engine": True, "moe_grouped_gemm": True}
TP2_PP2 = {"tp": 2, "pp": 2}
EP2 = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
ETP2 = {"tp": 2, "ep": 2, "etp": 2}
MTP = {"mtp_num_hidden_layers": 1}
CASES = {
    "next-native-tp2-pp2-ep2": ("qwen3_next", {}, EP2, NATIVE, GROUPED),
    "next-native-tp4": ("qwen3_next", {}, {"tp": 4}, NATIVE, TE),
    "next-native-etp2": ("qwen3_next", {}, ETP2, NATIVE, TE),
    "next-native-bf16": ("qwen3_next", {}, EP2, NATIVE, GROUPED | {"dtype": "bfloat16"}),
    "next-native-mtp": ("qwen3_next", MTP, EP2, NATIVE, GROUPED),
    "next-slime-tp2-pp2-ep2": ("qwen3_next", {}, EP2, SLIME, GROUPED),
    "next-slime-mtp": ("qwen3_next", MTP, EP2, SLIME, GROUPED, "slime"),
    "next-slime-local": ("qwen3_next", {}, ETP2, SLIME, {}),
    "dense-native-tp2-pp2": ("qwen3_5", MTP, TP2_PP2, NATIVE, TE),
    "dense-slime-tp2-pp2": ("qwen3_5", MTP, TP2_PP2, SLIME, TE, "slime"),
    "moe-native-tp2-pp2-ep2": ("qwen3_5_moe", MTP, EP2, NATIVE, GROUPED),
    "moe-slime-etp2": ("qwen3_5_moe", {}, ETP2, SLIME, {}),
    "dense-tower-tp2-pp2": ("qwen3_5", MTP, TP2_PP2, NATIVE, TE | {"tower": True}),
    "moe-tower-tp2-pp2-ep2": ("qwen3_5_moe", MTP, EP2, NATIVE, GROUPED | {"tower": True}),
    "dense-text-native": ("qwen3_5_text", {}, TP2_PP2, NATIVE, TE),
    "moe-text-native-etp2": ("qwen3_5_moe_text", MTP, ETP2, NATIVE, GROUPED),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shards_give_the_checkpoint_back(ranks, case):
    results = ranks.run(cases.shards_match, *case)
    assert results[0][0] >= results[0][1] > 20
    native = any(name.endswith("self_attention.in_proj.weight") for name in results[0][2])
    assert native == case[3]
    dtypes = set(results[0][3].values())
    assert dtypes == {(case[4].get("dtype") or "float32")}


def test_what_the_trainer_holds_in_float32_is_not_narrowed(ranks):
    wide = {"dtype": "bfloat16", "wide": ("A_log", "dt_bias")}
    case = ("qwen3_next", {}, TP2_PP2, NATIVE, TE | wide)
    for *_, dtypes in ranks.run(cases.shards_match, *case):
        found = {name for name, dtype in dtypes.items() if dtype == "float32"}
        assert found == {name for name in dtypes if name.endswith(wide["wide"])}
        assert len(found) == 6


def test_copies_give_the_checkpoint_to_an_engine(ranks):
    for wide in ((), ("A_log",)):
        options = {**TE, "wide": wide}
        for wrong, count in ranks.run(cases.delivered, "qwen3_next", {"tp": 1}, options):
            assert wrong == []
            assert count > 60


def test_the_checkpoint_is_what_transformers_has():
    hf = families.config("qwen3_next")
    model = transformers.AutoModelForCausalLM.from_config(hf)
    assert families.shapes(hf) == {n: tuple(t.shape) for n, t in model.state_dict().items()}


def test_the_reference_is_what_transformers_computes(ranks):
    """With Megatron-Core's own delta net, which computes with torch here."""
    changes = {"partial_rotary_factor": 1.0, "attn_implementation": "eager"}
    hf = families.config("qwen3_next", **changes)
    model = transformers.AutoModelForCausalLM.from_config(hf).eval()
    model.load_state_dict(families.checkpoint(hf))
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(ids).logits
    for found in ranks.run(cases.logits, changes, {"tp": 2, "ep": 2, "etp": 1}, ids.tolist()):
        assert float((torch.tensor(found) - want).abs().max()) < 1e-4 * float(want.abs().max())
