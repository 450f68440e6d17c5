"""verl's update on a CPU: its manager, worker groups, rollout workers and replicas, with Ray.

The servers are transformers engines with SGLang's endpoints.  What stands in for verl's own: the
trainer's actor, whose update_weights is verl's text; the model engine in it, an FSDP2 module under
gloo; SGLang's adapter in the rollout workers, whose update_weights is verl's text, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from support import tiny_qwen3, verl_source
from support.verl_server import ServerActor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine.base import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

TRAINER = "workers/engine_workers.py"
PATIENCE = 120.0
_LOG = logging.getLogger(__name__)


def options(**more: Any) -> dict[str, Any]:
    return {"deadline": 60.0, "timeout": 120.0, "progress": False, **more}


def rollout_config() -> RolloutConfig:
    """What a user writes into verl's configuration."""
    engine = CheckpointEngineConfig(
        backend="wsync",
        custom_backend_module="wsync.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"wsync": options()},
    )
    return RolloutConfig(name="sglang", tensor_model_parallel_size=1, checkpoint_engine=engine)


class FSDPEngine:
    """A model engine: an FSDP2 module, whose whole tensors are gathered one by one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.wrong: dict[str, torch.Tensor] = {}  # given instead of the module's
        self.dies = False

    def get_per_tensor_param(self) -> tuple[Any, None]:
        return self._whole(), None

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, (name, parameter) in enumerate(self.module.state_dict().items()):
            if self.dies and place == 3:
                os._exit(1)
            tensor = parameter.full_tensor()
            yield name, self.wrong.get(name, tensor)


class Trainer(Worker):  # type: ignore[misc]
    """A trainer rank, made as verl's ActorRolloutRefWorker makes its checkpoint engine."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        chosen = config.checkpoint_engine
        import_external_libs(chosen.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            chosen.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=chosen.update_weights_bucket_megabytes << 20,
            **chosen.engine_kwargs[chosen.backend],
        )
        torch.manual_seed(1)
        model = tiny_qwen3.transformers.AutoModelForCausalLM.from_config(tiny_qwen3.dense())
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.actor = type("Actor", (), {"engine": FSDPEngine(model)})()

    locals().update(
        verl_source.borrowed(
            TRAINER,
            "ActorRolloutRefWorker",
            {"update_weights": {}, "execute_checkpoint_engine": {}},
            register=register,
            Dispatch=Dispatch,
        )
    )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> dict[str, str]:
        """Changes all weights; the checksums of the whole ones."""
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                local = parameter.to_local()
                local.add_(torch.full_like(local, 0.01 * step))
        whole, _ = self.actor.engine.get_per_tensor_param()
        return tiny_qwen3.sums(dict(whole))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        """Has one rank end in the middle of its next tensors."""
        self.actor.engine.dies = dist.get_rank() == rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Has a tensor arrive with another shape; None: as it is again."""
        wrong = {} if shape is None else {name: torch.zeros(shape)}
        self.actor.engine.wrong = wrong


class Adapter(BaseRollout):  # type: ignore[misc]
    """verl's adapter of SGLang, as far as an update goes that brings no flush."""

    locals().update(
        verl_source.borrowed(
            "workers/rollout/sglang_rollout/sglang_rollout.py",
            "ServerAdapter",
            {"update_weights": {}, "_update_weights_delta": {}, "_is_server_tp_leader": {}},
            logger=_LOG,
        )
    )

    def __init__(self, replica_rank: int) -> None:
        self.replica_rank, self.is_leader_rank = replica_rank, True
        self._pd_role, self._pd_tp_local_rank = None, 0
        self._engine: Any = None

    async def _init_server_adapter(self) -> None:
        """verl's finds the same actor, and asks it for the server's address."""
        self._engine = self
        self.server_actor = ray.get_actor(f"sglang_server_{self.replica_rank}_0")
        self.device_mesh = {"infer_tp": self}

    def get_local_rank(self) -> int:
        return 0

    async def resume(self, tags: list[str]) -> None: ...
    async def release(self) -> None: ...


class Replica(RolloutReplica):  # type: ignore[misc]
    """verl's replica of one worker, beside a server that runs already."""

    def __init__(self, replica_rank: int, url: str) -> None:
        super().__init__(replica_rank, rollout_config(), None, gpus_per_node=1)
        self._url = url

    def rollout_worker_use_gpu(self) -> bool:
        return False

    def get_ray_class_with_init_args(self) -> Any:
        return RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=self.config,
            model_config=None,
            server_adapter=Adapter(self.replica_rank),
        )

    async def launch_servers(self) -> None:
        name = f"sglang_server_{self.replica_rank}_0"
        self.servers = [ray.remote(num_cpus=0)(ServerActor).options(name=name).remote(self._url)]


class Cluster:
    """Two trainer ranks, and a replica for each server, with verl's manager between them."""

    def __init__(self, urls: list[str]) -> None:
        pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        self.trainers = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(Trainer), config=rollout_config()),
            device_name="cpu",
        )
        self.replicas = [Replica(number, url) for number, url in enumerate(urls)]
        for replica in self.replicas:
            place = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
            asyncio.run(replica.init_colocated(place))
        config = rollout_config().checkpoint_engine
        self.manager = CheckpointEngineManager(config, self.trainers, self.replicas)

    def outcomes(self, step: int) -> tuple[list[Any], list[Any]]:
        """What the trainer ranks and the rollout workers make of an update, each for itself, where
        the manager raises the first error alone."""
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        rollouts = RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker)),
        )
        self.manager.build_process_group(rollouts)
        sending = self.trainers.update_weights(global_steps=step, mode="wsync")
        receiving = rollouts.update_weights(global_steps=step)
        return [_outcome(ref) for ref in sending], [_outcome(ref) for ref in receiving]

    def noted(self) -> list[tuple[list[str], int | None]]:
        return ray.get([replica.servers[0].noted.remote() for replica in self.replicas])


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=PATIENCE)
    except ray.exceptions.RayError as error:
        return getattr(error, "cause", None) or error


def start_ray(folder: Path) -> None:
    """A Ray of this machine, whose workers import what this process does.  folder: an empty one,
    for Ray has workers import from the current one, too, which may be where the source lies."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with contextlib.chdir(folder):
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 << 20,
            configure_logging=False,
            log_to_driver=False,
        )
