"""The rule language: boxes from unsharded Megatron parameters to Hugging Face tensors.

Expansions are applied to arrays whose elements are all different and compared with numpy's own
reshape, transpose, split and concatenate.
"""

import itertools
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync import _core
from wsync.families.blocks import ATTENTION, DENSE_MLP, EMBEDDING, eh_proj, mtp
from wsync.families.registry import FAMILIES, Family, family_of, read_model
from wsync.families.rules import Cut, Rule, RuleError, Target, mtp_numbers


def numbered(shape):
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def write(found, rule, full, numbers, **sizes):
    """Puts a whole parameter into {target name: array}, each element once."""
    expansion = rule.expand(sizes, sizes.get("inferred", 0))
    assert expansion.shape == full.shape
    for piece in expansion.pieces:
        name, _, shape, target_start, *_ = piece.map(numbers)
        out = found.setdefault(name, np.full(shape, -1, np.int64))
        start, extent = piece.source_box()
        part = full[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
        kept = [axis for axis in piece.axes if axis >= 0]
        dropped = tuple(axis for axis in range(full.ndim) if axis not in kept)
        part = part.squeeze(dropped)
        part = part.transpose(np.argsort(np.argsort(kept))) if kept else part
        ends = zip(target_start, piece.extent, piece.steps, strict=True)
        where = tuple(slice(a, a + n * step, step) for a, n, step in ends)
        assert (out[where] == -1).all(), f"{name} is written twice"
        out[where] = part.reshape(piece.extent)


def apply(rule, full, numbers=None, **sizes):
    """{target name: array} of a whole parameter, or of the same one as each expert's."""
    found = {}
    for expert in range(sizes["experts"] if rule.counted else 1):
        write(found, rule, full, {"expert": expert} | (numbers or {}), **sizes)
    for name, out in found.items():
        assert (out >= 0).all(), f"{name} has holes"
    return found


def local_share(rule, full, cut, expert=None, **sizes):
    """What a rank holds of a whole parameter, put together from its regions."""
    placement = rule.expand(sizes).place(cut, expert)
    out = np.full(placement.shape, -1, np.int64)
    for start, extent, local in placement.regions:
        source = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
        out[tuple(slice(a, a + n) for a, n in zip(local, extent, strict=True))] = full[source]
    assert (out >= 0).all()
    return out


def test_rename():
    full = numbered((6, 4))
    rule = Rule("a.{layer}.w", "h *f", Target("b.{layer}.w", "h f"))
    assert rule.match("a.12.w") == {"layer": 12}
    assert rule.match("a.12.wx") is None
    found = apply(rule, full, {"layer": 12}, h=6, f=4)
    assert found.keys() == {"b.12.w"}
    assert (found["b.12.w"] == full).all()
    assert len(rule.expand({"h": 6, "f": 4}).pieces) == 1


def test_gate_and_up_are_cut_each_on_their_own():
    rule, _ = FAMILIES["llama"].find("decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = numbered((8, 3)), numbered((8, 3)) + 100
    full = np.concatenate([gate, up])
    found = apply(rule, full, {"layer": 0}, ffn=8, h=3)
    assert (found["model.layers.0.mlp.gate_proj.weight"] == gate).all()
    assert (found["model.layers.0.mlp.up_proj.weight"] == up).all()
    want = np.concatenate([gate[6:8], up[6:8]])
    assert (local_share(rule, full, Cut(3, 4), ffn=8, h=3) == want).all()


@given(g=st.integers(1, 4), n=st.integers(1, 4), d=st.integers(1, 5), h=st.integers(1, 3))
def test_query_groups(g, n, d, h):
    rule, _ = FAMILIES["qwen3"].find("decoder.layers.3.self_attention.linear_qkv.weight")
    full = numbered((g * (n + 2) * d, h))
    found = apply(rule, full, {"layer": 3}, g=g, n=n, d=d, h=h)
    grouped = full.reshape(g, n + 2, d, h)
    want = {
        "q": grouped[:, :n].reshape(-1, h),
        "k": grouped[:, n].reshape(-1, h),
        "v": grouped[:, n + 1].reshape(-1, h),
    }
    for part, array in want.items():
        assert (found[f"model.layers.3.self_attn.{part}_proj.weight"] == array).all()


def test_query_group_biases():
    rule, _ = FAMILIES["qwen2"].find("decoder.layers.0.self_attention.linear_qkv.bias")
    full = numbered((2 * 4 * 3,))
    found = apply(rule, full, {"layer": 0}, g=2, n=2, d=3)
    want = full.reshape(2, 4, 3)[:, 3].reshape(-1)
    assert (found["model.layers.0.self_attn.v_proj.bias"] == want).all()


def test_more_ranks_than_query_groups_cut_inside_a_group():
    rule, _ = FAMILIES["qwen3"].find("decoder.layers.0.self_attention.linear_qkv.weight")
    sizes = {"g": 2, "n": 2, "d": 3, "h": 2}
    full = numbered((24, 2))
    assert (local_share(rule, full, Cut(1, 4), **sizes) == full[6:12]).all()
    expansion = rule.expand(sizes)
    placement = expansion.place(Cut(1, 4))
    names = {p.name.split(".")[4] for p in expansion.pieces if placement.meets(p)}
    assert names == {"k_proj", "v_proj"}  # the group's second half: its keys and values


def test_padding_stays_behind():
    rule, _ = FAMILIES["llama"].find("output_layer.weight")
    full = numbered((12, 3))
    expansion = rule.expand({"vocab": 10, "h": 3}, 2)
    assert expansion.shape == (12, 3)
    (piece,) = expansion.pieces
    assert (piece.shape, piece.extent) == ((10, 3), (10, 3))
    assert not expansion.place(Cut(11, 12)).meets(piece)
    assert expansion.place(Cut(9, 12)).meets(piece)
    assert (full[:10] == numbered((10, 3))).all()


def test_legacy_grouped_experts():
    family = FAMILIES["qwen3_moe"]
    sizes = {"experts": 4, "h": 3, "moe_ffn": 5}
    rule, _ = family.find("decoder.layers.1.mlp.experts.weight1")
    full = numbered((4, 3, 10))
    found = apply(rule, full, {"layer": 1}, **sizes)
    assert len(found) == 8
    for expert in range(4):
        base = f"model.layers.1.mlp.experts.{expert}."
        assert (found[f"{base}gate_proj.weight"] == full[expert, :, :5].T).all()
        assert (found[f"{base}up_proj.weight"] == full[expert, :, 5:].T).all()
    rule, _ = family.find("decoder.layers.1.mlp.experts.weight2")
    full = numbered((4, 5, 3))
    found = apply(rule, full, {"layer": 1}, **sizes)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        assert (found[name] == full[expert].T).all()
    share = local_share(rule, full, Cut(), Cut(1, 2), **sizes)
    assert (share == full[2:]).all()


@given(g=st.integers(1, 3), n=st.integers(1, 3), d=st.integers(1, 4), h=st.integers(1, 3))
def test_qwen3_next_gated_query_rows(g, n, d, h):
    """Queries and their gates alternate in Megatron; each head has both, one after the other."""
    rule = Rule(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        "*(g (two:2 n | k:1 | v:1) d) h",
        Target("q", "(g n two d) h"),
        Target("k", "(g k d) h"),
        Target("v", "(g v d) h"),
    )
    full = numbered((g * (2 * n + 2) * d, h))
    found = apply(rule, full, g=g, n=n, d=d, h=h)
    grouped = full.reshape(g, 2 * n + 2, d, h)
    q = grouped[:, : 2 * n].reshape(g, 2, n, d, h).swapaxes(1, 2)
    assert (found["q"] == q.reshape(-1, h)).all()
    assert (found["k"] == grouped[:, 2 * n].reshape(-1, h)).all()
    assert (found["v"] == grouped[:, 2 * n + 1].reshape(-1, h)).all()


def test_swapped_column_halves():
    rule = Rule(
        "mtp.layers.{layer}.eh_proj.weight",
        "h (a:h | b:h)",
        Target("model.mtp_layers.{layer}.input_proj.weight", "h (b | a)"),
    )
    full = numbered((4, 8))
    found = apply(rule, full, {"layer": 0}, h=4)
    want = np.concatenate([full[:, 4:], full[:, :4]], 1)
    assert (found["model.mtp_layers.0.input_proj.weight"] == want).all()
    assert len(rule.expand({"h": 4}).pieces) == 2


def test_swapped_halves_of_every_head():
    rule = Rule("wq_b", "(heads (a:64 | b:64)) h", Target("wq_b", "(heads (b | a)) h"))
    full = numbered((3 * 128, 2))
    want = full.reshape(3, 2, 64, 2)[:, ::-1].reshape(-1, 2)
    assert (apply(rule, full, heads=3, h=2)["wq_b"] == want).all()


def test_three_dimensional_experts():
    rule = Rule(
        "experts.linear_fc1", "@e (*gate:f | *up:f) h", Target("gate_up_proj", "e (gate up) h")
    )
    with pytest.raises(RuleError, match="asks for axes"):
        rule.expand({"e": 2, "f": 3, "h": 4}).pieces  # noqa: B018
    rule = Rule(
        "experts.linear_fc1", "@e (*gate:f | *up:f) h", Target("gate_up_proj", "e (gate | up) h")
    )
    full = numbered((4, 6, 5))
    assert (apply(rule, full, e=4, f=3, h=5)["gate_up_proj"] == full).all()
    share = local_share(rule, full, Cut(2, 3), Cut(1, 2), e=4, f=3, h=5)
    assert (share == full[2:, [2, 5]]).all()


def test_an_expert_fills_its_index_of_a_target():
    """gpt-oss: gate and up alternate in the columns of a tensor that all experts share."""
    rule = Rule("e{expert}", "(two:2 *f) h", Target("gate_up_proj", "expert h (f two)"))
    found = {}
    for expert in range(3):
        full = numbered((8, 5)) + 100 * expert
        write(found, rule, full, {"expert": expert}, experts=3, f=4, h=5)
        want = np.stack([full[:4], full[4:]], axis=-1).swapaxes(0, 1).reshape(5, 8)
        assert (found["gate_up_proj"][expert] == want).all()
    assert found["gate_up_proj"].shape == (3, 5, 8)
    assert (local_share(rule, full, Cut(1, 2), experts=3, f=4, h=5) == full[[2, 3, 6, 7]]).all()


def test_what_alternates_is_one_box():
    rule = Rule("p", "(two:2 f) h", Target("t", "h (f two)"))
    pieces = rule.expand({"f": 50, "h": 3}).pieces
    assert [(p.target_start, p.extent, p.steps) for p in pieces] == [
        ((0, 0), (3, 50), (1, 2)),
        ((0, 1), (3, 50), (1, 2)),
    ]


def test_steps_that_differ_within_a_tensor_are_counted():
    rule = Rule("p", "(a b | c d)", Target("t", "(b a | d c)"))
    for sizes, count in (({"a": 2, "c": 3}, 7), ({"a": 2, "c": 2}, 4), ({"a": 3, "c": 3}, 6)):
        sizes |= {"b": 2, "d": 3}
        full = numbered((2 * sizes["a"] + 3 * sizes["c"],))
        pieces = rule.expand(sizes).pieces
        divides = full.size % sizes["a"] == 0 and sizes["a"] == sizes["c"]
        assert (max(piece.steps for piece in pieces) > (1,)) == divides
        assert len(pieces) == count or not divides
        want = [
            part.reshape(shape).T.reshape(-1)
            for part, shape in zip(
                np.split(full, [2 * sizes["a"]]),
                [(sizes["a"], 2), (sizes["c"], 3)],
                strict=True,
            )
        ]
        assert (apply(rule, full, **sizes)["t"] == np.concatenate(want)).all()


def test_a_number_is_an_axis_only_where_the_name_holds_it():
    with pytest.raises(RuleError, match="axes \\['expert'\\] are not in"):
        Rule("e", "f h", Target("t", "expert f h"))


def test_cuts_inside_a_group():
    rule = Rule("p", "(a *b | c *(e f)) h", Target("t", "(a b) h"), Target("u", "(c e f) h"))
    sizes = {"a": 2, "b": 4, "c": 3, "e": 2, "f": 2, "h": 1}
    full = numbered((20, 1))
    first, second = full[:8].reshape(2, 4), full[8:].reshape(3, 4)
    for rank in (0, 1):
        part = slice(2 * rank, 2 * rank + 2)
        want = np.concatenate([first[:, part].reshape(-1), second[:, part].reshape(-1)])
        assert (local_share(rule, full, Cut(rank, 2), **sizes)[:, 0] == want).all()


@given(st.data())
def test_any_product_and_concatenation(data):
    """Random views of one dimension, read in another order, against numpy's transpose."""
    sizes = {name: data.draw(st.integers(1, 4), label=name) for name in "abc"}
    order = data.draw(st.permutations("abc"))
    rule = Rule("p", "(a b c) h", Target("t", f"({' '.join(order)}) h"))
    full = numbered((sizes["a"] * sizes["b"] * sizes["c"], 2))
    want = full.reshape(sizes["a"], sizes["b"], sizes["c"], 2)
    want = want.transpose(["abc".index(axis) for axis in order] + [3]).reshape(-1, 2)
    assert (apply(rule, full, h=2, **sizes)["t"] == want).all()


def test_shares_cover_the_parameter_once():
    for family, rank_count in itertools.product(FAMILIES.values(), (1, 2, 4)):
        sizes = {"h": 8, "vocab": 16, "layers": 2, "g": 2, "n": 2, "d": 4, "experts": 4}
        sizes |= {"ffn": 8, "moe_ffn": 8, "shared_ffn": 8, "inferred": 4}
        sizes |= {"heads": 4, "q_lora": 8, "kv_lora": 12, "nope": 3, "rope": 4, "dv": 2}
        sizes |= {"gk": 4, "gn": 2, "gv": 8, "gdk": 3, "gdv": 5, "conv": 2}
        sizes |= {"mh": 8, "md": 3, "mg": 4, "ms": 2}
        sizes |= {"vision_h": 8, "vision_heads": 4, "vision_ffn": 12, "vision_out": 3, "merge": 2}
        for rule in family.rules:
            expansion = rule.expand(sizes, sizes["inferred"])
            full = numbered(expansion.shape)
            seen = np.zeros(expansion.shape, int)
            for rank in range(rank_count):
                for start, extent, _ in expansion.place(Cut(rank, rank_count)).regions:
                    seen[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] += 1
            assert seen.min() == seen.max()
            assert seen.max() in (1, rank_count), rule
            apply(rule, full, mtp_numbers({"mtp": 0, "vision": 0}, layers=0, block=1), **sizes)


@pytest.mark.parametrize(
    ("view", "targets", "text"),
    [
        ("a b)", ["a b"], "unexpected"),
        ("(a b", ["a b"], "not closed"),
        ("(a |) b", ["a b"], "alternative is empty"),
        ("a a", ["a"], "occurs twice"),
        ("a b", ["a c"], "axes \\['c'\\] are not in"),
        ("a b", ["a:3 b"], "sizes and marks belong"),
        ("*(a b)", ["*(a b)"], "sizes and marks belong"),
        ("~(a b)", ["~(a b)"], "sizes and marks belong"),
        ("a b", [], "no targets"),
        ("a:? b:?", ["a b"], "more than one inferred"),
        ("a - b", ["a b"], "unexpected text"),
        ("a b c d e f g", ["a b c d e f g"], "more than 6"),
        ("~a ~b", ["a b"], "one ~"),
        ("(~a | b)", ["a"], "one ~"),
    ],
)
def test_rules_without_sense(view, targets, text):
    with pytest.raises(RuleError, match=text):
        Rule("p", view, *(Target(f"t{i}", target) for i, target in enumerate(targets)))


def test_elements_that_go_nowhere():
    rule = Rule("p", "(a | b) h", Target("t", "a h"))
    with pytest.raises(RuleError, match="no target takes"):
        rule.expand({"a": 1, "b": 2, "h": 1}).pieces  # noqa: B018


def test_experts_of_qwen3_5_in_one_parameter():
    """As slime's converter knows them; MTP layers' are one by one in the checkpoint."""
    sizes = {"experts": 4, "moe_ffn": 3, "h": 5, "layers": 2}
    first, second = numbered((4, 6, 5)), numbered((4, 5, 3))
    layer = "decoder.layers.1.mlp.experts"
    inner = "mtp.layers.0.transformer_layer.mlp.experts"
    found = {}
    for prefix in (layer, inner):
        for number, full in ((1, first), (2, second)):
            rule, numbers = FAMILIES["qwen3_5_moe"].find(f"{prefix}.linear_fc{number}")
            write(found, rule, full, {"layer": 1} | numbers, **sizes)
            share = local_share(rule, full, Cut(0, 3), Cut(1, 2), **sizes)
            assert (share == (full[2:, [0, 3]] if number == 1 else full[2:, :, :1])).all()
    experts = "model.language_model.layers.1.mlp.experts"
    assert (found.pop(f"{experts}.gate_up_proj") == first).all()
    assert (found.pop(f"{experts}.down_proj") == second).all()
    for expert in range(4):
        each = f"mtp.layers.0.mlp.experts.{expert}"
        assert (found.pop(f"{each}.gate_proj.weight") == first[expert, :3]).all()
        assert (found.pop(f"{each}.up_proj.weight") == first[expert, 3:]).all()
        assert (found.pop(f"{each}.down_proj.weight") == second[expert]).all()
    assert not found


def test_uneven_cut():
    rule, _ = FAMILIES["llama"].find("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(_core.LayoutError, match="6 elements cannot be cut over 4"):
        rule.expand({"h": 2, "ffn": 6}).place(Cut(0, 4))


def test_unknown_parameter_names_parameter_and_family():
    with pytest.raises(_core.LayoutError) as error:
        FAMILIES["qwen3"].find("decoder.layers.0.mlp.router.weight")
    assert "decoder.layers.0.mlp.router.weight" in str(error.value)
    assert "'qwen3'" in str(error.value)


@pytest.mark.parametrize("name", ["qwen3_moe", "Qwen3MoeConfig", "qwen3moe", "Qwen3MoeForCausalLM"])
def test_family_names(name):
    assert family_of(name).name == "qwen3_moe"


class Args:
    def __init__(self, **values):
        self.__dict__.update(values)


def test_sizes_from_trainer_arguments():
    args = Args(
        hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=None,
        num_layers=3, ffn_hidden_size=96, vocab_size=50, num_experts=None,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    model = read_model(args, "qwen3")
    assert model.family.name == "qwen3"
    assert model.tied is False
    wanted = {"h": 64, "g": 2, "n": 4, "d": 8, "layers": 3, "ffn": 96, "vocab": 50}
    assert wanted.items() <= model.sizes.items()
    assert "experts" not in model.sizes


def test_sizes_of_experts_that_have_no_field_of_their_own():
    args = Args(hidden_size=8, num_attention_heads=2, intermediate_size=6, n_shared_experts=3)
    assert read_model(args, "minimax_m2").sizes["moe_ffn"] == 6
    args.moe_intermediate_size = 4
    assert read_model(args, "glm4_moe").sizes["shared_ffn"] == 12
    args.moe_shared_expert_intermediate_size = 5
    assert read_model(args, "glm4_moe").sizes["shared_ffn"] == 5


def test_a_model_of_vision_and_text_has_its_sizes_in_the_text():
    text = Args(hidden_size=8, num_attention_heads=2, tie_word_embeddings=True)
    config = Args(model_type="qwen3_vl", text_config=text, tie_word_embeddings=False)
    model = read_model(config)
    assert (model.family.name, model.sizes["h"], model.tied) == ("qwen3_vl", 8, True)
    text.tie_word_embeddings = False
    assert not read_model(config).tied


def test_megatrons_arguments_without_grouped_queries():
    args = Args(hidden_size=64, num_attention_heads=8, num_query_groups=1)
    assert read_model(args, "llama").sizes["g"] == 1
    args.group_query_attention = False
    assert read_model(args, "llama").sizes["g"] == 8


def test_shared_experts_of_qwen3_moe_have_slimes_names():
    args = Args(hidden_size=8, num_attention_heads=2, moe_shared_expert_intermediate_size=6)
    family, sizes = read_model(args, "qwen3_moe").family, read_model(args, "qwen3_moe").sizes
    found = {}
    for name in ("linear_fc1.weight", "linear_fc2.weight"):
        rule, numbers = family.find(f"decoder.layers.3.mlp.shared_experts.{name}")
        found |= {p.name.format(**numbers): p.shape for p in rule.expand(sizes).pieces}
    base = "model.layers.3.mlp.shared_experts"
    assert found == {
        f"{base}.gate_proj.weight": (6, 8),
        f"{base}.up_proj.weight": (6, 8),
        f"{base}.down_proj.weight": (8, 6),
    }
    with pytest.raises(_core.LayoutError, match="gate_weight: no rule of the family 'qwen3_moe'"):
        family.find("decoder.layers.3.mlp.shared_experts.gate_weight")


def test_configurations_without_sense():
    with pytest.raises(_core.InvalidArgumentError, match="pass model_name="):
        read_model(Args(hidden_size=8))
    with pytest.raises(_core.LayoutError, match="6 attention heads do not divide into 4"):
        read_model(Args(hidden_size=12, num_attention_heads=6, num_key_value_heads=4), "llama")


def test_a_projection_of_multi_token_prediction_keeps_or_swaps_its_halves():
    full = numbered((4, 8))
    (found,) = apply(eh_proj("mtp.fc"), full, h=4).values()
    assert (found == full).all()
    swapped = eh_proj("mtp.fc", swapped=True)
    (found,) = apply(swapped, full, h=4).values()
    assert (found == np.concatenate([full[:, 4:], full[:, :4]], axis=1)).all()
    assert (local_share(swapped, full, Cut(1, 2), h=4) == full[2:]).all()


MTP_NAMES = {"enorm": "mtp.a", "hnorm": "mtp.b", "projection": "mtp.fc", "norm": "mtp.norm"}


def test_layers_of_multi_token_prediction_in_both_spellings():
    layer = (*EMBEDDING, *ATTENTION, *DENSE_MLP)
    counted = Family("counted", layer, mtp(layer))
    own = Family("own", layer, mtp(layer, "mtp.layers.{mtp}.", **MTP_NAMES))
    for inner in ("transformer_layer", "mtp_model_layer"):
        name = f"mtp.layers.1.{inner}.self_attention.linear_qkv.weight"
        rule, numbers = counted.find(name)
        assert numbers == {"mtp": 1}
        assert rule.targets[0].name == "model.layers.{layer}.self_attn.q_proj.weight"
        rule, _ = own.find(name)
        assert rule.targets[0].name == "mtp.layers.{mtp}.self_attn.q_proj.weight"
        assert counted.match(f"mtp.layers.1.{inner}.embedding.word_embeddings.weight") is None
    rule, _ = counted.find("mtp.layers.0.final_layernorm.weight")
    assert rule.targets[0].name == "model.layers.{layer}.shared_head.norm.weight"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("enorm", "2.enorm"),
        ("final_layernorm", "3.final_layernorm"),
        ("mtp_model_layer.layers.0.pre_mlp_layernorm", "2.norm"),
        ("mtp_model_layer.layers.1.pre_mlp_layernorm", "3.norm"),
    ],
)
def test_layers_of_multi_token_prediction_that_are_blocks(name, target):
    rule, numbers = FAMILIES["nemotron_h"].find(f"mtp.layers.1.{name}.weight")
    assert "block" in rule.sizes
    (piece,) = rule.expand({"h": 4}).pieces
    (found, *_) = piece.map(mtp_numbers(numbers, layers=9, block=2))
    assert found == f"mtp.layers.{target}.weight"


def test_a_loader_may_have_rules_of_its_own():
    swapped = {"slime": (eh_proj("mtp.fc", swapped=True),)}
    family = Family("own", mtp(DENSE_MLP, "mtp.layers.{mtp}.", **MTP_NAMES), loaders=swapped)
    found = {
        loader: apply(family.loaded_by(loader).find("mtp.layers.0.eh_proj.weight")[0], full, h=2)
        for full in (numbered((2, 4)),)
        for loader in ("megatron", "slime")
    }
    assert found["megatron"]["mtp.fc.weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["slime"]["mtp.fc.weight"].tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    fc2 = "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"
    assert family.loaded_by("slime").find(fc2)[1] == {"mtp": 0}


def test_an_unknown_loader_is_refused():
    text = "loaded_by='bridge': known are 'megatron', 'slime'"
    with pytest.raises(_core.InvalidArgumentError, match=text):
        read_model(object(), "qwen3", "bridge")


def test_sizes_may_be_sums():
    rule = Rule("q", "*(heads both:nope+2) h", Target("q", "(heads both) h"))
    assert rule.expand({"heads": 3, "nope": 4, "h": 2}).shape == (18, 2)
    with pytest.raises(KeyError, match="nope"):
        rule.expand({"heads": 3, "h": 2})
    with pytest.raises(RuleError, match=r"'nope\+' is not a size"):
        Rule("q", "both:nope+", Target("q", "both"))


@pytest.mark.parametrize(("rows", "heads"), [(0, 0), (12, 3), (10, None)])
def test_an_inferred_factor(rows, heads):
    rule = Rule("q", "(heads:? (b:2 | a:2)) h", Target("q", "(heads (a | b)) h"))
    assert rule.inferred({"h": 5}, rows) == heads


def test_a_parameter_that_may_be_whole_is_cut_where_it_is_not():
    rule = Rule("q", "~(a | b) h", Target("q", "(a | b) h"))
    full = numbered((6, 2))
    assert (local_share(rule, full, Cut(1, 3), a=1, b=5, h=2) == full[2:4]).all()


def test_latent_attention_needs_no_query_groups():
    args = Args(
        hidden_size=64, num_attention_heads=8, num_query_groups=3, kv_channels=None,
        num_layers=3, q_lora_rank=None, kv_lora_rank=16, qk_head_dim=12, qk_pos_emb_head_dim=4,
        v_head_dim=10, n_shared_experts=2, moe_ffn_hidden_size=6,
    )  # fmt: skip
    sizes = read_model(args, "kimi_k2").sizes
    assert (sizes["nope"], sizes["rope"], sizes["dv"], sizes["shared_ffn"]) == (12, 4, 10, 12)
    assert "q_lora" not in sizes and "n" not in sizes
    with pytest.raises(_core.LayoutError, match="do not divide into 3"):
        read_model(args, "qwen3")
    hf = Args(hidden_size=64, num_attention_heads=8, qk_nope_head_dim=12, qk_head_dim=16)
    assert read_model(hf, "deepseek_v3").sizes["nope"] == 12


def test_an_axis_may_be_in_several_alternatives():
    rule = Rule(
        "w",
        "(*key:2 q:1 | *key:2 k:2 | *key:2 v:3)",
        Target("grouped", "(key (q | k | v))"),
        Target("flat", "(key q | key k)"),
    )
    full = np.arange(12)
    found = apply(rule, full)
    assert found["grouped"].tolist() == [0, 2, 3, 6, 7, 8, 1, 4, 5, 9, 10, 11]
    assert found["flat"].tolist() == [0, 1, 2, 3, 4, 5]
    assert local_share(rule, full, Cut(1, 2)).tolist() == [1, 4, 5, 9, 10, 11]
    with pytest.raises(RuleError, match="axis 'a' has two sizes"):
        Rule("w", "(a:1 | a:2)", Target("t", "a"))
    with pytest.raises(RuleError, match="axis 'a' occurs twice"):
        Rule("w", "(b:1 | c:1 (a:2 | b:1)) a:2", Target("t", "a"))


def test_a_target_may_be_computed():
    rule = Rule("w", "a:4", Target("t", "a", offset=1.0), Target("u", "a", scale=-2.0))
    maps = rule.expand({}).maps(rule.expand({}).place(Cut()), {})
    assert [found[8:] for found in maps] == [(1.0, 1.0), (-2.0, 0.0)]
    builder = _core.LayoutBuilder()
    builder.add_parameter("p", 0, "float32", (1,), [((0,), (4,), (0,))], maps)
    assert builder.build().shards(1)[0].affine == (-2.0, 0.0)


def test_delta_nets_of_uneven_heads_are_refused():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "linear_num_key_heads": 2}
    with pytest.raises(_core.LayoutError, match="3 value heads do not divide over 2 key heads"):
        read_model(types.SimpleNamespace(**sizes, linear_num_value_heads=3), "qwen3_next")
