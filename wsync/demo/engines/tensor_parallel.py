"""One engine of several tensor-parallel worker processes with fused, sharded parameters.

Each worker declares the boxes that it keeps, so that the trainer
delivers those and nothing else; `delivery="full"` asks for whole tensors instead, which every
worker then cuts itself, as stock engines do.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from wsync._core import InvalidArgumentError, LayoutError, StateError
from wsync.demo.engines.sharded import ShardedModel
from wsync.demo.engines.worker import ModelWorker
from wsync.demo.engines.workers import WorkersEngine
from wsync.dtypes import dtype_of
from wsync.engine.destination import Boxes
from wsync.engine.groups import Named
from wsync.engine.loaders import LayoutLoader, Loader, ModuleLoader
from wsync.machine.deadline import left

DELIVERIES: Final = ("needed", "full")
_GROUP_SECONDS: Final = 120.0


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
        if delivery not in DELIVERIES:
            raise InvalidArgumentError(f"delivery {delivery!r}: one of {', '.join(DELIVERIES)}")
        if tp < 1:
            raise InvalidArgumentError(f"tp {tp}: at least 1")
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-tp-")
        settings = {
            # plain values: a worker need not import transformers
            "config": SimpleNamespace(**{**config.to_dict(), "model_type": config.model_type}),
            "tp": tp,
            "experts": experts,
            "dtype": dtype,
            "delivery": delivery,
            "seed": seed,
            "store": os.path.join(self._folder.name, "store"),
        }
        ranks = [{**settings, "rank": rank} for rank in range(tp)]
        super().__init__(_Worker, ranks, name=name, timeout=timeout)

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        self._folder.cleanup()

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        self._load_from_disk(path, weight_version, timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {**super().model_info(timeout), "model_type": self._config.model_type}

    # --- what a user looks at ---------------------------------------------------------------

    def logits(self, ids: Sequence[int], timeout: float = 60.0) -> torch.Tensor:
        """fp32 logits [len(ids), vocab] of one prompt."""
        end = time.monotonic() + timeout
        with self._alone("logits", timeout):  # they are of the weights that were looked at
            self._check_consistent(left(end))
            data, shape = self._call("logits", [list(ids)] * self.workers, left(end))[0]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)

    def generate(
        self, ids: Sequence[int], *, max_new_tokens: int = 16, timeout: float = 60.0
    ) -> list[int]:
        """Greedy continuation of a prompt; StateError while the engine is paused."""
        if self.paused:
            raise StateError(f"engine {self.name}: generation is paused")
        tokens = list(ids)
        deadline = time.monotonic() + timeout
        for _ in range(max_new_tokens):
            tokens.append(int(self.logits(tokens, left(deadline))[-1].argmax()))
        return tokens[len(ids) :]

    def weights(self, timeout: float = 60.0) -> dict[str, torch.Tensor]:
        """Whole Hugging Face tensors put together from the workers' live parameters.

        LayoutError where workers that hold the same elements disagree, or where an element is
        held by none.
        """
        whole: dict[str, torch.Tensor] = {}
        held: dict[str, torch.Tensor] = {}
        for rank, pieces in enumerate(self._call("pieces", None, timeout)):
            for name, dtype, shape, start, extent, data in pieces:
                kind = dtype_of(dtype)
                values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                values = values.view(kind).reshape(extent).view(_bits(kind))
                if name not in whole:
                    whole[name] = torch.zeros(shape, dtype=kind)
                    held[name] = torch.zeros(shape, dtype=torch.bool)
                box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
                target, known = whole[name].view(_bits(kind))[box], held[name][box]
                if not torch.equal(target[known], values[known]):
                    raise LayoutError(f"{name}: worker {rank} disagrees with an earlier one")
                target.copy_(values)
                known.fill_(True)
        for name, known in held.items():
            if not known.all():
                raise LayoutError(f"{name}: {int((~known).sum())} elements are on no worker")
        return whole


class _Worker(ModelWorker):
    """A worker process: its share of the model, its receiver."""

    def __init__(
        self,
        *,
        config: Any,
        rank: int,
        tp: int,
        experts: str,
        dtype: str,
        delivery: str,
        seed: int,
        store: str,
    ) -> None:
        self.model = ShardedModel(
            config, rank=rank, tp=tp, experts=experts, dtype=dtype_of(dtype), seed=seed
        )
        if tp > 1:
            dist.init_process_group(
                "gloo",
                init_method="file://" + store,
                rank=rank,
                world_size=tp,
                timeout=timedelta(seconds=_GROUP_SECONDS),
            )
        loader: Loader
        if delivery == "needed":
            loader = LayoutLoader(self.model.layout(), list(self.model.tensors.values()))
        else:
            loader = ModuleLoader(self.model)
        super().__init__(loader, rank=rank)

    def answer(self, what: str, argument: Any) -> Any:
        if what == "logits":
            logits = self.model.logits(argument).float().contiguous()
            # plain bytes: torch would share tensors by descriptors
            return (logits.numpy().tobytes(), tuple(logits.shape)) if self.rank == 0 else None
        if what == "pieces":
            return [self._piece(piece) for piece in self.model.pieces]
        return super().answer(what, argument)

    def names(self) -> Iterable[str]:
        return (piece.name for piece in self.model.pieces)

    def load_weights(self, weights: Named) -> None:
        self.model.load_weights(weights)

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> Boxes:
        return Boxes(self.model.layout(), list(self.model.tensors.values()))

    def _piece(self, piece: Any) -> tuple[Any, ...]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        values = self.model.box(piece).contiguous().reshape(-1).view(torch.uint8)
        data = values.numpy().tobytes()
        return piece.name, dtype, piece.shape, piece.start, piece.extent, data


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Integers of the same size: bytes are compared, not numbers."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
