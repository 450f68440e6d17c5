"""Layouts of Megatron-Core trainers.

What a rank holds of a parameter follows from the family's rule (which dimension is cut, and how),
the sizes of the configuration, and this rank's place in Megatron's groups (the model's own
pg_collection, or parallel_state's); the local shape must agree.  The attributes that Megatron puts
on parameters say only whether one that rules may cut is whole, because others are wrong: on 0.16
the second linear layer of TransformerEngine experts calls dimension 0 cut where it is 1, and
nothing describes the embedding and the head of a model that Megatron-Bridge has loaded.

Replicas (data parallel, context parallel, a tied embedding on the last pipeline stage) are the
same boxes on several ranks.

Where a converter stands in for the family (wsync.families.probed_converter), the modules that hold
the parameters say how those are cut (wsync.families.shares).

In a training loop of your own, on all ranks (`chunks`: what Megatron's get_model returns):

>>> layout = wsync.megatron.layout(chunks, hf_config)
>>> with wsync.connect(layout, engines=["http://127.0.0.1:30000"]) as sync:
...     for step in (1, 2):
...         train_step(chunks)
...         report = sync.update(version=step)
...         log(report.metrics(), step)
"""

from wsync.megatron.model_layout import layout as layout
from wsync.megatron.ranks import Ranks as Ranks
