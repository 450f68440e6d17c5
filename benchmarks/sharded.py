"""The TP2 x PP2 cases of `update`: a real Megatron model in four processes over gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import wsync
from benchmarks.engines import SGLANG, sglang_path
from benchmarks.environment import Skipped
from benchmarks.ranks import on_ranks

RANKS = 4
REPEATS = 3


@dataclass(frozen=True)
class Target:
    """An engine, its place in a case's name, and what the peers' way does there."""

    where: str
    engine: Any
    peer: str


def sharded(layers: int) -> Iterator[dict[str, Any]]:
    """Rows of the cases; rank 0 of the trainer reports them.  Raises Skipped after those that need
    no SGLang, where that cannot be had."""
    path: tuple[str, ...] = ()
    skipped = None
    try:
        path = sglang_path()
    except Skipped as reason:
        skipped = reason
    yield from on_ranks(RANKS, _rank, path, layers)
    if skipped is not None:
        raise skipped


def sharded_direct(layers: int) -> Iterator[dict[str, Any]]:
    """The rows of direct delivery to an engine that needs no SGLang."""
    yield from on_ranks(RANKS, _rank_direct, layers)


@contextlib.contextmanager
def _trainer(layers: int) -> Iterator[tuple[list[torch.nn.Module], Any]]:
    from support import megatron_cpu

    from benchmarks.update import qwen3_config

    parallel = megatron_cpu.Parallel(tp=2, pp=2)
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel):
        config = qwen3_config(layers)
        yield megatron_cpu.build(config, parallel, dtype=torch.bfloat16).chunks, config


def _rank_direct(rank: int, layers: int) -> list[dict[str, Any]]:
    """Whole tensors lie on rank 0 alone, and go before the engine is measured."""
    from benchmarks import peers, update
    from benchmarks.bucket import bucket_class

    peer, peer_class = bucket_class()
    with _trainer(layers) as (chunks, config):
        gather = peers.Gather(chunks, config)
        whole = {name: tensor.clone() for name, tensor in gather.named_tensors() if rank == 0}
        nbytes = update.size(whole)
        target, expected = _bare(config, whole, peer_class) if rank == 0 else (None, "")
        del whole
        try:
            loop = _slime(target, gather, peer_class)
            return _direct(chunks, config, target, loop, nbytes, expected, peer)
        finally:
            if target is not None:
                target.engine.close()


def _rank(rank: int, path: tuple[str, ...], layers: int) -> list[dict[str, Any]]:
    with _trainer(layers) as (chunks, config):
        rows = _measure(rank, chunks, config, _bare, ("shared", "gloo"))
        if not path:
            return rows
        sglang = functools.partial(_sglang, path)
        return rows + _measure(rank, chunks, config, sglang, ("shared",))


def _bare(config: Any, weights: dict[str, torch.Tensor], bucket: Any) -> tuple[Target, str]:
    """A process that copies tensors into tensors, and its digest of the weights."""
    from benchmarks.consumer import Consumer, digest

    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    return Target("", Consumer(shapes, bucket), ""), digest(weights)


def _sglang(
    path: tuple[str, ...], config: Any, weights: dict[str, torch.Tensor], bucket: Any
) -> tuple[Target, str]:
    """Two tensor-parallel workers of SGLang's; the digest is what their own load_weights gives."""
    from benchmarks import peers
    from benchmarks.sglang_workers import SglangConsumer

    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        "tie_word_embeddings",
    )
    sizes = {name: getattr(config, name) for name in names}
    engine = SglangConsumer("qwen3", sizes, tp=2, path=path)
    engine.clear()
    peers.send(weights.items(), bucket, engine.take, workers=2)
    peer = f"SGLang {SGLANG} load_weights, "
    return Target(", SGLang TP2", engine, peer), engine.digest()


def _measure(
    rank: int,
    chunks: list[torch.nn.Module],
    config: Any,
    connect: Callable[..., Any],
    exchanges: tuple[str, ...],
) -> list[dict[str, Any]]:
    from support import hf_reference

    from benchmarks import peers, update
    from benchmarks.bucket import bucket_class

    peer, peer_class = bucket_class()
    weights = hf_reference.hf_state_dict(chunks, config)
    nbytes = update.size(weights)
    target, expected = connect(config, weights, peer_class) if rank == 0 else (None, "")
    del weights
    slime = _slime(target, peers.Gather(chunks, config), peer_class)
    rows = []
    try:
        for exchange in exchanges:
            with _both(chunks, config, exchange, target) as (sync, stock):
                ways: update.Ways = {
                    **update.slime(slime),
                    "wsync": (1, sync.update),
                    "wsync, stock": (1, stock.update),
                }
                engine = target and target.engine
                seconds, verified = update.compare(ways, engine, expected, REPEATS, dist.barrier)
                report = sync.update()
            if target is not None:
                label = f"TP2 x PP2, {exchange}{target.where}"
                case = functools.partial(
                    update.row, nbytes=nbytes, seconds=seconds, verified=verified
                )
                for name in update.slime(slime):
                    whose = f"{name}, {target.peer}{peer}"
                    rows.append(case(label, "wsync", name, whose) | _delivery(report))
                    rows.append(case(f"{label}, stock engine", "wsync, stock", name, whose))
        rows += _direct(chunks, config, target, slime, nbytes, expected, peer)
    finally:
        if target is not None:
            target.engine.close()
    return rows


def _slime(target: Target | None, gather: Any, bucket: Any) -> Callable[[], None]:
    """The peers' way of one update, for this rank."""
    from benchmarks import peers

    def send() -> None:
        if target is not None:
            engine = target.engine
            peers.send(gather.named_tensors(), bucket, engine.take, workers=engine.workers)
        else:
            for _ in gather.named_tensors():
                pass

    return send


def _direct(
    chunks: list[torch.nn.Module],
    config: Any,
    target: Target | None,
    slime: Callable[[], None],
    nbytes: int,
    expected: str,
    peer: str,
) -> list[dict[str, Any]]:
    """The rows of updates in which engines read the ranks' memory, which is moved for them."""
    from benchmarks import update

    update.share(parameter for chunk in chunks for parameter in chunk.parameters())
    engine = target and target.engine
    layout = wsync.megatron.layout(chunks, config)
    with wsync.connect(layout, [engine] if engine else [], options=update.DIRECT) as sync:
        ways: update.Ways = {
            **update.slime(slime, most=1),
            "wsync": (1, sync.update),
            # one process alone copies, as one does where there is one rank
            "memcpy": (1, update.memcpy(nbytes) if engine else lambda: None),
        }
        # seconds each time, and its spread is of no interest here
        once = update.slime(slime, most=1)
        seconds, verified = update.compare(ways, engine, expected, REPEATS, dist.barrier, once=once)
    if target is None:
        return []
    label, whose = f"TP2 x PP2{target.where}", f"{target.peer}{peer}"
    found = {"nbytes": nbytes, "seconds": seconds, "verified": verified}
    return list(update.direct_rows(label, whose, **found))


@contextlib.contextmanager
def _both(
    chunks: list[torch.nn.Module], config: Any, exchange: str, target: Target | None
) -> Iterator[tuple[wsync.Sync, wsync.Sync]]:
    """Connections to the target's engine with wsync's receiver, and to it as a stock engine."""
    from benchmarks.peers import StockEngine

    engines: list[Any] = []
    stock: list[Any] = []
    if target is not None:
        engine = target.engine
        engines, stock = [engine], [StockEngine(engine.name, engine.workers, engine.take)]
    options = wsync.Options(exchange=exchange)
    layout = wsync.megatron.layout(chunks, config)
    with wsync.connect(layout, engines, options=options) as sync:
        options = dataclasses.replace(options, delivery="stock")
        with wsync.connect(layout, stock, options=options) as other:
            yield sync, other


def _delivery(report: Any) -> dict[str, Any]:
    """What was sent, where workers share a model."""
    facts = {"delivered_nbytes": report.delivered_nbytes, "redundancy": report.redundancy}
    if report.workers > 1:
        sent = f"{report.delivered_nbytes:,} bytes to {report.workers} workers"
        facts["figure"] = f"{sent}, redundancy {report.redundancy:.2f}"
    return facts
