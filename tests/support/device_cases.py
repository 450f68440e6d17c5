"""What a process does in tests/test_device_mix.py, on a host and two GPUs that tests/fakecuda
plays: what each call that mixes devices says."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.played_gpu import put, reserve

import wsync
from wsync import _core
from wsync.machine.device import find, has_memory, uuid

PATIENCE = 30.0


def _devices() -> list[_core.Device]:
    return [_core.host(), find(uuid(0)), find(uuid(1))]


def _pairs() -> list[tuple[_core.Device, _core.Device]]:
    return list(itertools.permutations(_devices(), 2))


def said(call: Callable[[], object]) -> str:
    """The error of a call, "" for none."""
    try:
        call()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def foreign_events() -> list[str]:
    found = []
    for mine, other in _pairs():
        stream = _core.Stream(1, mine)
        event = _core.Event(_core.Memory(4096, other, control=True), 0)
        found.append(said(partial(stream.record, event, 1)))
        found.append(said(partial(stream.wait, event, 1)))
        stream.close()
    return found


def foreign_sessions() -> list[str]:
    """Of both halves of a session, at all their calls that take a stream."""
    found = []
    for mine, other in _pairs():
        exporter = _core.Exporter()
        importer = _core.Importer(exporter.address, b"", PATIENCE, mine)
        exporter.accept(PATIENCE)
        exporter.attach(_core.Memory(4096, mine), b"", PATIENCE)
        exporter.begin(1, 1, PATIENCE)
        importer.begin(PATIENCE)
        right, wrong = _core.Stream(1, mine), _core.Stream(1, other)
        for call, round in (
            (exporter.acquire, -1),
            (exporter.post, 0),
            (importer.take, 0),
            (importer.done, 0),
        ):
            found.append(said(partial(call, round, wrong, PATIENCE)))
            assert said(partial(call, round, right, PATIENCE)) == ""
        exporter.close()
        importer.close()
    return found


def file_of_a_gpu() -> str:
    """A route from tensors on a GPU into a file."""
    builder = _core.LayoutBuilder()
    builder.add_shard("a", "float32", [64], [0], [64], 0, 0, [4])
    layout = builder.build()
    tensors = [put(torch.ones(64))]
    sources = _core.BufferTable.of(_core.describe(tensors, gpu=True), tensors)
    with tempfile.TemporaryFile() as file:
        files = [("file", file.fileno(), 256)]
        return said(partial(_core.write_files, _core.Route(layout, layout), 0, 1, sources, files))


def foreign_exchanges() -> list[str]:
    """At the calls that take a stream, and of one of another device that copies its messages."""
    found = []
    builder = _core.LayoutBuilder()
    builder.add_shard("a", "uint8", [64], [0], [64], 0, 0, [1])
    layout = builder.build()
    plan = _core.Plan(layout, [(layout, False)], [(0, 0)], [0], 0)
    for mine, other in _pairs():
        exchange = _core.Exchange.shared(0, 1, 4096, None, mine)
        stream = _core.Stream(1, other)
        found.append(said(partial(exchange.post, 0, stream)))
        found.append(said(partial(exchange.release, 0, stream)))
        exchange.connect([exchange.address], PATIENCE)
        exchange.begin(plan)
        exchange.acquire(0, PATIENCE)
        spans = exchange.spans(0)
        copy = said(partial(stream.copy, plan, 0, _core.PACK, spans, spans))
        assert copy.startswith("InvalidArgumentError: memory of GPU") == (mine.ordinal >= 0), copy
        exchange.close()
    return found


def tensors_with_memory() -> list[bool]:
    """Whether there is memory: on the host, on a GPU, and at addresses that are only reserved."""
    one: list[Any] = [torch.zeros(4), put(torch.zeros(4), 1), reserve(torch.zeros(4))]
    return [has_memory(tensor) for tensor in one]
