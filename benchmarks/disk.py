"""`disk`: a model goes to another process through a checkpoint, Qwen3-0.6B shapes in bfloat16.

wsync's way: all trainer ranks write a version, the engine loads it into the parameters it has.  The
peers' way: the weights are gathered as slime does, rank 0 calls transformers' save_pretrained, and
the other process from_pretrained.  Both processes and all weights are the same.

A further row writes only what has changed, in slime's format, for an engine with a copy of the
checkpoint.  Its peer is whole versions.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import delta_reader
from support.weights_only_engine import BareWorker, ProcessEngine, digest

import wsync
from benchmarks.ranks import on_ranks
from benchmarks.update import qwen3_config, qwen3_weights, row
from wsync.layout import TrainerLayout
from wsync.machine.deadline import Deadline

RANKS = 4
REPEATS = 3
PEER = "save_pretrained + from_pretrained"
_SECONDS = 600.0

Weights = dict[str, torch.Tensor]


def run() -> Iterator[dict[str, Any]]:
    yield _one_process()
    yield _changes()
    yield from on_ranks(RANKS, _rank)


def _one_process() -> dict[str, Any]:
    weights = qwen3_weights(1)
    with torch.no_grad():
        seconds, nbytes, verified = _compare(
            wsync.layout.from_tensors(weights),
            lambda: weights,
            change=lambda: [t.view(torch.int16).bitwise_not_() for t in weights.values()],
        )
    return _row("one process", nbytes, seconds, verified)


def _changes() -> dict[str, Any]:
    """One element in a hundred changes before each update."""
    weights = qwen3_weights(1)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    nbytes = sum(t.nbytes for t in weights.values())
    written: list[int] = []

    def change() -> None:
        for tensor in weights.values():
            tensor.view(torch.int16).view(-1)[len(written) % 100 :: 100] ^= 1

    with tempfile.TemporaryDirectory(prefix="wsync-benchmark-") as folder:
        reader = _Reader(shapes)
        ways = {
            name: wsync.DiskSync(
                weights, [reader], folder=f"{folder}/{name}", base=qwen3_config(), **more
            )
            for name, more in {
                "peer": {},
                "wsync": {"delta": True, "local_folder": f"{folder}/copy"},
            }.items()
        }
        with ways["peer"], ways["wsync"], contextlib.closing(reader):
            seconds, verified = _in_turns(
                {
                    "peer": ways["peer"].update,
                    "wsync": lambda: written.append(ways["wsync"].update().delivered_nbytes),
                },
                lambda: weights,
                change,
                reader,
                ranks=1,
                steady=False,
            )
    found = _row("one process, 1 % changed", nbytes, seconds, verified, "whole versions")
    return {**found, "figure": f"{written[-1]:,} bytes written"}


def _rank(rank: int) -> list[dict[str, Any]]:
    from support import megatron_cpu

    from benchmarks import peers

    parallel = megatron_cpu.Parallel(tp=2, pp=2)
    with megatron_cpu.on_cpu(), megatron_cpu.groups(parallel), torch.no_grad():
        config = qwen3_config()
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        gather = peers.Gather(trainer.chunks, config)

        def gathered() -> Weights:
            named = gather.named_tensors()
            if rank == 0:
                return dict(named)
            for _ in named:
                pass
            return {}

        seeds = itertools.count(1)
        seconds, nbytes, verified = _compare(
            wsync.megatron.layout(trainer.chunks, config),
            gathered,
            change=lambda: trainer.randomize(next(seeds)),
        )
    return [_row("TP2 x PP2", nbytes, seconds, verified)] if rank == 0 else []


def _compare(
    layout: TrainerLayout, gathered: Callable[[], Weights], change: Callable[[], object]
) -> tuple[dict[str, float], int, bool]:
    """(median seconds of each way, bytes of the model, whether all arrived); on every rank.

    change: gives the weights other values; before the first run of each way and the last.
    """
    first = layout.rank == 0
    with tempfile.TemporaryDirectory(prefix="wsync-benchmark-") as folder:
        expected = gathered()
        nbytes = sum(t.numel() * t.itemsize for t in expected.values())
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
        del expected
        reader = _Reader(shapes) if first else None
        versions = _from_first(f"{folder}/versions", layout.ranks)
        try:
            engines = [reader] if reader is not None else []
            with wsync.DiskSync(layout, engines, folder=versions, base=qwen3_config()) as sync:
                ways = {
                    "peer": lambda: _save_and_reload(gathered(), Path(folder, "peer"), reader),
                    "wsync": sync.update,
                }
                seconds, verified = _in_turns(ways, gathered, change, reader, layout.ranks)
        finally:
            if reader is not None:
                reader.close()
    return seconds, nbytes, verified


def _in_turns(
    ways: dict[str, Callable[[], object]],
    gathered: Callable[[], Weights],
    change: Callable[[], object],
    reader: _Reader | None,
    ranks: int,
    *,
    steady: bool = True,
) -> tuple[dict[str, float], bool]:
    """Median seconds of each way, and whether all arrived.  steady: the weights change only before
    the first run and the last."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    verified = True
    for repeat in range(REPEATS + 1):
        ends = repeat in (0, REPEATS)
        if ends or not steady:
            change()
        expected = gathered() if ends else {}
        for name, way in ways.items():
            os.sync()  # what the other way has left for the disk to do
            _barrier(ranks)
            start = time.perf_counter()
            way()
            _barrier(ranks)
            if repeat:
                times[name].append(time.perf_counter() - start)
            if reader is not None and expected:
                verified = verified and reader.digest(_SECONDS) == digest(expected)
        del expected
    return {name: statistics.median(values) for name, values in times.items()}, verified


def _save_and_reload(weights: Weights, folder: Path, reader: _Reader | None) -> None:
    from transformers import AutoModelForCausalLM

    if reader is None:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3_config(), dtype=torch.bfloat16)
    model.load_state_dict(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True
    )
    model.tie_weights()
    model.save_pretrained(folder)
    reader.from_pretrained(str(folder))


class _Reader(ProcessEngine):
    """An engine process that loads versions in place, and models in the peers' way."""

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes, name="reader", worker=_ReaderWorker)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        self._call("disk", [(path, weight_version, timeout)], timeout)

    def pulls(self, timeout: float) -> bool:
        return True

    def pull_weights(self, *, folder: str, source: str, number: int, timeout: float) -> None:
        delta_reader.pull(Path(folder), Path(source), number)

    def from_pretrained(self, path: str) -> None:
        self._call("from_pretrained", [path], _SECONDS)


class _ReaderWorker(BareWorker):
    model: torch.nn.Module | None = None

    def disk(self, path: str, version: int | str | None, timeout: float) -> None:
        self.model = None
        given = None if version is None else str(version)
        self.update_weights_from_disk(path, weight_version=given, end=Deadline(timeout))

    def from_pretrained(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    def digest(self) -> str:
        if self.model is None:
            return super().digest()
        return digest(dict(self.model.named_parameters()))


def _from_first(text: str, ranks: int) -> str:
    """What rank 0 says, on all ranks."""
    said = [text]
    if ranks > 1:
        dist.broadcast_object_list(said, 0)
    return said[0]


def _barrier(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def _row(
    case: str, nbytes: int, seconds: dict[str, float], verified: bool, peer: str = PEER
) -> dict[str, Any]:
    known: dict[str, Any] = {"nbytes": nbytes, "seconds": seconds, "verified": verified}
    return {**row(case, "wsync", "peer", peer, **known), "benchmark": "disk"}
