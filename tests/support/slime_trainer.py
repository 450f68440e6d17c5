"""slime's train actor in small: update_weights as in slime 624b824, none of its code
(slime/backends/megatron_utils/actor.py)."""

from __future__ import annotations

import contextlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import ray
import torch.distributed as dist
from support.ray_actors import join
from support.server_phases import before
from support.tiny_qwen3 import Weights, dense, draw

import wsync
from wsync.layout import from_tensors

Blow = tuple[str, int, bool]  # before which phase, which engine, whether its actor dies, too


class TrainActor:
    """slime's MegatronTrainRayActor, whose ranks share the tensors as pipeline stages do."""

    def __init__(
        self, rank: int, size: int, store: str, manager: Any, checkpoint: str, kind: str
    ) -> None:
        join(rank, size, store)
        options = {"deadline": 60.0, "progress": False}
        args = SimpleNamespace(
            rank=rank, use_fault_tolerance=True, hf_checkpoint=checkpoint, wsync_options=options
        )
        self._manager, self._share = manager, slice(rank, None, size)
        self._weights = self._drawn(0)
        updater: Any = getattr(wsync, kind)
        source, getter = from_tensors(self._weights), lambda: self._weights
        self._updater = updater(args, source, getter, model_name="any")

    def _drawn(self, seed: int) -> Weights:
        return dict([*draw(dense(), seed).items()][self._share])

    def update_weights(self, seed: int, blow: Blow | None = None) -> int:
        """Returns the weight version."""
        self._weights = self._drawn(seed)
        first, manager = dist.get_rank() == 0, self._manager
        if first:
            ray.get(manager.recover_updatable_engines.remote())
        dist.barrier()
        engines, lock, new, *facts = ray.get(manager.get_updatable_engines_and_lock.remote())
        if new > 0:
            names = ("engine_gpu_counts", "engine_gpu_offsets", "engine_parallel_configs")
            self._updater.connect_rollout_engines(
                engines, lock, **dict(zip(names, facts, strict=True))
            )
            dist.barrier()
            if first:
                ray.get(manager.clear_updatable_num_new_engines.remote())
        with contextlib.ExitStack() as stack:
            if first and blow is not None:
                phase, place, whole = blow
                pids = ray.get(engines[place].pids.remote())
                struck = stack.enter_context(
                    before(phase, lambda: strike(*(pids if whole else pids[:1])))
                )
            self._updater.update_weights()
        assert not (first and blow) or struck
        version: int = self._updater.weight_version
        return version


def strike(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
