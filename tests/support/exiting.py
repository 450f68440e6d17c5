"""An interpreter that ends in the middle of an update, with nothing closed.

`python -P -m support.exiting trainer|engine SOCKET PHASE HOW`: a trainer updates an engine of
fault_engine.py, an engine of one worker answers handles; both update once before.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
from support import fault_engine
from support.fault_points import Fault

import wsync
from wsync._core import Exporter, LayoutBuilder

OPTIONS = wsync.Options(
    deadline=60.0,
    progress=False,
    round_nbytes=1 << 13,
    ring_nbytes=1 << 14,
    flush_cache=False,
    verify="never",
)
CODES = {"wait": 0, "exit": 3, "raise": 1}

kept: list[Any] = []  # what only the end of the interpreter takes down


class Ending(Fault):
    """What happens to the interpreter at a phase, once the other side is `ready` for it; the main
    thread may look at `reached`."""

    def __init__(self, phase: str, how: str, ready: Callable[[], bool] = lambda: True) -> None:
        super().__init__(phase, how, tempfile.gettempdir())
        self.reached = threading.Event()
        self.ready = ready

    def at(self, phase: str) -> None:
        if phase == self.phase:
            while not self.ready():
                time.sleep(0.01)
            self.reached.set()
        super().at(phase)

    def _wait(self) -> None:
        """The main thread ends while this one is in the extension.  (In the middle of torch the
        interpreter, up to 3.13, may end it with an abort of the process.)"""
        Exporter(self.folder).accept(60.0)


class One(fault_engine.Handle):
    """Reaches an engine of this file."""

    workers = 1


def trainer(path: str, phase: str, how: str) -> None:
    engine = fault_engine.Handle(path)
    sync = wsync.connect(fault_engine.weights(1), [engine], options=OPTIONS)
    kept.append(sync)
    sync.update(version="1")

    def updates() -> int:
        asked: int = engine.model_info(OPTIONS.deadline)["updates"]
        return asked

    # rounds are on their way before an engine is told of an update that it may never hear of
    before = updates()
    ending = Ending(phase, how, lambda: updates() > before)
    ending.arm()

    def update() -> None:
        sync.update(fault_engine.weights(2), version="2")

    if how == "wait":
        threading.Thread(target=update, daemon=True).start()
        ending.reached.wait()
    else:
        update()


def engine(path: str, phase: str, how: str) -> None:
    builder = LayoutBuilder()
    tensors = [torch.zeros(shape) for shape in fault_engine.SHAPES.values()]
    for index, (name, (rows, width)) in enumerate(fault_engine.SHAPES.items()):
        builder.add_shard(
            name, "float32", [rows, width], [0, 0], [rows, width], index, 0, [4 * width, 4]
        )
    ending = Ending(phase, "wait" if how == "raise" else how)
    loader = fault_engine._Loader(builder.build(), tensors)
    receiver = fault_engine._Receiver(loader)
    kept.extend([loader, receiver])

    def serve(pipe: Connection) -> None:
        with pipe, contextlib.suppress(OSError, EOFError):
            what, argument, _ = pipe.recv()
            good, answer = True, {"version": "default"}
            if what == "update":
                good, answer = receiver.answer(argument[0][0])
                if receiver.state.update == 1:
                    loader.fault = receiver.fault = ending
            pipe.send((good, answer))

    def listen(listener: Listener) -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()

    listener = Listener(path, backlog=64)
    kept.append(listener)
    threading.Thread(target=listen, args=(listener,), daemon=True).start()
    ending.reached.wait()
    if how == "raise":
        raise RuntimeError("the engine's main thread fails")
    if how == "exit":
        sys.exit(CODES["exit"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"trainer": trainer, "engine": engine}[sys.argv[1]](*sys.argv[2:])
