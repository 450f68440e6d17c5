"""Engine processes whose weights are on a GPU; in a dry run they are in the host's memory and only
the rings are on what stands in for one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch
from support import fused
from support.weights_only_engine import BareWorker, ProcessEngine
from support.worker_processes import WorkersEngine

from wsync.demo.engines.model_worker import ModelWorker
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import CallingLoader, Loader

DRY = "WSYNC_GPU_DRY_RUN"  # 1: tests of mark gpu run on the driver that WSYNC_CUDA_LIB names


def dry() -> bool:
    return os.environ.get(DRY) == "1"


def where() -> str:
    return "cpu" if dry() else "cuda:0"


def slow(seconds: float = 0.2) -> None:
    """Keeps torch's current stream busy; the clocks of GPUs are between 1 and 3 GHz."""
    torch.cuda._sleep(int(seconds * 2e9))


class GpuEngine(ProcessEngine):
    """Bare weights on the GPU."""

    def __init__(self, weights: dict[str, torch.Tensor], **dtypes: torch.dtype) -> None:
        shapes = {n: (tuple(t.shape), dtypes.get(n, t.dtype)) for n, t in weights.items()}
        super().__init__(shapes, name="gpu", worker=_BareGpuWorker)

    def start_slow_copy(self) -> None:
        """Has torch copy all weights on its stream, after it has been kept busy for a while."""
        self._call("slow_copy", None, 60.0)

    def slow_copy(self) -> dict[str, torch.Tensor]:
        data = self._call("copied", None, 60.0)[0]
        found: dict[str, torch.Tensor] = torch.load(io.BytesIO(data))
        return found


class _BareGpuWorker(BareWorker):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, device=where())

    def slow_copy(self) -> None:
        slow()
        self._copy = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def copied(self) -> bytes:
        return _saved(self._copy)

    def weights(self) -> bytes:
        return _saved(self.tensors)


class FusedEngine(WorkersEngine):
    """A module with fused parameters on the GPU, and its load_weights; learnt or as it is."""

    def __init__(self, *, learnt: bool) -> None:
        super().__init__(_FusedWorker, [{"learnt": learnt}], name="fused")

    def held(self) -> dict[str, torch.Tensor]:
        """What the module holds, on the host."""
        data = self._call("held", None, 60.0)[0]
        found: dict[str, torch.Tensor] = torch.load(io.BytesIO(data))
        return found

    def reason(self) -> str:
        """Why the module's own loader is used; "" if it was learnt."""
        answer: str = self._call("reason", None, 60.0)[0]
        return answer


class _FusedWorker(ModelWorker):
    def __init__(self, *, learnt: bool) -> None:
        self._module = module()
        kind: Callable[..., Loader] = RecordedLoader if learnt else CallingLoader
        self._loader = kind(self._module)
        super().__init__(self._loader)

    def held(self) -> bytes:
        return _saved(fused.held(self._module))

    def reason(self) -> str:
        return getattr(self._loader, "reason", "not asked to learn")


def _saved(tensors: dict[str, torch.Tensor]) -> bytes:
    data = io.BytesIO()
    torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, data)
    return data.getvalue()


def module() -> fused.Fused:
    """On the GPU with all it holds, of which torch moves parameters and buffers by itself."""
    made = fused.Fused().to(where())
    made.w_kc, made.w_vc = made.w_kc.to(where()), made.w_vc.to(where())
    return made
