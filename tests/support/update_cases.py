"""What trainer ranks do in tests/test_update_ranks.py; rank 0 also runs the engines."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import hf_reference, megatron_cpu
from support.errors import error_of
from support.tensor_parallel_engine import TensorParallelEngine

import wsync
from wsync import megatron
from wsync.disk import newest
from wsync.trainer.connection import Connection

# a ring of two rounds: when a later one is posted, the first has surely been loaded
OPTIONS: dict[str, Any] = {
    "deadline": 60.0,
    "progress": False,
    "round_nbytes": 1 << 15,
    "ring_nbytes": 1 << 16,
}
DIRECT = wsync.Options(deadline=60.0, progress=False, delivery="direct")


@contextlib.contextmanager
def trainer_and_engine(
    config: Any,
    parallel: megatron_cpu.Parallel,
    engine: dict[str, Any],
    *,
    shared: bool = False,
) -> Any:
    """A sharded trainer, in shared memory where that is wanted, and on rank 0 an engine of two
    workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel)
        for chunk in trainer.chunks if shared else ():
            chunk.share_memory()
        started = None
        if dist.get_rank() == 0:
            started = stack.enter_context(TensorParallelEngine(config, **engine))
        yield trainer, started


def compare(engine: TensorParallelEngine | None, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ between the engine and the independent conversion."""
    if engine is None:
        return []
    found = engine.weights()
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]


def update_twice(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], exchange: str
) -> dict[str, Any]:
    """Two updates with different weights, over gloo with everything parked in between; returns the
    last report and what differed.  exchange: "direct" for none; "private", where odd ranks cannot
    lend; or "hosts", where the last two ranks are on another host than the engine."""
    rank = dist.get_rank()
    direct = exchange in ("direct", "private", "hosts")
    options = DIRECT
    if exchange in ("private", "hosts"):
        options = wsync.Options(**OPTIONS, delivery="direct")
    elif not direct:
        options = wsync.Options(**OPTIONS, exchange=exchange, park=exchange == "gloo")
    host = "second" if exchange == "hosts" and rank >= 2 else "first"
    lendable = direct and not (exchange == "private" and rank % 2)
    wrong: list[str] = []
    with trainer_and_engine(config, parallel, engine, shared=lendable) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        with (
            mock.patch("wsync.exchange.trainer_group.host_identity", lambda: host),
            wsync.connect(layout, [started] if started else [], options=options) as sync,
        ):
            for seed in (1, 2):
                trainer.randomize(seed)
                report = sync.update()
                wrong += compare(started, hf_reference.hf_state_dict(trainer.chunks, config))
    return {"wrong": wrong, **report.facts()}


def from_dicts(config: Any, folder: str) -> dict[str, Any]:
    """Every rank has a mapping: of its share of the tensors, none on the last, then of all; what
    differed in an engine and in files, and the bytes that each rank wrote of the replicas."""
    options = wsync.Options(**OPTIONS)
    written = wsync.Options(deadline=options.deadline, progress=False)
    rank, parallel = dist.get_rank(), megatron_cpu.Parallel()
    with trainer_and_engine(config, parallel, {"tp": 1}) as (trainer, started):
        trainer.randomize(6)
        whole = hf_reference.hf_state_dict(trainer.chunks, config)
        others = dist.get_world_size() - 1
        mine = {name: whole[name] for name in list(whole)[rank::others] if rank < others}
        with wsync.connect(mine, [started] if started else [], options=options) as sync:
            sync.update()
        wrong = compare(started, whole)
        for tensors in (mine, whole):
            with wsync.DiskSync(tensors, folder=folder, options=written) as disk:
                disk.update()
            found: dict[str, torch.Tensor] = {}
            for path in newest(folder).glob("*.safetensors"):
                found |= load_file(path)
            wrong += [n for n in whole if n not in found or not torch.equal(found[n], whole[n])]
            dist.barrier()
    return {"wrong": wrong, "written": disk._writer.nbytes}


def fail_once(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], exchange: str
) -> dict[str, Any]:
    """Rank 1 fails in the middle of the second update; the third is to succeed."""
    options = wsync.Options(**OPTIONS, exchange=exchange)
    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        with wsync.connect(layout, [started] if started else [], options=options) as sync:
            sync.update()
            trainer.randomize(5)
            with breaking_rank(1):
                error = error_of(sync.update)
            inconsistent = started is not None and not started.model_info(60)["consistent"]
            paused = started is not None and started.paused
            sync.update()
            wrong = compare(started, hf_reference.hf_state_dict(trainer.chunks, config))
    return {"error": error, "wrong": wrong, "inconsistent": inconsistent, "paused": paused}


def before_receiving(strike: Callable[[Connection, int], object]) -> Any:
    """Has this rank call `strike`, with the number of the round, before it takes what a round has
    brought from other ranks."""
    original = Connection._wait_and_unpack

    def receive(self: Connection, number: int, *rest: Any) -> None:
        strike(self, number)
        original(self, number, *rest)

    return mock.patch.object(Connection, "_wait_and_unpack", receive)


def breaking_rank(rank: int) -> Any:
    """Makes one rank fail in its last round."""

    def strike(connection: Connection, number: int) -> None:
        assert connection.plan is not None
        if dist.get_rank() == rank and number == connection.plan.round_count - 1:
            raise ValueError("a planted failure")

    return before_receiving(strike)


def die_in_the_middle(
    config: Any, parallel: megatron_cpu.Parallel, engine: dict[str, Any], folder: str
) -> None:
    """Rank 2 is killed in the middle of an update; the others note what they raise."""
    options = wsync.Options(**OPTIONS)

    def strike(_: Connection, number: int) -> None:
        if dist.get_rank() == 2 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with trainer_and_engine(config, parallel, engine) as (trainer, started):
        layout = megatron.layout(trainer.chunks, config)
        sync = wsync.connect(layout, [started] if started else [], options=options)
        sync.update()
        with before_receiving(strike):
            text = error_of(sync.update)
        if text:
            Path(folder, f"rank{dist.get_rank()}").write_text(text)
        os._exit(0)  # groups that a rank has left cannot be taken down in order


def slime_arguments(config: Any) -> Any:
    """The fields of slime's arguments that a layout needs."""
    return SimpleNamespace(
        hf_checkpoint="",
        megatron_to_hf_mode="raw",
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_experts=None,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        update_weight_buffer_size=1 << 20,
    )


def as_slime_does(config: Any, parallel: megatron_cpu.Parallel) -> dict[str, Any]:
    """slime's calls: connect, update, connect to other engines, update; backups move each time."""
    with trainer_and_engine(config, parallel, {"tp": 2}) as (trainer, first):

        def weights_getter() -> dict[str, torch.Tensor]:
            weights = megatron_cpu.named_weights(trainer.chunks)
            return {f"module.module.{name}": tensor.detach().clone() for name, tensor in weights}

        updater = wsync.UpdateWeightFromTensor(
            slime_arguments(config),
            trainer.chunks,
            weights_getter,
            model_name="qwen3",
            quantization_config=None,
            options=wsync.Options(**OPTIONS),
        )
        early = ""
        try:
            updater.update_weights()
        except wsync.StateError as error:
            early = str(error)
        wrong: list[str] = []
        with contextlib.ExitStack() as stack:
            updater.connect_rollout_engines([first] if first else [], None)
            trainer.randomize(3)
            updater.update_weights()
            wrong += compare(first, hf_reference.hf_state_dict(trainer.chunks, config))
            metrics = updater.pop_metrics()
            other = None
            if dist.get_rank() == 0:
                other = stack.enter_context(TensorParallelEngine(config, tp=1))
            updater.connect_rollout_engines([other] if other else [], None)
            trainer.randomize(4)
            updater.update_weights()
            wrong += compare(other, hf_reference.hf_state_dict(trainer.chunks, config))
            updater.disconnect_rollout_engines()
            return {
                "early": early,
                "wrong": wrong,
                "version": updater.weight_version,
                "engine_version": other.weight_version if other else "2",
                "metrics": metrics,
                "second_pop": [updater.pop_metrics(), updater.pop_metrics()][1],
            }
