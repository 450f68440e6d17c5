"""One worker of an engine: its weights, and the requests that replace them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from wsync._core import InvalidArgumentError, LayoutError, RemoteError
from wsync.bucket import FlattenedTensorBucket
from wsync.checkpoints.safetensors_layout import Checkpoint
from wsync.engine.destination import named_tensors, state_of
from wsync.engine.receiver import Receiver
from wsync.engine.ring_loaders import Loader, ModuleLoader
from wsync.machine.deadline import Deadline
from wsync.messages import control, payload
from wsync.module_tensors.names import unfused

Named = Sequence[tuple[str, torch.Tensor]]
Facts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_CASTS: Final = ({torch.float32, torch.bfloat16}, {torch.float32, torch.float16})


class ModelWorker:
    """The base of all workers.  Subclasses define how tensors get into their model.

    Arguments of several methods: `end` is the time at which the caller stops waiting;
    `weight_version` is the version of the weights afterwards, or None if the request has none.
    """

    def __init__(self, loader: Loader, *, rank: int = 0) -> None:
        self.rank = rank
        self.receiver = Receiver(loader, worker=rank)
        self.updates = self.receiver.state

    # --- what subclasses define -------------------------------------------------------------

    def load_weights(self, weights: Named) -> None:
        """Loads named tensors, which may be a part of the model, as a stock engine does."""
        raise InvalidArgumentError(f"worker {self.rank} takes only wsync's control messages")

    def check_fit(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises LayoutError if a checkpoint with these shapes does not fit the model."""

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        """A context that excludes all other use of the weights while they are written."""
        return nullcontext()

    # --- requests ----------------------------------------------------------------------------

    def update(
        self,
        data: bytes,
        *,
        load_format: str | None,
        end: Deadline,
        weight_version: str | None = None,
    ) -> str:
        """Handles a control message or a stock engine's payload.  Returns a text for the answer."""
        content: Any = payload.load(data)
        if load_format == control.LOAD_FORMAT:
            with self.exclusive(end):
                success, text = self.receiver.answer(content, version=weight_version)
            if not success:
                raise RemoteError(text)
            return text
        with self._bucket(end, weight_version):
            self.load_weights(_tensors(content, load_format))
        return "Success"

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        end: Deadline,
        weight_version: str | None = None,
    ) -> None:
        """Loads a checkpoint folder.  Refuses an incomplete checkpoint before it loads anything."""
        with self.exclusive(end):
            checkpoint = Checkpoint(Path(model_path).resolve())  # a link may change meanwhile
            self.check_fit({name: place.shape for name, place in checkpoint.places.items()})
            with self.updates.replacing(f"loading {model_path}", weight_version):
                for path in checkpoint.files:
                    self.load_weights(list(load_file(path).items()))

    @contextmanager
    def _bucket(self, end: Deadline, weight_version: str | None) -> Iterator[None]:
        """A context in which one bucket is loaded."""
        with self.exclusive(end), self.updates.only():
            yield
            self.updates.bucket_loaded(weight_version)


class ModuleWorker(ModelWorker):
    """Copies whole tensors to the parameters and persistent buffers of the same names; see
    wsync.engine.ring_loaders.ModuleLoader.

    threads: number of threads that copy.
    """

    def __init__(self, module: torch.nn.Module, *, threads: int = 1) -> None:
        super().__init__(ModuleLoader(module, threads=threads))
        self.module = module

    def check_fit(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        named_tensors(self.module, shapes)

    def load_weights(self, weights: Named) -> None:
        """Copies tensors by name.  Checks them all before it writes the first byte."""
        state = state_of(self.module)
        facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        check_fit(weights, facts, type(self.module).__name__)
        with torch.no_grad():
            for name, tensor in weights:
                state[name].copy_(tensor)


def check_fit(weights: Named, facts: Facts, who: str) -> None:
    """Checks that tensors can be copied into a model.  facts: shape and dtype of each tensor of the
    model.  who: the model's name, for messages.

    Raises:
        LayoutError: a name is unknown, a shape differs, or a dtype cannot be cast.
    """
    for name, tensor in weights:
        if name not in facts:
            raise LayoutError(f"{name}: {who} has no such tensor{unfused([name])}")
        shape, dtype = facts[name]
        if tensor.shape != shape:
            given = tuple(tensor.shape)
            raise LayoutError(f"{name}: shape {given} was delivered, but {who} has {shape}")
        if tensor.dtype != dtype and {tensor.dtype, dtype} not in _CASTS:
            raise LayoutError(f"{name}: {tensor.dtype} was delivered, but {who} has {dtype}")


def _tensors(content: Any, load_format: str | None) -> Named:
    """The pairs of name and tensor in a stock engine's payload."""
    if load_format == control.FLATTENED_BUCKET:
        return FlattenedTensorBucket(**content).reconstruct_tensors()
    if load_format not in (None, "direct"):
        raise InvalidArgumentError(f"unknown load_format {load_format!r}")
    return [(name, tensor) for name, tensor in content]
