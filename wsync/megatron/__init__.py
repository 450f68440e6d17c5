"""Layouts of Megatron-Core trainers.

A rank's part of a parameter follows from the family's rule (which dimension is cut, and how), the
configuration's sizes, and this rank's place in Megatron's groups (the model's own pg_collection, or
parallel_state's).  The local shape must agree.  wsync uses Megatron's attributes of a parameter
only to see whether a rank holds it whole, because the other attributes can be wrong or missing.  In
0.16 the second linear layer of TransformerEngine experts names dimension 0 as cut instead of 1, and
the embedding and the head of a model that Megatron-Bridge has loaded have no attributes.

Replicas (data parallel, context parallel, a tied embedding on the last pipeline stage) are the
same boxes on several ranks.

If a converter replaces the family (wsync.families.probed_converter), the modules of the parameters
tell how they are cut (wsync.families.shares).

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
