"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do.

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

from wsync.families import blocks as blocks
from wsync.families.registry import register as register
from wsync.families.rules import Rule as Rule
from wsync.families.rules import RuleError as RuleError
from wsync.families.rules import Target as Target
from wsync.families.runtime_names import RUNTIME as RUNTIME
