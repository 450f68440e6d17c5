"""Threads of an engine go on while its load_weights is tried: what they do is not undone."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader

OPTIONS = wsync.Options(deadline=60, progress=False)
Tensors = dict[str, torch.Tensor]
NAMES = "abcd"


class Engine(torch.nn.Module):
    def __init__(self, load: Callable[[Engine, Tensors], None]) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(8, 8)))
        self.seen: dict[str, list[float]] = {}
        self.loads = 0
        self.waiting = deque[int]()
        self.stats = Counter[str]()
        self.sessions: dict[str, dict[int, str]] = {"open": {}}
        self.times = np.zeros(1)
        self.served = 0
        self.a.served = 0  # type: ignore[attr-defined]
        self._load = load

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(pairs))

    def serve(self) -> None:
        """One more request."""
        self.served += 1
        self.a.served += 1  # type: ignore[attr-defined]
        self.waiting.append(self.served)
        self.stats["requests"] += 1
        self.sessions["open"][self.served] = "new"
        self.times[0] += 1
        setattr(self, f"request_{self.served}", "open")

    def requests(self) -> list[int]:
        named = sum(name.startswith("request_") for name in vars(self))
        ways = (self.waiting, self.sessions["open"])
        counts = self.served, self.a.served, self.stats["requests"], int(self.times[0]), named
        return [*map(len, ways), *counts]  # type: ignore[list-item]


class Client:
    """A thread that has an engine serve as many requests as it is asked to."""

    def __init__(self) -> None:
        self.sent = 0
        self.engine: Any = None
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self) -> None:
        self._asked.release()
        assert self._done.acquire(timeout=60)

    def end(self) -> None:
        self._ended = True
        self._asked.release()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while self._asked.acquire(timeout=600) and not self._ended:
            self.engine.serve()
            self.sent += 1
            self._done.release()


@pytest.fixture
def client() -> Iterator[Client]:
    found = Client()
    yield found
    found.end()


def noting(engine: Engine, tensors: Tensors, name: str) -> None:
    """What a load leaves on the module of the values it was tried with, which is put back."""
    engine.loads += 1
    engine.seen.setdefault(name, []).append(float(tensors[name][0, 0]))


def computed(engine: Engine, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        getattr(engine, name).data.copy_(tensor)
    if "a" in tensors:
        noting(engine, tensors, "a")


def unlearnable(engine: Engine, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        getattr(engine, name).data.copy_(tensor / 2)
        noting(engine, tensors, name)


def refused(engine: Engine, tensors: Tensors) -> None:
    """d is never loaded."""
    computed(engine, {name: tensor for name, tensor in tensors.items() if name != "d"})


@pytest.mark.parametrize("load", [computed, unlearnable, refused])
def test_requests_that_come_while_a_loader_is_tried_are_kept(
    load: Callable[[Engine, Tensors], None], client: Client
) -> None:
    def load_meanwhile(engine: Engine, tensors: Tensors) -> None:
        load(engine, tensors)
        client.send()

    engine = client.engine = Engine(load_meanwhile)
    weights = {name: torch.randn(8, 8) for name in NAMES}
    loader = RecordedLoader(engine)
    with wsync.connect(weights, engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        if load is refused:
            with pytest.raises(wsync.WsyncError, match=r"d .256 of its 256 bytes"):
                sync.update()
        else:
            sync.update()
    assert client.sent > 2
    assert engine.requests() == [client.sent] * 7
    # of the load that counts alone
    names = {computed: "a", unlearnable: NAMES, refused: ""}[load]
    assert engine.seen == {name: [float(weights[name][0, 0])] for name in names}
