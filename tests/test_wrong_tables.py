"""Tables of a user with one error each: which check refuses it, and what it names.

A bare module has a parameter for every rule of a right table.  The table with an error is
registered, makes a layout of that module, and is compared with a checkpoint of the right one; one
of these has to refuse it.  Sizes differ, so that no two dimensions are of one length: the order of
rows within a dimension is what no check can know.
"""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import own_family

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import wsync
from wsync.families import Rule, RuleError, Target, user_families
from wsync.families.registry import FAMILIES, FIELDS, Family, read_model
from wsync.families.rules import Cut
from wsync.trainer.checkpoint_check import compare

SIZES = {
    **{"h": 7, "vocab": 41, "layers": 1, "mtp": 1, "heads": 6, "g": 2, "d": 5, "ffn": 13},
    **{"moe_ffn": 17, "shared_ffn": 19, "gk": 2, "gv": 4, "gdk": 3, "gdv": 23, "conv": 4},
    **{"experts": 3, "q_lora": 29, "kv_lora": 31, "nope": 9, "rope": 2, "dv": 8, "inner": 37},
}
ALL_FIELDS = {**FIELDS, **own_family.FIELDS, "inner": ("inner_size",)}
CONFIG = SimpleNamespace(**{ALL_FIELDS[size][0]: extent for size, extent in SIZES.items()})
NUMBERS = {"layer": 0, "mtp": 0}
RIGHT = {
    "own": own_family.RULES,
    **{
        name: FAMILIES[name].rules
        for name in ("glm4", "gpt_oss", "glm_moe_dsa", "qwen3_next", "minimax_m2", "bailing_moe_v2")
    },
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """{name: (rules, module with their parameters, folder of their checkpoint)}."""
    found = {}
    for name, rules in RIGHT.items():
        folder = tmp_path_factory.mktemp(name)
        kept = without_others(rules)
        module = module_of(kept)
        layout = wsync.megatron.layout(module, CONFIG, model_name=registered(kept).name).layout
        facts = [layout.tensor(index)[:3] for index in range(layout.tensor_count)]
        save_file(
            {n: torch.zeros(shape, dtype=getattr(torch, dtype)) for n, dtype, shape in facts},
            folder / "model.safetensors",
        )
        found[name] = kept, module, folder
    return found


def registered(rules, fields=None, **options):
    fields = {"inner": ("inner_size",), **(fields or {})}
    return user_families.register("wrong", rules, fields=fields, **options)


def without_others(rules):
    """Of rules for other spellings of one parameter the first, and none of legacy experts."""
    found, claimed = [], set()
    for rule in rules:
        targets = {(piece.name, piece.target_start) for piece in expanded(rule).pieces}
        if rule.stored is None and not targets & claimed:
            found.append(rule)
            claimed |= targets
    return tuple(found)


def expanded(rule):
    sizes = read_model(CONFIG, family=Family("all", (rule,), fields=ALL_FIELDS)).sizes
    sizes = sizes | {"n": SIZES["heads"] // SIZES["g"], "gn": SIZES["gv"] // SIZES["gk"]}
    return rule.expand(sizes, inferred=1)


def parameters_of(rule):
    experts = range(SIZES["experts"]) if "{expert}" in rule.name else (0,)
    return [rule.name.format(**NUMBERS, expert=expert) for expert in experts]


def module_of(rules):
    root = torch.nn.Module()
    for rule in rules:
        shape = expanded(rule).place(Cut()).shape
        for name in parameters_of(rule):
            *path, last = name.split(".")
            home = root
            for part in path:
                if part not in home._modules:
                    home.add_module(part, torch.nn.Module())
                home = home._modules[part]
                home.layer_number = 1  # what matters of layers
            home.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    return root


def dimensions(view):
    """The text of each dimension of a view."""
    found, depth = [""], 0
    for letter in view:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def exchanged(view, pick):
    parts = dimensions(view)
    a, b = pick.sample(range(len(parts)), 2)
    parts[a], parts[b] = parts[b], parts[a]
    return " ".join(parts)


def other_target(rule, index, **changes):
    old = rule.targets[index]
    new = Target(**{**old.__dict__, **changes})
    return Rule(rule.name, rule.parsed.text, *rule.targets[:index], new, *rule.targets[index + 1 :])


def missing_rule(rule, others, pick):
    return None


def doubled_target(rule, others, pick):
    return Rule(rule.name, rule.parsed.text, *rule.targets, pick.choice(rule.targets))


def missing_target(rule, others, pick):
    if len(rule.targets) < 2:
        return rule
    left = list(rule.targets)
    left.remove(pick.choice(left))
    return Rule(rule.name, rule.parsed.text, *left)


def exchanged_axes(rule, others, pick):
    if len(dimensions(rule.parsed.text)) < 2:
        return rule
    return Rule(rule.name, exchanged(rule.parsed.text, pick), *rule.targets)


def exchanged_axes_of_a_target(rule, others, pick):
    index = pick.randrange(len(rule.targets))
    if len(dimensions(rule.targets[index].view)) < 2:
        return rule
    return other_target(rule, index, view=exchanged(rule.targets[index].view, pick))


def wrong_size(rule, others, pick):
    """Another size for one axis, wherever the view has it."""
    named = sorted(set(re.findall(r"[a-z_]\w*", rule.parsed.text)) & SIZES.keys())
    if not named:
        return rule
    size = pick.choice(named)
    wrong = pick.choice([other for other in sorted(SIZES) if SIZES[other] != SIZES[size]])
    text = re.sub(rf"(?<=[:+]){size}\b", wrong, rule.parsed.text)
    axis = re.compile(rf"(?<![\w:+]){size}(?![\w:])")
    return Rule(rule.name, axis.sub(f"{size}:{wrong}", text), *rule.targets)


def another_rules_target(rule, others, pick):
    name = pick.choice([t for other in others for t in other.targets]).name
    index = pick.randrange(len(rule.targets))
    return other_target(rule, index, name=name)


ERRORS = (
    *(missing_rule, doubled_target, missing_target, exchanged_axes, exchanged_axes_of_a_target),
    *(wrong_size, another_rules_target),
)


@pytest.mark.parametrize("error", ERRORS, ids=[error.__name__ for error in ERRORS])
@pytest.mark.parametrize("name", RIGHT)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_an_error_in_a_table_is_refused_by_name(tables, name, error, seed):
    rules, module, folder = tables[name]
    pick = random.Random(seed)
    rule = pick.choice(rules)
    others = tuple(other for other in rules if other is not rule)
    try:
        wrong = error(rule, others, pick)
    except RuleError as refused:  # already where it is written down
        assert any(text in str(refused) for text in names_of(rule))
        return
    if wrong is rule:
        return  # has nothing for this error
    table = tuple(r for r in (wrong if r is rule else r for r in rules) if r is not None)
    with pytest.raises((RuleError, wsync.LayoutError)) as refused:
        compare(
            wsync.megatron.layout(module, CONFIG, model_name=registered(table).name).layout, folder
        )
    said = str(refused.value)
    known = names_of(rule) + ([] if wrong is None else targets_of(wrong))
    assert any(text in said for text in known), (rule, wrong, said)


def names_of(rule):
    """Of the rule, of its parameters, and of tensors that it writes."""
    pieces = [
        piece.map({**NUMBERS, "layer": SIZES["layers"] * ("mtp" in rule.name), "expert": expert})
        for piece in expanded(rule).pieces
        for expert in (0, 1, 2)
    ]
    return [rule.name, *parameters_of(rule), *(piece[0] for piece in pieces)]


def targets_of(rule):
    """Names of tensors, of a rule that may be wrong."""
    experts = {"expert": 0, "experts": 0}
    layers = (0, SIZES["layers"])
    return [
        target.name.format(**{**NUMBERS, **experts, "layer": layer})
        for target in rule.targets
        for layer in layers
    ]


def configured(**fields):
    """A model of one layer, whose configuration has these fields."""
    module = module_of(
        rule for rule in RIGHT["own"] if rule.name.endswith(".input_layernorm.weight")
    )
    module.decoder.layers.get_submodule("0").config = SimpleNamespace(**fields)
    return module


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_are_as_the_family_needs_them(name):
    needed = FAMILIES[name].settings
    for loader in ("megatron", "slime"):
        make = {"config": CONFIG, "model_name": name, "loaded_by": loader}
        wsync.megatron.layout(configured(**needed), **make)
        for field, value in needed.items():
            other = 8 if value is None else not value
            with pytest.raises(wsync.LayoutError) as refused:
                wsync.megatron.layout(configured(**{**needed, field: other}), **make)
            assert str(refused.value) == (
                f"decoder.layers.0: the trainer's {field} is {other}, but the family {name!r} "
                f"needs {value}"
            )


def test_a_users_table_says_what_it_needs():
    module = configured(rotary_interleaved=True, kv_channels=5, num_query_groups=2)
    for known, accepted in ({}, True), ({"rotary_interleaved": False}, False):
        registered(RIGHT["own"], settings=known)
        if accepted:
            wsync.megatron.layout(module, CONFIG, model_name="wrong")
        else:
            with pytest.raises(wsync.LayoutError, match="rotary_interleaved is True, but"):
                wsync.megatron.layout(module, CONFIG, model_name="wrong")


def test_a_setting_that_no_configuration_has_is_named():
    registered(RIGHT["own"], settings={"rotary_interleave": False})
    with pytest.raises(wsync.LayoutError, match="no field 'rotary_interleave', which the settings"):
        wsync.megatron.layout(configured(), CONFIG, model_name="wrong")


def test_a_size_that_a_users_table_reads_elsewhere_is_its_own():
    """Megatron's kv_channels is what the usual tables call d, and not what this one does."""
    module = configured(kv_channels=SIZES["d"] + 1)
    registered(RIGHT["own"])
    with pytest.raises(wsync.LayoutError, match="kv_channels is 6, but the configuration says 5"):
        wsync.megatron.layout(module, CONFIG, model_name="wrong")
    registered(RIGHT["own"], fields={"d": ("own_channels",)})
    own = SimpleNamespace(**vars(CONFIG), own_channels=SIZES["d"])
    wsync.megatron.layout(module, own, model_name="wrong")


@pytest.fixture(autouse=True)
def _forget():
    yield
    FAMILIES.pop("wrong", None)
