"""`quantise`: replace every weight of an engine process by codes and scales of the trainer's.

Qwen3-0.6B and the experts of one layer of Qwen3-30B-A3B, held in bfloat16, in FP8 blocks of 128 x
128 and in INT4 groups of 32: from one trainer process, and of Qwen3-0.6B from a real TP2 x PP2
Megatron trainer over gloo.  The peers' way is slime's order of work: gather, quantise each tensor
with torch, bucket, load; see benchmarks/README.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import wsync
from benchmarks import peers, update
from benchmarks.bucket import bucket_class
from benchmarks.consumer import Consumer, digest
from benchmarks.environment import check_memory
from benchmarks.ranks import on_ranks

REPEATS = 5
RANKS = 4
RANKS_NBYTES = 26 * 10**9  # with the peers' way beside them
_EXPERTS, _WIDTH, _HIDDEN = 128, 768, 2048  # of Qwen3-30B-A3B

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4 groups": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **{"num_bits": 4, "type": "int", "symmetric": True},
                    **{"strategy": "group", "group_size": 32},
                },
            }
        },
        "ignore": ["lm_head"],
    },
}
_PRODUCER = {"producer": {"name": "slime"}}  # whose arithmetic the peers' way has
Named = peers.Named
Shapes = Mapping[str, tuple[int, ...]]
PLAIN = "wsync, bfloat16"


class Measured(NamedTuple):
    """seconds: median of each way.  before_pause: of those of wsync's, until engines pause."""

    seconds: dict[str, float]
    before_pause: float
    verified: bool


def run() -> Iterator[dict[str, Any]]:
    for case, shapes in (("Qwen3-0.6B", qwen3_shapes()), ("128 experts", expert_shapes())):
        for method in CONFIGS:
            yield one_process(case, weights_of(shapes, 1), method)
    check_memory(f"quantise from {RANKS} ranks", RANKS_NBYTES)
    for method in CONFIGS:
        yield from on_ranks(RANKS, _rank, method)


def qwen3_shapes() -> Shapes:
    return {name: tuple(t.shape) for name, t in update.qwen3_weights(1).items()}


def expert_shapes() -> Shapes:
    """The experts of one layer of Qwen3-30B-A3B: 384 tensors, 604 million parameters."""
    shapes = {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    return {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": shape
        for expert in range(_EXPERTS)
        for part, shape in shapes.items()
    }


def weights_of(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the sizes that models have: among any bits are many that quotients make
    subnormal, with which processors are slow."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        for name, shape in shapes.items()
    }


def one_process(case: str, weights: dict[str, torch.Tensor], method: str) -> dict[str, Any]:
    """One trainer process with plain tensors, one engine process."""
    peer, peer_class = bucket_class()
    expected = dict(quantised(weights.items(), method))
    consumer = Consumer(_shapes(expected), peer_class)
    plain = Consumer(_shapes(weights))
    options = wsync.Options(quantise={**CONFIGS[method], **_PRODUCER})
    try:
        with (
            wsync.connect(weights, engines=[consumer], options=options) as sync,
            wsync.connect(weights, engines=[plain]) as plain_sync,
        ):
            measured = _in_turns(
                lambda: peers.send(quantised(weights.items(), method), peer_class, consumer.take),
                *(sync, plain_sync, consumer, digest(expected)),
            )
    finally:
        consumer.close()
        plain.close()
    return _row(f"{case}, {method}", _nbytes(weights), measured, peer)


def quantised(named: Iterable[Named], method: str) -> Iterator[Named]:
    """What slime makes of whole tensors, one after another, in torch."""
    make = {"fp8 blocks": fp8_blocks, "int4 groups": int4_groups}[method]
    for name, tensor in named:
        if name.endswith("_proj.weight"):
            yield from make(name, tensor)
        else:
            yield name, tensor


def fp8_blocks(name: str, weight: torch.Tensor, side: int = 128) -> Iterator[Named]:
    """The arithmetic of slime's Triton kernel."""
    rows, cols = weight.shape
    high, wide = -(-rows // side), -(-cols // side)
    padded = torch.nn.functional.pad(weight.float(), (0, wide * side - cols, 0, high * side - rows))
    blocks = padded.view(high, side, wide, side)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_(min=1e-10) / 448.0
    codes = (blocks * (1.0 / scale)).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    yield name, codes.view(high * side, wide * side)[:rows, :cols].contiguous()
    yield f"{name}_scale_inv", scale[:, 0, :, 0].contiguous()


def int4_groups(name: str, weight: torch.Tensor, size: int = 32) -> Iterator[Named]:
    """The arithmetic of slime's kernel, packed as compressed-tensors does."""
    rows, cols = weight.shape
    groups = weight.float().view(rows, cols // size, size)
    seventh = torch.tensor(1.0 / 7.0, dtype=torch.float32)
    scale = (groups.abs().amax(2, keepdim=True) * seventh).clamp_(min=1e-5)
    codes = (groups / scale).round_().clamp_(-7, 7).to(torch.int32).view(rows, cols // 8, 8) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    stem = name.removesuffix(".weight")
    yield f"{stem}.weight_packed", (codes << shifts).sum(2, dtype=torch.int32)
    yield f"{stem}.weight_scale", scale[:, :, 0].to(weight.dtype)
    yield f"{stem}.weight_shape", torch.tensor([rows, cols])


def _rank(rank: int, method: str) -> list[dict[str, Any]]:
    """One rank of a TP2 x PP2 trainer; rank 0 returns the row."""
    import torch.distributed as dist
    from support import hf_reference, megatron_cpu

    parallel = megatron_cpu.Parallel(tp=2, pp=2)
    peer, peer_class = bucket_class()
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel):
        config = update.qwen3_config()
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        weights = hf_reference.hf_state_dict(trainer.chunks, config)
        expected = dict(quantised(weights.items(), method)) if rank == 0 else {}
        consumers = [
            Consumer(_shapes(kept), peer_class) for kept in (expected, weights)[: 2 * (rank == 0)]
        ]
        nbytes = _nbytes(weights)
        del weights
        gather = peers.Gather(trainer.chunks, config)
        try:
            measured = _compare(trainer.chunks, config, gather, method, consumers, expected)
        finally:
            for consumer in consumers:
                consumer.close()
        dist.barrier()
    return [_row(f"TP2 x PP2, {method}", nbytes, measured, peer)] if rank == 0 else []


def _compare(
    chunks: list[torch.nn.Module],
    config: Any,
    gather: peers.Gather,
    method: str,
    consumers: list[Consumer],
    expected: dict[str, torch.Tensor],
) -> Measured:
    """The ways in turns, on all ranks."""
    import torch.distributed as dist

    _, peer_class = bucket_class()
    first = consumers[0] if consumers else None

    def slime() -> None:
        named = quantised(gather.named_tensors(), method)
        if first is not None:
            peers.send(named, peer_class, first.take)
        else:
            for _ in gather.named_tensors():
                pass

    layout = wsync.megatron.layout(chunks, config)
    options = wsync.Options(quantise={**CONFIGS[method], **_PRODUCER})
    with (
        wsync.connect(layout, consumers[:1], options=options) as sync,
        wsync.connect(layout, consumers[1:]) as plain,
    ):
        wanted = digest(expected) if expected else ""
        return _in_turns(slime, sync, plain, first, wanted, dist.barrier)


def _in_turns(
    slime: Callable[[], object],
    sync: wsync.Sync,
    plain: wsync.Sync,
    consumer: Consumer | None,
    expected: str,
    together: Callable[[], object] = lambda: None,
) -> Measured:
    before: list[float] = []
    ways: update.Ways = {
        **update.slime(slime),
        "wsync": (1, lambda: before.append(sync.update().phases["quantise"])),
        PLAIN: (1, plain.update),
    }
    seconds, verified = update.compare(ways, consumer, expected, REPEATS, together, beside=(PLAIN,))
    return Measured(seconds, statistics.median(before[-REPEATS:]), verified)


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}


def _nbytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in weights.values())


def _row(case: str, nbytes: int, measured: Measured, peer: str) -> dict[str, Any]:
    """wsync's update against the peers' fastest."""
    seconds, before, verified = measured
    name = min((way for way in seconds if way.startswith("slime")), key=seconds.__getitem__)
    found = update.row(
        case, "wsync", name, f"{name}, {peer}", nbytes=nbytes, seconds=seconds, verified=verified
    )
    times = seconds["wsync"] / seconds[PLAIN]
    return found | {
        "benchmark": "quantise",
        "before_pause_seconds": before,
        "figure": f"{before:.4f} s before the pause; {times:.2f} times the update in bfloat16, "
        f"{seconds[PLAIN]:.4f} s",
    }
