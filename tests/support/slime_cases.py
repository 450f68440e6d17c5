"""What two of slime's train actors do in tests/test_slime.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ray_double, slime_double
from support.errors import error_of
from support.local_servers import Packing
from support.ray_double import Actor

import wsync
from wsync.layout import from_tensors
from wsync.slime import install, updaters
from wsync.trainer import updates_base


class Staged:
    """An engine of two pipeline stages, as it says itself."""

    def get_server_info(self) -> dict[str, Any]:
        return {"tp_size": 1, "pp_size": 2}

    def update_weights_from_tensor(self, serialized_named_tensors: Any, **more: Any) -> None:
        raise AssertionError("wsync has sent weights")


def fail_once(alone: bool) -> dict[str, Any]:
    """An engine is gone once; or rank 0 takes an update for failed that rank 1 has seen succeed."""
    options = wsync.Options(deadline=60.0, progress=False)
    args = SimpleNamespace()
    source = from_tensors({"w": torch.ones(2)})
    updater = updaters.UpdateWeightFromTensor(
        args, source, None, model_name="llama", options=options
    )
    updater.weight_version = 4
    engine, fails = Packing(), [] if alone else [ConnectionError("gone")]

    def pause() -> None:
        if fails:
            raise fails.pop()

    engine.pause_generation = pause  # type: ignore[method-assign]
    updater.connect_rollout_engines([engine])
    with pytest.MonkeyPatch.context() as patch:
        if alone:
            patch.setattr(updates_base, "_MEET_SECONDS", 2.0)
        if alone and dist.get_rank() == 0:
            sync: Any = updater._sync
            reaching = sync._reaching

            @contextlib.contextmanager
            def late(*arguments: Any) -> Iterator[None]:
                with reaching(*arguments):
                    yield
                raise wsync.DeadlineError("rank 0 has missed the end")

            patch.setattr(sync, "_reaching", late)
        error = error_of(updater.update_weights)
    updater.disconnect_rollout_engines()
    return {"error": error, "version": updater.weight_version}


def change_over(model_of_rank_1: bool) -> dict[str, Any]:
    """Rank 1 has a parameter that wsync does not know; or rank 0 finds an engine that wsync cannot
    update.  Which class the actor has before and after it connects."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        ray_double.install(patch)
        patch.setenv("WSYNC_OPTIONS", '{"deadline": 60, "progress": false}')
        slime = slime_double.install(patch)
        args = SimpleNamespace(
            custom_megatron_init_path=install,
            update_weight_mode="full",
            update_weight_transport="nccl",
            update_weight_start_version=4,
            colocate=False,
            rank=rank,
            weights={},
            model=from_tensors({"w": torch.ones(2)}),
            model_name="llama",
            hidden_size=2,
            num_attention_heads=1,
            quantization_config=None,
            hf_checkpoint="",
        )
        if model_of_rank_1:
            args.model = [torch.nn.Linear(2, 2) if rank == 1 else torch.nn.Module()]
        actor = slime.MegatronTrainRayActor()
        actor.init(args, "actor")
        updater = actor.weight_updater
        found = [type(updater._updater).__module__.partition(".")[0]]
        updater.connect_rollout_engines([Actor(Staged())], None, engine_gpu_counts=[2])
        found.append(type(updater._updater).__module__.partition(".")[0])
        updater.update_weights()
        return {"found": found, "version": updater.weight_version}
