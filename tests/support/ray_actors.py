"""Engines and trainers as Ray actors, with the names of slime's methods."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.update_groups import UpdateGroups, take
from support.weights_only_engine import BareWorker

import wsync
from wsync.layout import from_tensors
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, UPDATING

SECONDS = 90.0
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((64, 33), torch.float32),
    "b": ((5, 7), torch.bfloat16),
    "c": ((129,), torch.float32),
    "d": ((40, 70), torch.bfloat16),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def final(version: str | None) -> str | None:
    """What the weights are called in the end: buckets before the last one say another version."""
    return None if version is not None and version.startswith(UPDATING) else version


def join(rank: int, size: int, store: str) -> None:
    """Makes this process a rank of torch's default group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )


class Engine:
    """Weights without a model; receives: whether its worker runs wsync's receiver."""

    def __init__(self, *, receives: bool = False) -> None:
        self._worker = BareWorker(shapes=SHAPES, threads=1)
        self._groups = UpdateGroups()
        self._loaders = [LOAD_FORMAT] if receives else []
        self._version = "0"  # as SGLang has it: that of the last request which had one
        self._update = ""  # an id of each pause's own
        self._exits_in = 0  # buckets
        self.paused = False

    def ping(self) -> None:
        pass

    def state(self) -> tuple[str, str, bool]:
        """The weights' digest and version, and whether the engine is paused."""
        return self._worker.digest(), self._version, self.paused

    def exit_in(self, buckets: int) -> None:
        """Has the process end when it is given so many more buckets."""
        self._exits_in = buckets

    def get_server_info(self) -> dict[str, Any]:
        return {"tp_size": 1, "pp_size": 1, "custom_weight_loader": self._loaders}

    def get_weight_version(self) -> str:
        return self._version

    def pause_generation(self, mode: str = "abort") -> dict[str, str]:
        self.paused = True
        return {"status": "ok"}

    def flush_cache(self) -> None:
        pass

    def continue_generation(self) -> dict[str, str]:
        self.paused = False
        return {"status": "ok"}

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> dict[str, Any]:
        self._exits_in -= 1
        if self._exits_in == 0:
            os._exit(3)
        (text,) = serialized_named_tensors
        data, end = base64.b64decode(text), Deadline(SECONDS)
        version = final(weight_version)
        answer = self._worker.update(data, load_format=load_format, end=end, weight_version=version)
        self._version = weight_version or self._version
        return {"success": True, "message": answer}

    def init_weights_update_group(self, **group: Any) -> None:
        self._groups.init(meeting=SECONDS, **group)

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._groups.destroy(group_name)

    def update_weights_from_distributed(
        self, *, weight_version: str | None = None, **request: Any
    ) -> None:
        named = {"weight_version": final(weight_version), **request}
        take(self._worker, self._groups, end=Deadline(SECONDS), **named)
        self._version = weight_version or self._version

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        self._worker.update_weights_from_disk(model_path=model_path, end=Deadline(SECONDS))
        self._version = weight_version


class AsyncEngine(Engine):
    """The same of coroutines, which run beside each other."""

    async def pause_generation(self, mode: str = "abort") -> dict[str, str]:
        return super().pause_generation(mode)

    async def update_weights_from_tensor(self, *given: Any, **named: Any) -> dict[str, Any]:
        return await asyncio.to_thread(super().update_weights_from_tensor, *given, **named)

    async def update_weights_from_distributed(self, **request: Any) -> None:
        await asyncio.to_thread(super().update_weights_from_distributed, **request)


class Llm:
    """vLLM's AsyncLLM of one worker, which has the methods of wsync's extension."""

    def __init__(self) -> None:
        self._worker = BareWorker(shapes=SHAPES, threads=1)
        self.paused = False

    def state(self) -> tuple[str, str, bool]:
        return self._worker.digest(), self._worker.updates.weight_version, self.paused

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        return [await asyncio.to_thread(getattr(self, method), *args)]

    def wsync_describe(self, only: int | None = None) -> str:
        version, instance = self._worker.updates.weight_version, str(os.getpid())
        facts = {"rank": 0, "workers": 1, "engine": 0, "engines": 1, "instance": instance}
        return json.dumps({**facts, "weight_version": version})

    def wsync_update(
        self, messages: list[str], version: str | None = None, first: int = 0
    ) -> list[Any]:
        return list(self._worker.receiver.handle(messages[0].encode(), version=version))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self) -> bool:
        return True


class Trainer:
    """A rank of a trainer, whose ranks share the tensors as pipeline stages do."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        join(rank, size, store)
        self._names = sorted(SHAPES)[rank::size]
        self._weights = {name: drawn(0)[name] for name in self._names}
        self._updater: Any = None
        self._exits = False

    def ping(self) -> None:
        pass

    def connect(self, name: str, engines: list[Any], **arguments: Any) -> None:
        """Makes slime's class of this name, with these of slime's arguments."""
        self.disconnect()
        kind = getattr(wsync, name)
        self._updater = kind(
            SimpleNamespace(**arguments),
            from_tensors(self._weights),
            self._given,
            model_name="any",
            options=wsync.Options(deadline=60.0, progress=False, bucket_nbytes=4096, lost="raise"),
        )
        self._updater.connect_rollout_engines(engines, None)

    def update_weights(self, seed: int, *, exits: bool = False) -> dict[str, float]:
        """exits: the process ends in the middle of it."""
        self._weights.update({name: drawn(seed)[name] for name in self._names})
        self._exits = exits
        self._updater.update_weights()
        found: dict[str, float] = self._updater.pop_metrics()
        return found

    def _given(self) -> dict[str, torch.Tensor]:
        if self._exits:
            os._exit(3)
        return self._weights

    def disconnect(self) -> None:
        if self._updater is not None:
            self._updater.disconnect_rollout_engines()
            self._updater = None


class AsyncTrainer(Trainer):
    """The same of coroutines."""

    async def connect(self, *given: Any, **named: Any) -> None:
        super().connect(*given, **named)

    async def update_weights(self, seed: int, *, exits: bool = False) -> dict[str, float]:
        return super().update_weights(seed, exits=exits)
