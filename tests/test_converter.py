"""Layouts that are read out of a user's converter: real Megatron-Core trainers, byte by byte.

The trainers hold a known checkpoint, as in test_gqa_families.py and test_deepseek.py, and the
converters are like slime's (tests/support/converters.py), or mbridge's own.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from support import converter_cases as cases
from support.megatron_cases import use_cpu
from support.procs import Ranks

import wsync.megatron
from wsync import InvalidArgumentError, UnsupportedError
from wsync.families import shares
from wsync.families.rules import Cut
from wsync.module_tensors import same_bytes

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

QUIET = wsync.Options(progress=False)
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks():
    """Four ranks where TransformerEngine has a stand-in, which not every case uses."""
    path = [str(TESTS), str(TESTS / "support" / "fake_te")]
    modules = ["support.converter_cases", "megatron.core.models.gpt.gpt_model"]
    with Ranks(4, path=path, fresh=True, modules=modules, setup=use_cpu) as ranks:
        yield ranks


TE = {"engine": True}
GROUPED = {"engine": True, "moe_grouped_gemm": True}
EP2 = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
ETP2 = {"tp": 2, "ep": 2, "etp": 2}
MTP = {"num_nextn_predict_layers": 1}
CASES = {
    "qwen3-tp2-pp2": ("qwen3", {}, {"tp": 2, "pp": 2}, TE),
    "qwen3-tp4-two-query-groups": ("qwen3", {}, {"tp": 4}, {}),
    "qwen3_moe-tp2-pp2-ep2": ("qwen3_moe", {}, EP2, GROUPED | {"dtype": "bfloat16"}),
    "qwen3_moe-etp2": ("qwen3_moe", {}, ETP2, {}),
    "glm4_moe-mtp-tp2-pp2-ep2": ("glm4_moe", MTP, EP2, GROUPED),
    "glm4_moe-mtp-etp2": ("glm4_moe", MTP, ETP2, {}),
    "deepseek_v3-mtp-tp2-pp2-ep2": ("deepseek_v3", MTP, EP2, TE | {"grouped": True}),
    "deepseek_v3-mtp-local": ("deepseek_v3", MTP, EP2, {}),
    "deepseek_v3-bf16": ("deepseek_v3", {}, ETP2, TE | {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shards_give_the_checkpoint_back(ranks, case):
    results = ranks.run(cases.shards_match, *case)
    shards, tensors, *_ = results[0]
    assert shards >= tensors > 20
    for _, _, calls, parameters, differing in results:
        assert not differing
        assert parameters <= calls < 6 * parameters  # most are not learnt, only proved


def test_mbridges_own_conversion_is_a_converter(ranks):
    (shards, tensors), *_ = ranks.run(cases.bridge_matches, EP2)
    assert shards >= tensors > 100


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            "without-a-place",
            "decoder.layers.0.input_layernorm.weight: tensor_model_parallel is True, but "
            "partition_dim is -1",
        ),
        ("of-several", "decoder.layers.0.self_attention.linear_proj.weight: it belongs to a Gated"),
        ("over-others", "linear_proj.weight: its layer is cut into 4 parts, but 2 ranks share"),
        ("of-no-known-gate", "decoder.layers.0.mlp.linear_fc1.weight: no module around it has"),
    ],
)
def test_parameters_of_which_nobody_knows_how_they_are_cut_are_refused(ranks, damage, text):
    for said in ranks.run(cases.damaged, damage):
        assert text in said


def test_a_layout_has_what_the_converter_adds_and_no_rows_that_pad():
    model = torch.nn.Module()
    model.decoder, model.embedding = torch.nn.Module(), torch.nn.Module()
    model.decoder.final_layernorm = torch.nn.RMSNorm(4)
    model.embedding.word_embeddings = torch.nn.Embedding(16, 4)
    config = SimpleNamespace(hidden_size=4, num_attention_heads=2, vocab_size=10)

    def convert(name, tensor):
        assert not tensor.requires_grad
        return [("norm", tensor + 1) if "norm" in name else ("tokens", tensor.flip(0))]

    found = wsync.megatron.layout(model, config, converter=convert).layout
    (norm,) = found.shards(found.names().index("norm"))
    assert norm.affine == (1.0, 1.0)
    assert found.tensor(found.names().index("tokens")).shape == (10, 4)
    shards = found.shards(found.names().index("tokens"))
    rows = [(shard.start[0], shard.offset // 16, shard.affine) for shard in shards]
    assert rows == [(row, 15 - row, (0.0, 0.0)) for row in range(10)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [lambda t: t + 1, lambda t: t * 0.5, lambda t: -3 * t])
def test_every_value_is_computed_as_the_converter_does(tmp_path, dtype, function):
    every = torch.arange(-1 << 15, 1 << 15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.final_layernorm = torch.nn.Module()
    model.decoder.final_layernorm.weight = torch.nn.Parameter(every)
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2, vocab_size=8)
    layout = wsync.megatron.layout(
        model, config, converter=lambda name, tensor: [("w", function(tensor))]
    )
    with wsync.DiskSync(layout, folder=str(tmp_path), options=QUIET) as sync:
        sync.update()
    (file,) = tmp_path.glob("**/*.safetensors")
    found = safetensors.torch.load_file(file)["w"]
    assert same_bytes(found, function(every))


@pytest.mark.parametrize(
    ("converter", "error"),
    [(lambda name, tensor: [(name, tensor)], InvalidArgumentError), (None, UnsupportedError)],
)
def test_a_bridge_is_one_of_megatron_bridge_and_alone(converter, error):
    model = torch.nn.Module()
    model.embedding = torch.nn.Embedding(16, 4)
    config = SimpleNamespace(hidden_size=4, num_attention_heads=2)
    with pytest.raises(error):
        wsync.megatron.layout(model, config, converter=converter, bridge=object())


class ColumnParallelLinear(torch.nn.Linear):
    """Named as Megatron-Core's, which says how its weight is cut."""


class GatedDeltaNet(torch.nn.Module):
    """A rank's half of what Megatron-Core's has: the sizes of the whole, and parameters."""

    def __init__(self):
        super().__init__()
        self.qk_dim, self.v_dim, self.num_value_heads = 4, 8, 2
        self.in_proj = ColumnParallelLinear(3, 14, bias=False)
        self.conv1d = torch.nn.Conv1d(8, 8, 2, groups=8, bias=False)
        self.A_log = torch.nn.Parameter(torch.zeros(1))


class MambaMixer(torch.nn.Module):
    """The same of Megatron-Core's for Mamba; 0.19's convolution is no module."""

    def __init__(self):
        super().__init__()
        self.d_inner, self.ngroups, self.d_state, self.nheads = 12, 2, 4, 6
        self.in_proj = ColumnParallelLinear(3, 23, bias=False)
        self.conv1d = torch.nn.Conv1d(14, 14, 2, groups=14)
        self.conv1d_weight = torch.nn.Parameter(torch.zeros(14, 1, 2))
        self.D = torch.nn.Parameter(torch.zeros(3))
        self.norm = torch.nn.RMSNorm(6)


_MIXED = (12, 8, 8)
# modules that join tensors in a parameter, and the sizes of these
JOINING = {
    GatedDeltaNet: {
        "in_proj.weight": (4, 4, 8, 8, 2, 2),
        "conv1d.weight": (4, 4, 8),
        "A_log": (2,),
    },
    MambaMixer: {
        "in_proj.weight": (12, *_MIXED, 6),
        "conv1d.weight": _MIXED,
        "conv1d.bias": _MIXED,
        "conv1d_weight": _MIXED,
        "D": (6,),
        "norm.weight": (12,),
    },
}


def _parts(sizes, tensor, ranks):
    """What a whole parameter consists of, where each rank's parts are one after another."""
    blocks = tensor.reshape(ranks, -1, *tensor.shape[1:]).split([n // ranks for n in sizes], 1)
    return [block.reshape(-1, *tensor.shape[1:]) for block in blocks]


@pytest.mark.parametrize(
    ("name", "size", "halves"),
    [
        ("mlp.linear_fc1.weight", 8, True),
        ("mlp.experts.linear_fc1.weight0", None, True),
        ("mlp.experts.linear_fc1.weight0", 8, False),
        ("mlp.shared_experts.linear_fc1.weight", 8, False),
    ],
)
def test_rows_of_a_gate_that_alternate_with_others_are_one_part(name, size, halves):
    """Megatron-Core 0.19 can have them so in experts."""
    config = SimpleNamespace(
        gated_linear_unit=True,
        moe_mlp_glu_interleave_size=size,
        moe_shared_expert_glu_interleave_size=size,
    )
    assert shares._has_halves(name, [SimpleNamespace(config=config)]) == halves


@pytest.mark.parametrize("kind", JOINING)
def test_joined_parameters_are_whole_as_one_rank_has_them_or_as_slime_gathers_them(
    monkeypatch, kind
):
    config = SimpleNamespace(hidden_size=3, num_attention_heads=2, tensor_model_parallel_size=2)
    model = torch.nn.Module()
    model.net = kind()
    held = {name: tensor[0].numel() for name, tensor in model.net.named_parameters()}

    def own(name, tensor):
        parts = _parts(JOINING[kind][name[4:]], tensor, 1)
        return [(f"{name}.{i}", t) for i, t in enumerate(parts)]

    def slimes(args, name, tensor):
        name = name.removeprefix("module.module.")
        parts = _parts(JOINING[kind][name[4:]], tensor, args.tensor_model_parallel_size)
        return [(f"{name}.{i}", t) for i, t in enumerate(parts)]

    assert held.keys() == JOINING[kind].keys()
    for rank in (0, 1):
        ranks = wsync.megatron.Ranks(tensor=Cut(rank, 2))
        monkeypatch.setattr(wsync.megatron.Ranks, "current", lambda ranks=ranks: ranks)
        found = [wsync.megatron.layout(model, config, converter=f).layout for f in (own, slimes)]
        assert cases._same(*found) == ""
        for name, sizes in JOINING[kind].items():
            first = 0  # where a part lies in what the rank holds
            for number, size in enumerate(sizes):
                index = found[0].names().index(f"net.{name}.{number}")
                assert found[0].tensor(index).shape[0] == size
                (shard,) = found[0].shards(index)
                assert (shard.start[0], shard.extent[0]) == (rank * size // 2, size // 2)
                assert shard.offset == first * 4 * held[name]
                first += size // 2
    model.net.v_dim = model.net.d_state = 6
    text = r"net\.(in_proj\.|conv1d_)weight: this rank has \d+ rows or columns, which is not"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.megatron.layout(model, config, converter=own)
