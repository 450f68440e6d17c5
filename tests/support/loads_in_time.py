"""A module of two weights whose load_weights is given, updates of it that have to end, and what
learning patches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.two_weights import Pairs, TwoWeights, draw
from support.workers import ThreadEngine
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import wsync
from wsync.engine.learn.loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
PATIENCE = 45.0
Load = Callable[[Any, Pairs], None]


class Module(TwoWeights):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    def load_weights(self, pairs: Pairs) -> None:
        self._load(self, pairs)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor)


def in_time(act: Callable[[], Any]) -> Any:
    """What it returns; what does not end fails the test and no other one."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((act(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it has not ended"
    if found[0][1] is not None:
        raise found[0][1]
    return found[0][0]


def patchable() -> list[Any]:
    kinds = torch.nn.Module, torch.nn.Parameter, torch.Tensor
    ways = "__getattribute__", "__setattr__", "__delattr__"
    return [
        *(getattr(kind, way) for kind in kinds for way in ways),
        *(ThreadPoolExecutor.submit, threading.Thread.start),
        list(_get_current_dispatch_mode_stack()),
    ]


def plain(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        module.load_one(name, tensor)


def delivered(load: Load) -> RecordedLoader:
    module = Module(load)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), [ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert module.a.equal(draw(seed)["a"]) and module.b.equal(draw(seed)["b"])
    return loader
