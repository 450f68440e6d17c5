"""An engine's worker as a trainer rank, whose parameters fill another engine, or the files of a
checkpoint (see wsync.copying).

Whoever asks for a copy hosts a store, and sends each worker a control message with the store's
address and these orders:

    target, api_key   the engine to fill: its URL, and its key or null; or a folder
    model             for a folder: the source's checkpoint, as its path or name, and its revision
    ranks             the number of workers, which are the ranks of an ordinary update
    options           the fields of wsync.Options

In the store, a worker that is ready sets `worker<its number>` to the version of its weights.  Then
the asker sets `version`, and the workers make the update.  `done` is a JSON object: worker 0 sets
`report`, or the first worker that fails sets `error` (the name of the error's class, and its text).
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from wsync._core import LayoutBuilder, WsyncError, describe
from wsync.checkpoints.hub_cache import folder_of
from wsync.disk import DiskSync
from wsync.engine.ring_loaders import Held
from wsync.families.registry import TOGETHER
from wsync.layout import Members, TrainerLayout
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Deadline
from wsync.machine.device import of
from wsync.machine.error_text import error_text
from wsync.machine.host import is_elsewhere
from wsync.messages.control import Control
from wsync.module_tensors.names import group_of, group_of_parts
from wsync.options import Options
from wsync.report import Report
from wsync.sync import Sync

_ANSWER_SECONDS: Final = 5.0  # for the host of the store
_GONE: Final = "the process that asked for this copy gives no answer"
_c10d: Any = dist  # has more names than its types list


def send(message: Control, worker: int, look: Callable[[], tuple[Held, str]]) -> None:
    """Fills another engine with what this worker and the others hold.

    look: returns what this worker holds, and the version of its weights.
    """
    deadline = Deadline(message.deadline)

    def store_says(call: Callable[[], Any]) -> Any:
        # calls of a store do not return while its host is stopped
        return result(start("wsync-send", call), deadline, bool, _GONE)

    host, _, port = message.address.rpartition(":")
    # a client of a store tries again and again where nobody listens any more
    store_says(lambda: socket.create_connection((host, int(port)), _ANSWER_SECONDS).close())
    known: Any = {"is_master": False, "wait_for_workers": False}
    known["timeout"] = timedelta(seconds=message.deadline)
    store = store_says(lambda: _c10d.TCPStore(host, int(port), **known))
    try:
        held, version = look()
        store_says(lambda: store.set(f"worker{worker}", version))
        told = store_says(lambda: store.get("version")).decode()
        layout = _as_rank(held, Members(store, worker, message.orders["ranks"]))
        report = _fill(layout, message.orders, told)
    except Exception as error:
        said = json.dumps({"error": _described(error)})
        start("wsync-send", lambda: store.compare_set("done", "", said))
        raise
    if worker == 0:
        store.set("done", json.dumps({"report": dataclasses.asdict(report)}))


def _fill(layout: TrainerLayout, orders: dict[str, Any], version: str) -> Report:
    target, options = orders["target"], Options(**orders["options"])
    if "://" not in target:
        name, revision = orders["model"]
        base = folder_of(name, revision) if isinstance(name, str) else ""
        options = Options(deadline=options.deadline, progress=False)
        known: Any = {"base": base if os.path.isdir(base) else None, "options": options}
        with DiskSync(layout, folder=target, keep=None, **known) as disk:
            return disk.update(version=version)
    if options.delivery == "auto" and (of(layout.made_from) or is_elsewhere(target)):
        # engines do not share GPUs
        options = dataclasses.replace(options, delivery="distributed")
    engines = [target] if layout.rank == 0 else []
    with Sync(layout, engines, api_key=orders["api_key"], options=options) as sync:
        return sync.update(version=version)


def _as_rank(held: Held, members: Members) -> TrainerLayout:
    """The layout of a trainer rank that has what a worker holds."""
    layout, tensors, names = held
    builder = LayoutBuilder(members.rank)
    for index in range(layout.tensor_count):
        name, dtype, shape, _ = layout.tensor(index)
        group = group_of(name, TOGETHER) or group_of_parts(name, dtype)
        for box in layout.shards(index):
            if box.buffer < len(tensors):
                place = box.start, box.extent, box.buffer, box.offset, box.strides
                builder.add_shard(name, dtype, shape, *place, names[box.buffer], group, box.steps)
    table = describe(tensors, names, gpu=True)
    known = members.rank, members.size, members
    return TrainerLayout(builder.build(), tuple(names), lambda: tensors, table, *known)


def _described(error: Exception) -> tuple[str, str]:
    """The name of an error's class, and its text with what was noted, as engines that stay
    paused."""
    name = type(error).__name__ if isinstance(error, WsyncError) else "RemoteError"
    text = str(error) if isinstance(error, WsyncError) else error_text(error)
    return name, "; ".join([text, *getattr(error, "__notes__", ())])
