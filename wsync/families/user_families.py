"""Families that a user adds to the tables, what every table is checked for, and the list of all.

A family from nothing to a verified one, for a model whose feed-forward part has a name of its own:

    from wsync.families import Rule, Target, blocks, register

    FFN = (
        Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
             "(*gate:ffn | *up:ffn) h",
             Target("model.layers.{layer}.feed_forward.w1.weight", "gate h"),
             Target("model.layers.{layer}.feed_forward.w3.weight", "up h")),
        Rule("decoder.layers.{layer}.mlp.linear_fc2.weight",
             "h *ffn",
             Target("model.layers.{layer}.feed_forward.w2.weight", "h ffn")),
    )
    register("my_model", (*blocks.EMBEDDING, *blocks.ATTENTION, *FFN))

    layout = wsync.megatron.layout(chunks, config, model_name="my_model")

1. Write a rule for each kind of parameter that `named_parameters()` of a rank shows;
   `wsync.families.rules` explains views.  `wsync.families.blocks` has what most models share.
2. `register` tries the table with small sizes, and names a rule that cannot be right: elements
   that go nowhere or twice, targets of two shapes, sizes that no configuration gives.
3. `wsync.megatron.layout` refuses, by name, a parameter that no rule matches and one that has
   another shape than its rule says.
4. What no check can know is the order of rows.  Compare one update with an export that you trust:
   compare the tensors that an engine then has, or logits of engine and trainer.
"""

from __future__ import annotations

import argparse
import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wsync import _core
from wsync.families.registry import BRIDGED, DERIVED, FAMILIES, FIELDS, LOADERS, Family
from wsync.families.rules import Rule, RuleError, Together, mtp_numbers

_Shape = Sequence[int]
_Place = tuple[int, ...]
_Fill = tuple[_Shape, collections.Counter[_Place]]


def register(
    name: str,
    rules: Iterable[Rule],
    *,
    fields: Mapping[str, Sequence[str]] | None = None,
    loaders: Mapping[str, tuple[Rule, ...]] | None = None,
    together: Together = (),
    settings: Mapping[str, Any] | None = None,
) -> Family:
    """Adds a family of this process to those that `wsync.megatron.layout` knows, or replaces one
    that was added before.

    Args:
        name: as `model_type` of the configuration or `model_name` has it, for example "my_model".
        rules: one for each kind of parameter; of two that match a name, the first is taken.
        fields: sizes of the rules' views that are not in `wsync.families.registry.FIELDS`: the
            names that each has in configurations.
        loaders: rules that go before these for models that were loaded by "slime".
        together: sets of modules, by the last part of their names, whose tensors within one parent
            engines take in one call only.
        settings: fields of Megatron's TransformerConfig and the values for which the rules hold,
            for example {"layernorm_zero_centered_gamma": False}; `wsync.megatron.layout` compares
            them with every layer's configuration, and refuses a field that has no such name there.

    Raises:
        RuleError: the table cannot be right; the text names the rule, see `check`.
        InvalidArgumentError: wsync has a family of this name, or there is no such loader.
    """
    if name in FAMILIES and not FAMILIES[name].added:
        raise _core.InvalidArgumentError(f"there is a family {name!r} already")
    for loader, own in (loaders or {}).items():
        if loader not in LOADERS:
            raise _core.InvalidArgumentError(
                f"no loader {loader!r}: known are {', '.join(LOADERS)}"
            )
        check(Family(name, own, fields=fields))
    family = Family(
        name,
        tuple(rules),
        fields=fields,
        loaders=loaders,
        together=together,
        settings=settings or {},
    )
    check(family)
    FAMILIES[name] = family
    return family


def check(family: Family) -> None:
    """Tries a table with small sizes.

    Raises:
        RuleError: there are no rules; elements of a parameter go to no target; a target gets some
            twice; two rules give a target different shapes, or have one name; nothing says what a
            size is.
    """
    if not family.rules:
        raise RuleError(f"family {family.name!r}: it has no rules")
    known = {*FIELDS, *family.fields, *DERIVED}
    names: set[str] = set()
    shapes: dict[str, tuple[Rule, _Shape]] = {}
    for rule in family.rules:
        if rule.name in names:
            raise RuleError(f"{rule.name}: two rules have this name")
        names.add(rule.name)
        if unknown := rule.sizes - known:
            raise RuleError(
                f"{rule.name}: nothing says what the size {min(unknown)!r} is: give its name in "
                "configurations with fields="
            )
        for target, (shape, counts) in _fills(rule, known).items():
            if max(counts.values()) > 1:
                raise RuleError(f"{rule.name}: writes elements of {target} twice")
            first, other = shapes.setdefault(target, (rule, shape))
            if other != shape and rule.inferred_dimension < 0 and first.inferred_dimension < 0:
                raise RuleError(
                    f"{rule.name}: gives {target} another shape than {first.name} (with small "
                    f"sizes, {shape} and {other})"
                )


def _fills(rule: Rule, known: Iterable[str]) -> dict[str, _Fill]:
    """What a rule writes to its targets: how often each of their elements."""
    sizes = {name: 2 + index % 3 for index, name in enumerate(sorted(known))}
    sizes |= {"heads": sizes["g"] * sizes["n"], "gv": sizes["gk"] * sizes["gn"]}
    experts = range(sizes["experts"]) if "{expert}" in rule.name else (0,)
    found: dict[str, _Fill] = {}
    pieces = rule.expand(sizes, inferred=1).pieces
    for expert in experts:
        for piece in pieces:
            numbers = mtp_numbers({"mtp": 0, "vision": 0, "expert": expert}, 0, sizes["block"])
            name, _, shape, start, _, extent, *_ = piece.map(numbers)
            fill = found.setdefault(name, (shape, collections.Counter()))
            ends = zip(start, extent, piece.steps, strict=True)
            fill[1].update(
                itertools.product(*(range(a, a + n * step, step) for a, n, step in ends))
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """`wsync families`: lists what `wsync.megatron.layout` knows."""
    parser = argparse.ArgumentParser(
        prog="wsync families",
        description="Lists the model families of Megatron-Core trainers that wsync can name, by "
        "model_type, and what their tensors were compared with, bit for bit.",
    )
    parser.parse_args(argv)
    width = max(map(len, FAMILIES))
    print(f"{'family':<{width}}  compared with\n")
    for name, family in sorted(FAMILIES.items()):
        print(f"{name:<{width}}  {'added by the user' if family.added else family.oracle}")
    print(f"\nWithout a table, by Megatron-Bridge's own mappings (bridge=): {', '.join(BRIDGED)}.")
    print("\nwsync.families.register adds one; pydoc wsync.families.user_families shows how.")
    return 0
