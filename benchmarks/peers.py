"""The peers' way of updating weights, as slime 0.2.2 and SGLang do it.

Gather: per bucket every parameter is broadcast over the pipeline stages, then all-gathered over
tensor parallelism, one asynchronous collective per tensor, concatenated and converted to Hugging
Face names.  Delivery: SGLang's FlattenedTensorBucket of at most 512 MiB, serialised by torch's
shared-memory reductions, one call per bucket, and one copy_ per tensor on the other side.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from support import hf_reference

BUCKET_NBYTES = 512 << 20
# what torch uses on its own: one for each core of the process
DEFAULT_THREADS = len(os.sched_getaffinity(0))
Named = tuple[str, torch.Tensor]


def send(
    named_tensors: Iterable[Named],
    bucket_class: Any,
    call: Callable[..., object],
    *,
    workers: int = 1,
) -> None:
    """Flattens, serialises and hands over buckets, each after the one before was loaded.

    Every worker gets a payload of its own; here all of them read one bucket.
    """
    for bucket in buckets(named_tensors):
        flattened = bucket_class(named_tensors=bucket)
        payload = {
            "flattened_tensor": flattened.get_flattened_tensor(),
            "metadata": flattened.get_metadata(),
        }
        call(*(bytes(ForkingPickler.dumps(payload)) for _ in range(workers)))


def load(payload: bytes, parameters: dict[str, torch.Tensor], bucket_class: Any) -> None:
    """What an engine does with one bucket."""
    content = pickle.loads(payload)
    bucket = bucket_class(
        flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
    )
    with torch.no_grad():
        for name, tensor in bucket.reconstruct_tensors():
            parameters[name].copy_(tensor)


class StockEngine:
    """slime's methods of an engine without wsync; `take` is called with one payload a worker."""

    def __init__(self, name: str, workers: int, take: Callable[..., object]) -> None:
        self.name = f"{name}, stock"
        self.workers = workers
        self._take = take

    def pause_generation(self) -> None: ...
    def continue_generation(self) -> None: ...
    def flush_cache(self) -> None: ...

    def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **arguments: object
    ) -> None:
        self._take(*(base64.b64decode(text) for text in serialized_named_tensors))


def buckets(named_tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """As many tensors at a time as a bucket holds."""
    bucket: list[Named] = []
    nbytes = 0
    for name, tensor in named_tensors:
        size = tensor.numel() * tensor.itemsize
        if bucket and nbytes + size > BUCKET_NBYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((name, tensor))
        nbytes += size
    if bucket:
        yield bucket


class Gather:
    """slime's gather of a dense model over TP and PP; what does not change is found once."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Any) -> None:
        from megatron.core import parallel_state as ps

        self._config = config
        self._tp_group = ps.get_tensor_model_parallel_group()
        self._pp_group = ps.get_pipeline_model_parallel_group()
        self._pp_ranks = dist.get_process_group_ranks(self._pp_group)
        mine = {
            name: parameter for name, _, _, parameter in hf_reference.own_parameters(chunks, config)
        }
        facts = [(name, tuple(p.shape), p.dtype) for name, p in mine.items()]
        everyone: list[Any] = [None] * len(self._pp_ranks)
        dist.all_gather_object(everyone, facts, group=self._pp_group)
        self._mine = mine
        self._order: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        seen = set()
        for stage, listed in enumerate(everyone):
            for name, shape, dtype in listed:
                if name not in seen:
                    seen.add(name)
                    self._order.append((name, shape, dtype, self._pp_ranks[stage]))

    def named_tensors(self) -> Iterator[Named]:
        """Whole Hugging Face tensors, on every rank of a tensor-parallel group."""
        for batch in self._batches():
            owned = self._broadcast(batch)
            for name, pieces in self._all_gather(owned):
                yield from hf_reference.convert(name, hf_reference.join(name, pieces), self._config)

    def _batches(self) -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype, int]]]:
        batch: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        nbytes = 0
        ranks = dist.get_world_size(self._tp_group)
        for item in self._order:
            size = torch.Size(item[1]).numel() * item[2].itemsize * ranks
            if batch and nbytes + size > BUCKET_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(item)
            nbytes += size
        yield batch

    def _broadcast(self, batch: list[tuple[str, tuple[int, ...], torch.dtype, int]]) -> list[Named]:
        owned, works = [], []
        for name, shape, dtype, source in batch:
            held = self._mine.get(name) if dist.get_rank() == source else None
            tensor = torch.empty(shape, dtype=dtype) if held is None else held.detach()
            if len(self._pp_ranks) > 1:
                works.append(dist.broadcast(tensor, source, group=self._pp_group, async_op=True))
            owned.append((name, tensor))
        for work in works:
            work.wait()
        return owned

    def _all_gather(self, owned: list[Named]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        ranks = dist.get_world_size(self._tp_group)
        pending = []
        for name, tensor in owned:
            if ranks == 1 or hf_reference.is_replicated(name):
                pending.append((name, [tensor], None))
                continue
            pieces = [torch.empty_like(tensor) for _ in range(ranks)]
            work = dist.all_gather(pieces, tensor, group=self._tp_group, async_op=True)
            pending.append((name, pieces, work))
        for name, pieces, work in pending:
            if work is not None:
                work.wait()
            yield name, pieces
