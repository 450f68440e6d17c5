"""What trainer ranks do in tests/test_distributed.py; rank 0 also runs the engines."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from support import hf_reference, megatron_cpu
from support.errors import error_of
from support.tensor_parallel_engine import TensorParallelEngine
from support.update_cases import OPTIONS, breaking_rank, compare, slime_arguments
from support.worker_processes import WorkersEngine

import wsync


@contextlib.contextmanager
def started(config: Any, parallel: megatron_cpu.Parallel) -> Any:
    """A sharded trainer, and on rank 0 engines of one and of two workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel)
        engines = []
        if dist.get_rank() == 0:
            for tp in (1, 2):
                engine = TensorParallelEngine(config, tp=tp, name=f"tp{tp}")
                engines.append(stack.enter_context(engine))
        yield trainer, engines


def make_updater(
    config: Any, trainer: Any, broadcast: str = "bucket"
) -> wsync.UpdateWeightFromDistributed:
    arguments = slime_arguments(config)
    arguments.num_experts = getattr(config, "num_experts", None)
    arguments.moe_ffn_hidden_size = getattr(config, "moe_intermediate_size", None)

    return wsync.UpdateWeightFromDistributed(
        arguments,
        trainer.chunks,
        None,
        model_name=config.model_type,
        options=wsync.Options(
            deadline=60.0,
            progress=False,
            bucket_nbytes=OPTIONS["round_nbytes"],
            broadcast=broadcast,
        ),
    )


def update(config: Any, parallel: megatron_cpu.Parallel, broadcast: str) -> dict[str, Any]:
    """Updates of both engines, twice, and of one after the other has left."""
    with started(config, parallel) as (trainer, engines):
        updater = make_updater(config, trainer, broadcast)
        wrong: list[str] = []
        versions: list[str] = []
        joins = note_joins(engines)
        for number, present in enumerate((engines, engines, engines[1:]), 1):
            if number != 2:
                updater.connect_rollout_engines(present, None)
            if number == 1:
                trainer.randomize(number)
            trainer.randomize(number)
            updater.update_weights()
            expected = hf_reference.hf_state_dict(trainer.chunks, config)
            for engine in present:
                wrong += compare(engine, expected)
                versions.append(engine.weight_version)
            if number == 1:
                joined = len({told["group_name"] for told in joins})
        metrics = updater.pop_metrics()
        updater.disconnect_rollout_engines()
    return {
        "wrong": wrong,
        "versions": versions,
        "groups": joined,
        "sent_nbytes": metrics["wsync/sent_nbytes"],
        "model_nbytes": metrics["wsync/model_nbytes"],
    }


def note_joins(engines: Sequence[WorkersEngine]) -> list[Mapping[str, Any]]:
    """Has engines note what they are told of every group that they join."""
    joins: list[Mapping[str, Any]] = []

    def noting(call: Any, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        if method == "init_weights_update_group":
            joins.append(arguments)
        call(method, arguments, timeout)

    for engine in engines:
        engine.call = functools.partial(noting, engine.call)  # type: ignore[method-assign]
    return joins


def fail_once(config: Any, parallel: megatron_cpu.Parallel) -> dict[str, Any]:
    """Rank 1 fails in the last round of the second update; the third is to succeed."""
    with started(config, parallel) as (trainer, engines):
        updater = make_updater(config, trainer)
        updater.connect_rollout_engines(engines, None)
        joins = note_joins(engines)
        updater.update_weights()
        trainer.randomize(5)
        with breaking_rank(1):
            error = error_of(updater.update_weights)
        paused = all(engine.paused for engine in engines)
        doors = {(told["master_address"], told["master_port"]) for told in joins}
        still_open = [door for door in sorted(doors) if listens(door)]
        updater.update_weights()
        expected = hf_reference.hf_state_dict(trainer.chunks, config)
        wrong = [name for engine in engines for name in compare(engine, expected)]
        updater.disconnect_rollout_engines()
    return {"error": error, "paused": paused, "wrong": wrong, "open": still_open}


def listens(door: tuple[str, int]) -> bool:
    try:
        socket.create_connection(door, timeout=2).close()
    except OSError:
        return False
    return True
