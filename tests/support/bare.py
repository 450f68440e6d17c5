"""An engine process of bare parameters under given names, without any model around them."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from wsync.control import LOAD_FORMAT
from wsync.engine.loaders import ModuleLoader
from wsync.engine.receiver import Receiver

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


class BareEngine:
    """Has slime's engine methods; `weights` returns what it holds."""

    name = "bare"
    workers = 1
    load_formats = (LOAD_FORMAT,)

    def __init__(self, shapes: Shapes) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(shapes)))
        self._process.start()
        theirs.close()
        self.weight_version: str | None = None
        self.weights()  # importing torch takes a while: an engine is one that answers

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        weight_version: str | None = None,
        **_: Any,
    ) -> tuple[bool, str]:
        success, text = self._ask("update", serialized_named_tensors[0])
        if success and weight_version is not None:
            self.weight_version = weight_version
        return success, text

    def weights(self) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(io.BytesIO(self._ask("weights", None)))
        return loaded

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def __enter__(self) -> BareEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: str, argument: Any) -> Any:
        self._pipe.send((what, argument))
        return self._pipe.recv()


def _serve(pipe: Connection, shapes: Shapes) -> None:
    from wsync import payload

    module = torch.nn.Module()
    for name, (shape, dtype) in shapes.items():
        *path, leaf = name.split(".")
        home = module
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, torch.nn.Module())
            home = getattr(home, part)
        home.register_buffer(leaf, torch.full(tuple(shape), 77, dtype=dtype))
    receiver = Receiver(ModuleLoader(module))
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            return
        if what == "weights":
            data = io.BytesIO()
            torch.save(dict(module.state_dict()), data)
            pipe.send(data.getvalue())
        else:
            control = payload.control_bytes(payload.load(argument))
            assert control is not None
            pipe.send(receiver.handle(control))
