"""Layouts of FSDP trainers: DTensors of any mesh, FSDP1's flat parameters and sharded state dicts.

What a rank holds of a parameter is a box, known from the placements of its DTensor or the metadata
of its ShardedTensor, or several: the interval of the flat parameter that it keeps.  The local
tensor must agree.  Shards are read where they lie: nothing is communicated and nothing copied.

Names are those of the module tree without wrappers, which are Hugging Face's own; what transformers
fuses at run time goes through the rules of `wsync.families.RUNTIME`.

Replicas (a `Replicate` placement, a plain tensor) are the same boxes on several ranks.  `Partial`
placements are sums that are not added up, and are refused.

Formats: `torch.distributed.tensor` and `torch.distributed.fsdp` of torch 2.10 to 2.13, and the
DTensors that Megatron-FSDP makes, whose uneven cuts only the tensors of its state_dict() tell.

On all ranks:

>>> for part in (*model.model.layers, model):
...     _ = fully_shard(part)
>>> layout = wsync.fsdp.layout(model)
>>> with wsync.connect(layout, engines=["http://127.0.0.1:30000"]) as sync:
...     train_step(model)
...     report = sync.update(version=1)
"""

from wsync.fsdp.model_layout import layout as layout
from wsync.fsdp.parts import plain_name as plain_name
