"""What a table of families, a user's among them, says of layers and sizes is what a trainer has."""

from types import SimpleNamespace

import pytest
import torch
from support import own_family

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import wsync
from wsync.families.registry import FAMILIES, FIELDS, Family, read_model
from wsync.families.rules import Cut

SIZES = {
    **{"h": 7, "vocab": 41, "layers": 1, "mtp": 1, "heads": 6, "g": 2, "d": 5, "ffn": 13},
    **{"moe_ffn": 17, "shared_ffn": 19, "gk": 2, "gv": 4, "gdk": 3, "gdv": 23, "conv": 4},
    **{"experts": 3, "q_lora": 29, "kv_lora": 31, "nope": 9, "rope": 2, "dv": 8, "inner": 37},
}
ALL_FIELDS = {**FIELDS, **own_family.FIELDS, "inner": ("inner_size",)}
CONFIG = SimpleNamespace(**{ALL_FIELDS[size][0]: extent for size, extent in SIZES.items()})
NUMBERS = {"layer": 0, "mtp": 0}


def expanded(rule):
    sizes = read_model(CONFIG, family=Family("all", (rule,), fields=ALL_FIELDS)).sizes
    sizes = sizes | {"n": SIZES["heads"] // SIZES["g"], "gn": SIZES["gv"] // SIZES["gk"]}
    return rule.expand(sizes, inferred=1)


def parameters_of(rule):
    experts = range(SIZES["experts"]) if "{expert}" in rule.name else (0,)
    return [rule.names[0].format(**NUMBERS, expert=expert) for expert in experts]


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


def configured(**fields):
    """A model of one layer, whose configuration has these fields."""
    module = module_of(
        rule for rule in own_family.RULES if rule.names[0].endswith(".input_layernorm.weight")
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
