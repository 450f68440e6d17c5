"""One engine of several tensor-parallel worker processes with fused, sharded parameters.

Each worker declares the boxes that it keeps, so that the trainer
delivers those and nothing else; `delivery="full"` asks for whole tensors instead, which every
worker then cuts itself, as stock engines do.
"""

import io
import os
from types import SimpleNamespace
from typing import Any

import torch
from support.tensor_parallel_model import ShardedModel, box_at
from support.worker_processes import WorkersEngine

from wsync._core import LayoutError
from wsync.demo.engines.model_worker import ModelWorker, Named
from wsync.engine.ring_loaders import CallingLoader, LayoutLoader, Loader
from wsync.machine.deadline import Deadline
from wsync.module_tensors import dtype_of, same_bytes


class TensorParallelEngine(WorkersEngine):
    """An engine of `tp` worker processes, and its handle.

    config: a transformers config (llama, qwen2, qwen3, qwen3_moe).  experts: "tp" cuts every
    expert, "ep" deals them out.  Weights are random until the first update.  Close it, or use
    `with`; the workers end with this process.
    """

    def __init__(
        self,
        config: Any,
        *,
        tp: int = 2,
        experts: str = "tp",
        dtype: str = "float32",
        delivery: str = "needed",
        name: str = "tensor-parallel",
        seed: int = 0,
        timeout: float = 120.0,
    ) -> None:
        self._config = config
        settings = {
            # plain values: a worker need not import transformers
            "config": SimpleNamespace(**{**config.to_dict(), "model_type": config.model_type}),
            "tp": tp,
            "experts": experts,
            "dtype": dtype,
            "delivery": delivery,
            "seed": seed,
        }
        ranks = [{**settings, "rank": rank} for rank in range(tp)]
        super().__init__(_Worker, ranks, name=name, timeout=timeout)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        end = Deadline(timeout)
        path = os.path.realpath(path)  # a link may move while they come to it
        version = None if weight_version is None else str(weight_version)
        told = {"model_path": path, "weight_version": version}
        self._write("update_weights_from_disk", [told] * self.workers, end)
        self._state(end.left)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {**super().model_info(timeout), "model_type": self._config.model_type}

    # --- what a user looks at ---------------------------------------------------------------

    def weights(self, timeout: float = 60.0) -> dict[str, torch.Tensor]:
        """Whole Hugging Face tensors put together from the workers' live parameters.

        LayoutError where workers that hold the same elements disagree, or where an element is
        held by none.
        """
        whole: dict[str, torch.Tensor] = {}
        held: dict[str, torch.Tensor] = {}
        for rank, data in enumerate(self._call("boxes", None, timeout)):
            for name, shape, start, values in torch.load(io.BytesIO(data)):
                if name not in whole:
                    whole[name] = torch.zeros(shape, dtype=values.dtype, device="cpu")
                    held[name] = torch.zeros(shape, dtype=torch.bool, device="cpu")
                box = box_at(start, values.shape)
                target, known = whole[name][box], held[name][box]
                if not same_bytes(target[known], values[known]):
                    raise LayoutError(f"{name}: worker {rank} disagrees with an earlier one")
                target.copy_(values)
                known.fill_(True)
        for name, known in held.items():
            if not known.all():
                raise LayoutError(f"{name}: {int((~known).sum())} elements are on no worker")
        return whole


class _Worker(ModelWorker):
    """A worker process: its share of the model, its receiver."""

    def __init__(self, *, rank: int, tp: int, dtype: str, delivery: str, **model: Any) -> None:
        self.model = ShardedModel(rank=rank, tp=tp, dtype=dtype_of(dtype), **model)
        loader: Loader
        if delivery == "needed":
            loader = LayoutLoader(self.model.layout(), list(self.model.tensors.values()))
        else:
            loader = CallingLoader(self.model)
        super().__init__(loader, rank=rank)

    def boxes(self) -> bytes:
        held = [(*box[:3], box.held.clone()) for box in self.model.boxes]
        torch.save(held, data := io.BytesIO())
        return data.getvalue()

    def load_weights(self, weights: Named) -> None:
        self.model.load_weights(weights)
