"""Layouts of FSDP trainers: DTensors of any mesh, FSDP1's flat parameters and sharded state dicts.

A rank's part of a parameter is one box if it is a DTensor (by its placements) or a ShardedTensor
(by its metadata).  It may be several boxes if it is an interval of a flat parameter.  The local
tensor must agree.  Shards are read in place: nothing is communicated and nothing copied.

Names are paths in the module tree without wrappers: Hugging Face's own names.  Tensors that
transformers fuses at run time get their names from the rules of `wsync.families.RUNTIME`.

Replicas (a `Replicate` placement, a plain tensor) are the same boxes on several ranks.  `Partial`
placements are refused, because their values are terms of a sum.

Formats: `torch.distributed.tensor` and `torch.distributed.fsdp` of torch 2.10 to 2.13, and
Megatron-FSDP's DTensors.  Only the tensors of Megatron-FSDP's state_dict() tell its uneven cuts.

Run this on all ranks:

>>> for part in (*model.model.layers, model):
...     _ = fully_shard(part)
>>> layout = wsync.fsdp.layout(model)
>>> with wsync.connect(layout, engines=["http://127.0.0.1:30000"]) as sync:
...     train_step(model)
...     report = sync.update(version=1)
"""

from wsync.fsdp.model_layout import layout as layout
from wsync.fsdp.parts import plain_name as plain_name
