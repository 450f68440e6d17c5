"""What trainer ranks with a GPU each do in tests/test_multigpu.py; rank 0 also runs the engine."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.errors import error_of
from support.gpu_engine import GpuEngine, dry, where
from support.rows import sharded
from support.update_cases import before_receiving

import wsync
from wsync.exchange.update_group import UpdateGroup
from wsync.machine import device
from wsync.trainer.connection import Connection
from wsync.trainer.sessions import broadcast

OPTIONS = wsync.Options(deadline=20.0, progress=False, delivery="wsync")
STRUCK = 1  # the round in which a rank is killed


def only_gpu(number: int) -> dict[str, str]:
    """The environment of a process that sees one of this machine's GPUs, which is its first."""
    if dry():
        return {"WSYNC_FAKE_CUDA_FIRST": str(number), "WSYNC_FAKE_CUDA_DEVICES": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(512, 256, generator=generator) for i in range(4)}


def _same(engine: GpuEngine, seed: int) -> bool:
    held, expected = engine.weights(), draw(seed)
    return held.keys() == expected.keys() and all(
        torch.equal(held[name], expected[name]) for name in expected
    )


def lose_a_rank() -> dict[str, Any]:
    """The last rank is killed in the second update, for whose rounds the others wait; what these
    find before and then."""
    os.environ |= only_gpu(dist.get_rank())
    source = sharded({name: tensor.to(where()) for name, tensor in draw(1).items()})
    engines = [GpuEngine(draw(1))] if dist.get_rank() == 0 else []
    options = dataclasses.replace(OPTIONS, round_nbytes=1 << 16, exchange="nccl")

    def strike(_: Connection, number: int) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and number == STRUCK:
            os.kill(os.getpid(), signal.SIGKILL)

    with wsync.connect(source, engines, options=options) as sync:
        report = sync.update(version=1)
        right = all(_same(engine, 1) for engine in engines)
        begin = time.monotonic()
        with before_receiving(strike):
            error = error_of(lambda: sync.update(version=2))
        seconds = time.monotonic() - begin
    if not dry():
        torch.cuda.synchronize()  # a kernel that waits for the dead rank would keep it
    paused = all(engine.paused for engine in engines)
    for engine in engines:
        engine.close()
    return {
        "exchange": report.exchange,
        "rounds": report.rounds,
        "right": right,
        "error": error,
        "seconds": seconds,
        "paused": paused,
    }


def broadcast_straight(kind: str) -> dict[str, Any]:
    """Two updates by broadcasts of an engine that is on the next GPU: whether it holds what it
    should, the group's backend, and what was handed to that."""
    with mock.patch.dict(os.environ, only_gpu(1)):
        engine = GpuEngine(draw(1))
    os.environ |= only_gpu(0)
    handed = set[str]()
    send = UpdateGroup.broadcast

    def note(group: UpdateGroup, tensors: Sequence[torch.Tensor], check: Any = None) -> None:
        handed.update(tensor.device.type for tensor in tensors)
        send(group, tensors, check)

    options = dataclasses.replace(
        OPTIONS, round_nbytes=1 << 20, delivery="distributed", broadcast=kind
    )
    weights = {name: tensor.to(where()) for name, tensor in draw(1).items()}
    right = []
    with (
        engine,
        mock.patch.object(UpdateGroup, "broadcast", note),
        mock.patch.object(broadcast, "staging", wraps=device.staging) as staging,
        wsync.connect(weights, [engine], options=options) as sync,
    ):
        for seed in (1, 2):
            weights |= {name: tensor.to(where()) for name, tensor in draw(seed).items()}
            sync.update(version=seed)
            right.append(_same(engine, seed))
    return {"right": right, "handed": handed, "through the host": staging.called}
