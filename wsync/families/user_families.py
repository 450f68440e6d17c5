"""Families that a user adds to the tables, and the list of all.

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
2. `wsync.megatron.layout` refuses, by name, a parameter that no rule matches, one that has another
   shape than its rule says, one whose elements go nowhere, and a size that no configuration gives.
3. What no check can know is the order of rows.  Compare one update with an export that you trust:
   compare the tensors that an engine then has, or logits of engine and trainer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wsync import _core
from wsync.families.registry import BRIDGED, FAMILIES, LOADERS, Family
from wsync.families.rules import Rule, Together


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
        InvalidArgumentError: wsync has a family of this name, or there is no such loader.
    """
    if name in FAMILIES and not FAMILIES[name].added:
        raise _core.InvalidArgumentError(f"there is a family {name!r} already")
    if unknown := {*(loaders or {})}.difference(LOADERS):
        raise _core.InvalidArgumentError(
            f"no loader {min(unknown)!r}: known are {', '.join(LOADERS)}"
        )
    family = Family(
        name,
        tuple(rules),
        fields=fields,
        loaders=loaders,
        together=together,
        settings=settings or {},
    )
    FAMILIES[name] = family
    return family


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
