"""An engine that is one process of bare weights under given names, without a model around them.

For tests, benchmarks and notebooks: an update is all that it is good for.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO

import torch
from support.worker_processes import WorkersEngine

from wsync.demo.engines.model_worker import ModuleWorker
from wsync.machine.deadline import Deadline
from wsync.module_tensors import flat_bytes

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


class ProcessEngine(WorkersEngine):
    """Holds tensors of these shapes and dtypes, all zero before the first update.

    threads: copying threads.  The process ends with this one, or when the engine is closed.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        name: str = "process",
        threads: int = 1,
        timeout: float = 120.0,
        worker: "type[BareWorker] | None" = None,
    ) -> None:
        plain = {key: (tuple(shape), dtype) for key, (shape, dtype) in shapes.items()}
        settings = [{"shapes": plain, "threads": threads}]
        super().__init__(worker or BareWorker, settings, name=name, timeout=timeout)

    def fill(self, byte: int, timeout: float = 60.0) -> None:
        """Overwrites every byte of the weights with one value."""
        self._call("fill", [{"byte": byte}], timeout)

    def digest(self, timeout: float = 60.0) -> str:
        """What `digest` makes of the weights as they are now."""
        answer: str = self._call("digest", None, timeout)[0]
        return answer

    def weights(self, timeout: float = 60.0) -> dict[str, torch.Tensor]:
        """A copy of the weights as they are now."""
        data = self._call("weights", None, timeout)[0]
        loaded: dict[str, torch.Tensor] = torch.load(BytesIO(data))
        return loaded


class BareWorker(ModuleWorker):
    """The process: buffers of a module that has no code, on one of torch's devices."""

    def __init__(self, *, shapes: Shapes, threads: int, device: str = "cpu") -> None:
        module = torch.nn.Module()
        for name, (shape, dtype) in shapes.items():
            *path, leaf = name.split(".")
            home = module
            for part in path:
                if part not in home._modules:
                    home.add_module(part, torch.nn.Module())
                home = home.get_submodule(part)
            home.register_buffer(leaf, torch.zeros(tuple(shape), dtype=dtype, device=device))
        self.tensors: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        super().__init__(module, threads=threads)

    def fill(self, byte: int) -> None:
        for tensor in self.tensors.values():
            tensor.view(-1).view(torch.uint8).fill_(byte)

    def digest(self) -> str:
        return digest(self.tensors)

    def weights(self) -> bytes:
        torch.save({name: tensor.cpu() for name, tensor in self.tensors.items()}, data := BytesIO())
        return data.getvalue()


class RefusingWorker(BareWorker):
    """Refuses its second bucket before it takes it, when later ones may have been announced."""

    buckets = 0

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        self.buckets += 1
        if self.buckets == 2:
            time.sleep(0.5)
            raise ValueError("no second bucket")
        return super().exclusive(end)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and bytes, in the order of names."""
    total = hashlib.blake2b()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(flat_bytes(tensors[name]).cpu().numpy().data)
    return total.hexdigest()
