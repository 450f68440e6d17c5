"""Engines that are mere stand-ins, and trainer ranks that come upon them."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from support.errors import error_of

import wsync
from wsync.disk import DiskSync
from wsync.exchange.trainer_group import TrainerGroup
from wsync.layout import TrainerLayout, from_tensors
from wsync.messages.control import LOAD_FORMAT


class Engine:
    """Has slime's engine methods; raises what it is given, or stalls where that is an event."""

    workers = 1
    load_formats = (LOAD_FORMAT,)

    def __init__(self, *, pause: Any = None, update: Any = None) -> None:
        self._pause = pause
        self._update = update

    def pause_generation(self) -> None:
        _act(self._pause)

    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...

    def update_weights_from_tensor(self, **_: Any) -> tuple[bool, str]:
        _act(self._update)
        return True, ""


def _act(what: Any) -> None:
    if isinstance(what, threading.Event):
        what.wait(60)
    elif what is not None:
        raise what


def _layout() -> TrainerLayout:
    """Every rank holds a replica of one tensor."""
    return from_tensors({"a": torch.zeros(4)})


def _no_weights() -> dict[str, torch.Tensor]:
    if dist.get_rank() == 1:
        raise ValueError("no weights today")
    return {"a": torch.zeros(4)}


def _different(options: wsync.Options) -> None:
    if dist.get_rank() == 1:
        DiskSync(_layout(), folder=tempfile.gettempdir(), options=options)
    else:
        wsync.connect(_layout(), [Engine()], options=options)


def _more_than(before: int) -> int:
    """How many descriptors are left when those that threads give back are back."""
    deadline = time.monotonic() + 60
    while (more := len(os.listdir("/proc/self/fd")) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


def unfortunate() -> dict[str, Any]:
    """The errors that this rank sees, and how many descriptors they cost it."""
    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:  # ranks may differ in what else they did
        group = TrainerGroup(part, timeout=60)
        group.barrier()  # else rank 0 may be connecting yet to one that has left
        group.close()
    options = wsync.Options(deadline=60.0, progress=False)
    short = wsync.Options(deadline=4.0, progress=False)
    found: dict[str, Any] = {}

    def connect() -> None:
        patient = wsync.Options(deadline=60.0, progress=False)
        wsync.connect(_layout(), ["http://127.0.0.1:9"], options=patient)

    found["absent"] = error_of(connect)
    before = len(os.listdir("/proc/self/fd"))
    connect_error = error_of(connect)
    assert connect_error == found["absent"]
    release = threading.Event()
    with wsync.connect(_layout(), [Engine(pause=release)], options=short) as sync:
        found["stalled"] = error_of(sync.update)
        release.set()
        found["getter"] = error_of(lambda: sync.update(_no_weights))
    found["different"] = error_of(lambda: _different(options))
    exchange = "shared" if dist.get_rank() == 1 else "gloo"
    mine = dataclasses.replace(options, exchange=exchange)
    found["exchange"] = error_of(
        lambda: wsync.connect(_layout(), [Engine()], options=mine).update()
    )
    found["leaked"] = _more_than(before)
    return found
