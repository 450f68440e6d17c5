"""The rule language: boxes from unsharded Megatron parameters to Hugging Face tensors.

Expansions are applied to arrays whose elements are all different and compared with numpy's own
reshape, transpose, split and concatenate.
"""

import itertools
import re
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync import _core
from wsync.families.blocks import DENSE_MLP, eh_proj, mtp
from wsync.families.registry import FAMILIES, Family, family_of, read_model
from wsync.families.rules import PLACEHOLDER, Cut, Rule, RuleError, Target, mtp_numbers


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


def test_more_ranks_than_query_groups_cut_inside_a_group():
    rule, _ = FAMILIES["qwen3"].find("decoder.layers.0.self_attention.linear_qkv.weight")
    sizes = {"g": 2, "n": 2, "d": 3, "h": 2}
    full = numbered((24, 2))
    assert (local_share(rule, full, Cut(1, 4), **sizes) == full[6:12]).all()
    expansion = rule.expand(sizes)
    placement = expansion.place(Cut(1, 4))
    names = {p.name.split(".")[4] for p in expansion.pieces if placement.meets(p)}
    assert names == {"k_proj", "v_proj"}  # the group's second half: its keys and values


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
        shapes = {}
        for rule in family.rules:
            expansion = rule.expand(sizes, sizes["inferred"])
            full = numbered(expansion.shape)
            seen = np.zeros(expansion.shape, int)
            for rank in range(rank_count):
                for start, extent, _ in expansion.place(Cut(rank, rank_count)).regions:
                    seen[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] += 1
            assert seen.min() == seen.max()
            assert seen.max() in (1, rank_count), rule
            numbers = mtp_numbers({"mtp": 0, "vision": 0}, layers=0, block=1)
            for target, array in apply(rule, full, numbers, **sizes).items():
                taken = any(family.find(PLACEHOLDER.sub("0", n))[0] is rule for n in rule.names)
                if taken and rule.inferred_dimension < 0:
                    assert shapes.setdefault(target, array.shape) == array.shape, rule


@pytest.mark.parametrize(
    ("view", "targets", "text"),
    [
        ("a b)", ["a b"], "is not a valid view"),
        ("(a b", ["a b"], "is not a valid view"),
        ("a | b", ["a b"], "is not a valid view"),
        ("a) (b", ["a b"], "is not a valid view"),
        ("(a |) b", ["a b"], "no target takes"),
        ("a:? b:?", ["a b"], "is not a valid view"),
        ("~a ~b", ["a b"], "is not a valid view"),
        ("(~a | ~b)", ["a"], "is not a valid view"),
        ("a b", ["a c"], "asks for axes \\['c'\\], which no dimension"),
        ("a - b", ["a b"], "is not a valid view"),
    ],
)
def test_rules_without_sense(view, targets, text):
    text = f"^{re.escape(repr(view))} {text}" if text == "is not a valid view" else text
    with pytest.raises(RuleError, match=text):
        rule = Rule("p", view, *(Target(f"t{i}", target) for i, target in enumerate(targets)))
        rule.expand({"a": 1, "b": 2}).pieces  # noqa: B018


def test_elements_that_go_nowhere():
    rule = Rule("p", "(a | b) h", Target("t", "a h"))
    with pytest.raises(RuleError, match="no target takes"):
        rule.expand({"a": 1, "b": 2, "h": 1}).pieces  # noqa: B018


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


def test_configurations_without_sense():
    with pytest.raises(_core.InvalidArgumentError, match="pass model_name="):
        read_model(Args(hidden_size=8))
    with pytest.raises(
        _core.LayoutError, match="num_attention_heads 6 is not a multiple of num_key_value_heads 4"
    ):
        read_model(Args(hidden_size=12, num_attention_heads=6, num_key_value_heads=4), "llama")


MTP_NAMES = {"enorm": "mtp.a", "hnorm": "mtp.b", "projection": "mtp.fc", "norm": "mtp.norm"}


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
    text = "loaded_by='bridge': it must be 'megatron' or 'slime'"
    with pytest.raises(_core.InvalidArgumentError, match=text):
        read_model(object(), "qwen3", "bridge")


@pytest.mark.parametrize(("rows", "heads"), [(0, 0), (12, 3), (10, None)])
def test_an_inferred_factor(rows, heads):
    rule = Rule("q", "(heads:? (b:2 | a:2)) h", Target("q", "(heads (a | b)) h"))
    assert rule.inferred({"h": 5}, rows) == heads


def test_a_parameter_that_may_be_whole_is_cut_where_it_is_not():
    rule = Rule("q", "~(a | b) h", Target("q", "(a | b) h"))
    full = numbered((6, 2))
    assert (local_share(rule, full, Cut(1, 3), a=1, b=5, h=2) == full[2:4]).all()


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
    with pytest.raises(RuleError, match=r"use \['layr'\], which the rule lacks"):
        Rule("p.{layer}", "a", Target("t.{layr}", "a"))
    with pytest.raises(RuleError, match="axis 'a' has two sizes"):
        Rule("w", "(a:1 | a:2)", Target("t", "a"))
    twice = Rule("w", "(b:1 | c:1 (a:2 | b:1)) a:2", Target("t", "a"))
    with pytest.raises(RuleError, match="axes \\['a'\\], which no alternative has"):
        twice.expand({}).pieces  # noqa: B018


def test_delta_nets_of_uneven_heads_are_refused():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "linear_num_key_heads": 2}
    with pytest.raises(
        _core.LayoutError, match="linear_num_value_heads 3 is not a multiple of linear_num_key"
    ):
        read_model(types.SimpleNamespace(**sizes, linear_num_value_heads=3), "qwen3_next")
