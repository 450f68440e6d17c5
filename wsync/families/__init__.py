"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do.

How to add a family, for a model that gives its feed-forward part another name:

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

1. Write a rule for each kind of parameter in a rank's `named_parameters()`.
   `wsync.families.rules` explains views; `wsync.families.blocks` has rules that most models share.
2. Call `wsync.megatron.layout`.  It raises an error that names the parameter if no rule matches,
   if the shape differs from the rule's, if elements have no target, or if a size is not known.
3. Check the order of rows yourself, because wsync cannot.  Compare one update with an export that
   you trust: either the tensors in the engine, or the logits of engine and trainer.
"""

from wsync.families import blocks as blocks
from wsync.families.registry import register as register
from wsync.families.rules import Rule as Rule
from wsync.families.rules import RuleError as RuleError
from wsync.families.rules import Target as Target
from wsync.families.runtime_names import RUNTIME as RUNTIME
