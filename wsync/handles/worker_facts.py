"""What an engine's workers say of themselves, if they run wsync's loader."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from wsync import _core
from wsync.handles.answers import stages_of
from wsync.handles.base import EngineHandle, how_started, send_control
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, Control


def worker_facts(
    engine: EngineHandle, timeout: float, *, weight_version: str | None = None
) -> list[dict[str, Any]]:
    """Asks every worker; returns the answers by worker (see wsync.inspection.EngineReport).

    weight_version: for SGLang, which records the version of every request.

    Raises:
        DeadlineError: a worker does not answer; it may be on another host.
        RemoteError: the engine refuses the request; an update may be running.
    """
    deadline = Deadline(timeout)
    with contextlib.ExitStack() as stack:
        if isinstance(engine, ApiHandle):
            stack.enter_context(engine.asking(deadline.left))
        workers = engine.workers * stages_of(how_started(engine, deadline.left))
        exporters = [_core.Exporter(None) for _ in range(workers)]
        for exporter in exporters:
            stack.callback(exporter.close)
        left = deadline.left
        messages = [
            Control(op="inspect", session="0", update=0, deadline=left, address=exporter.address)
            for exporter in exporters
        ]
        ask = partial(send_control, weight_version=weight_version, timeout=left)
        asking = start("wsync-ask", partial(ask, engine, messages))

        def refused() -> None:
            if asking.done():
                asking.result()

        late = f"engine {engine.name}: a worker has not answered; are all workers on this host?"
        try:
            said = [json.loads(each.accept(deadline.left, refused)) for each in exporters]
        except _core.DeadlineError:
            raise _core.DeadlineError(late) from None
        result(asking, deadline, bool, late)
    return sorted(said, key=lambda worker: int(worker["worker"]))


def obstacle(engine: EngineHandle, started: Mapping[str, Any]) -> str:
    """Says why the workers of an engine with these arguments cannot be asked; "" if they can."""
    if LOAD_FORMAT not in engine.load_formats:
        return f"it does not run wsync's loader; its load formats are {engine.load_formats}"
    if started.get("speculative_algorithm") not in (None, "", "NGRAM"):
        return "it drafts tokens: each question would make SGLang process the draft's weights again"
    return ""
