"""What two trainer ranks do in tests/test_agreement.py, where one of them is the odd one out."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.call_cases import Engine
from support.errors import error_of
from support.quantised_cases import quantised
from support.workers import ThreadEngine

import wsync
from wsync.disk import DiskSync
from wsync.engine.ring_loaders import ModuleLoader
from wsync.exchange.trainer_group import TrainerGroup
from wsync.layout import from_tensors
from wsync.trainer import updates_base

OPTIONS = wsync.Options(deadline=60.0, progress=False, delivery="stock")


class Stock(Engine):
    """Answers everything, and notes the versions that it is told."""

    load_formats = ()

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[str] = []

    def update_weights_from_tensor(self, **given: Any) -> tuple[bool, str]:
        if given.get("weight_version"):
            self.versions.append(given["weight_version"])
        return True, ""


def disagree() -> dict[str, Any]:
    """The errors of this rank, where rank 1 differs from rank 0."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    layout = from_tensors({"a": torch.ones(4)})
    sparse = {"a": torch.ones(4).to_sparse() if rank == 1 else torch.ones(4)}
    start = time.monotonic()
    found["layout"] = error_of(lambda: wsync.connect(sparse, [Stock()], options=OPTIONS))
    found["updater"] = error_of(
        lambda: wsync.UpdateWeightFromTensor(
            SimpleNamespace(), [None] if rank else [], None, model_name="what", options=OPTIONS
        )
    )
    found["seconds"] = time.monotonic() - start
    engine = Stock()
    with wsync.connect(layout, [engine], options=OPTIONS) as sync:
        found["version"] = error_of(lambda: sync.update(version=7 + rank))
        found["odd"] = error_of(lambda: sync.update(version="" if rank else "x"))
        weights = {"a": torch.ones(4)} if rank == 0 else None
        found["weights"] = error_of(lambda: sync.update(weights, version=8))
        sync.update(version=9)
    found["versions"] = engine.versions
    found["closed"] = error_of(sync.update)
    return found


def of_another_rank(folder: str) -> dict[str, str]:
    """What is said of layouts that were not made for this rank."""
    alone = [dist.new_group([member]) for member in range(2)]
    own = from_tensors({"a": torch.ones(4)}, group=alone[dist.get_rank()])
    for group in alone:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    strange = dataclasses.replace(own, group=None)
    written = wsync.Options(deadline=60.0, progress=False)
    return {
        "sync": error_of(lambda: wsync.Sync(strange, [Stock()], options=OPTIONS)),
        "disk": error_of(lambda: DiskSync(strange, folder=folder, options=written)),
        "fewer": error_of(lambda: _ended(folder)),
    }


def _ended(folder: str) -> None:
    """Rank 0 alone, with a layout of two ranks: the others' group has ended."""
    layout = from_tensors({f"w{dist.get_rank()}": torch.ones(4)})
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        DiskSync(dataclasses.replace(layout, group=group), folder=folder)


def unlike(folder: str) -> dict[str, str]:
    """The errors of this rank, where each means something else by an argument."""
    layout, rank = from_tensors({"a": torch.ones(4)}), dist.get_rank()
    quiet = wsync.Options(progress=False)
    remote = dataclasses.replace(quiet, delivery="distributed")

    def write(**given: Any) -> str:
        return error_of(lambda: DiskSync(layout, options=quiet, **{"folder": folder, **given}))

    def send(**given: Any) -> str:
        options = dataclasses.replace(remote, **given)
        return error_of(lambda: wsync.Sync(layout, [Stock()], options=options))

    return {
        "folder": write(folder=f"{folder}/{rank}"),
        "dtype": write(dtype=(None, "bfloat16")[rank]),
        "shard_nbytes": write(shard_nbytes=(16, 8)[rank]),
        "broadcast": send(broadcast=("bucket", "tensor")[rank]),
        "backend": send(backend=("gloo", "nccl")[rank]),
    }


def absent() -> str:
    """Rank 1 does not come at first; then both do, rank 0 for the second time."""
    error = ""
    if dist.get_rank() == 0:
        error = error_of(lambda: TrainerGroup(timeout=1))
    dist.barrier()
    group = TrainerGroup(timeout=120)
    dist.barrier()  # who leaves sooner may be missed by a rank that still connects
    group.close()
    return error


class Interrupting(dict[str, torch.Tensor]):
    """Weights that somebody waits for in vain."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def interrupted_to_connect() -> str:
    weights = {"a": torch.ones(4)}
    given = Interrupting(weights) if dist.get_rank() == 1 else weights
    try:
        return error_of(lambda: wsync.connect(given, [Stock()], options=OPTIONS))
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def codes_of_a_later_stage(folder: str) -> list[str]:
    """Rank 1 alone holds codes, and the engine says that it does; what connecting raises."""
    stage: dict[str, torch.Tensor] = {"embedding": torch.ones(2, dtype=torch.bfloat16)}
    if dist.get_rank() == 1:
        weights = {"mlp.x_proj.weight": torch.ones(16, 64, dtype=torch.bfloat16)}
        stage = quantised(weights, "one block")
    engine = Stock()
    engine.server_info = lambda: {"tp_size": 1, "model_path": folder}  # type: ignore[attr-defined]
    return [
        error_of(lambda: wsync.connect(stage, [engine], options=OPTIONS).close()),
        error_of(lambda: wsync.DiskSync(stage, folder=folder, base=folder).close()),
    ]


def _interrupted(sync: wsync.Sync) -> str:
    """The error of an update of which rank 1 does not see the end."""
    confirm, error = TrainerGroup.confirm, ""

    def interrupted(self: TrainerGroup) -> None:
        confirm(self)
        dist.barrier()  # the others have returned
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        TrainerGroup.confirm = interrupted  # type: ignore[method-assign]
    try:
        sync.update()
        dist.barrier()
    except KeyboardInterrupt:
        error = "KeyboardInterrupt"
    finally:
        TrainerGroup.confirm = confirm  # type: ignore[method-assign]
    dist.barrier()  # as a training step would
    return error


def called_alone() -> list[str]:
    """The errors of updates after one that rank 1 has called alone; each rank serves a worker."""
    modules = [torch.nn.Linear(2, 2) for _ in range(2)]
    weights = {name: tensor.detach().clone() for name, tensor in modules[0].named_parameters()}
    engines = [ThreadEngine([ModuleLoader(m) for m in modules])] if dist.get_rank() == 0 else []
    options = dataclasses.replace(OPTIONS, delivery="wsync")
    late = mock.Mock(
        side_effect=wsync.DeadlineError("trainer rank 0 did not join the others within 60 s")
    )
    with wsync.connect(weights, engines, options=options) as sync:
        found = [error_of(lambda: sync.update(version=""))]
        if dist.get_rank() == 1:
            with mock.patch.object(updates_base, "TrainerGroup", late):
                assert error_of(sync.update).startswith("DeadlineError")
        found.append(error_of(sync.update))
        found.append(error_of(lambda: sync.update(version=7)))
        _interrupted(sync)
        found.append(error_of(sync.update))
    return found


def lose_a_rank() -> str:
    """Rank 2 is killed while the others wait for it; what these raise."""
    group = TrainerGroup(timeout=60.0)
    group.barrier()
    if dist.get_rank() == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except wsync.WsyncError as error:
        first = group.fail(error)
        return f"{type(first).__name__}: {first}"
    finally:
        group.close()
    return ""
