"""An engine process with bare parameters, updated by wsync or in the peers' way."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import peers
from wsync.control import LOAD_FORMAT

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and bytes, in the order of names."""
    total = hashlib.blake2b()
    for name in sorted(tensors):
        total.update(name.encode())
        data = tensors[name].detach().contiguous().flatten().view(torch.uint8)
        total.update(data.numpy())
    return total.hexdigest()


class Consumer:
    """Starts the process; has slime's engine methods, so that wsync takes it as an engine."""

    name = "consumer"
    workers = 1
    load_formats = (LOAD_FORMAT,)

    def __init__(self, shapes: Shapes, bucket_class: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, dict(shapes), bucket_class), daemon=False
        )
        self._process.start()
        theirs.close()
        self.digest()  # importing torch takes a while: an engine is one that answers

    def pause_generation(self) -> None:
        return None

    def flush_cache(self) -> None:
        return None

    def continue_generation(self) -> None:
        return None

    def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **_: Any
    ) -> tuple[bool, str]:
        return self._ask("wsync", serialized_named_tensors[0])  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Hash of the parameters as they are now."""
        return self._ask("digest", None)  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Fills every parameter with bytes that no weight has."""
        self._ask("clear", None)

    def close(self) -> None:
        self.connection.send(("stop", None))
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, what: str, argument: Any) -> Any:
        self.connection.send((what, argument))
        return self.connection.recv()


def _serve(connection: Connection, shapes: Shapes, bucket_class: Any) -> None:
    from wsync import payload
    from wsync.engine.loaders import ModuleLoader
    from wsync.engine.receiver import Receiver

    torch.set_num_threads(1)
    module = _Bare(shapes)
    parameters = dict(module.state_dict(keep_vars=True))
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    receiver = Receiver(ModuleLoader(module))
    while True:
        what, argument = connection.recv()
        answer: Any = None
        if what == "stop":
            return
        if what == "peer":
            peers.load(argument, parameters, bucket_class)
        elif what == "wsync":
            control = payload.control_bytes(payload.load(argument))
            answer = receiver.handle(control)
        elif what == "digest":
            answer = digest(parameters)
        elif what == "clear":
            for parameter in parameters.values():
                parameter.view(torch.uint8).fill_(0xA5)
        connection.send(answer)


class _Bare(torch.nn.Module):
    """Parameters under dotted names and nothing else."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
