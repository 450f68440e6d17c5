"""`wsync inspect`: what the workers of a running engine have learnt to keep of a model.

The engine runs wsync's loader (SGLang: --custom-weight-loader wsync.sglang.load_weights; vLLM:
--worker-extension-cls wsync.vllm.WorkerExtension) and has been updated by a trainer.  Its workers
answer over a socket of their own, so this runs on their host, as their user.  SGLang answers when
the requests under way are done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsync import _core
from wsync.handles.base import EngineHandle, handle, send_control
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, Control
from wsync.trainer.requests import Calls


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What one worker says.

    update: number of the last committed one.  consistent, inconsistency: whether its weights are
    those of one update, else why not.  loader, module: what loads, into which model.  unlearnt:
    why nothing has been learnt, "" where something has.  fills, copies: constants, and copies
    inside the model, after each update.  fallbacks: tensors that go through the engine's own
    load_weights, and why.  skipped: tensors that it makes no use of.  unwritten: (parameter,
    bytes that no tensor fills).  twins: (tensor, tensor) that are loaded to one place and have to
    be the same.  tensors: name, dtype, shape, kept_as (a dtype) and boxes: into
    (a parameter), start and extent in the tensor.
    """

    worker: int
    update: int | None
    consistent: bool
    inconsistency: str
    loader: str
    module: str = ""
    unlearnt: str = "its loader learns nothing"
    model_tensors: int = 0
    model_nbytes: int = 0
    kept_nbytes: int = 0
    fills: int = 0
    copies: int = 0
    fallbacks: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unwritten: list[list[Any]] = field(default_factory=list)
    twins: list[list[str]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def boxes(self) -> int:
        return sum(len(tensor["boxes"]) for tensor in self.tensors)


def inspect(
    engine: object,
    *,
    workers: int | None = None,
    api_key: str | None = None,
    timeout: float = 30.0,
) -> list[WorkerReport]:
    """Asks every worker of an engine, given as to `wsync.handle`, what it keeps.

    Raises:
        UnsupportedError: the engine does not run wsync's loader.
        RemoteError: it refuses; an update may be running.
        DeadlineError: a worker does not answer: it may be on another host.
    """
    asked = handle(engine, workers=workers, api_key=api_key, timeout=timeout)
    if LOAD_FORMAT not in asked.load_formats:
        raise _core.UnsupportedError(
            f"engine {asked.name}: does not run wsync's loader, it takes {asked.load_formats}"
        )
    deadline = Deadline(timeout)
    with contextlib.ExitStack() as sessions:
        if isinstance(asked, ApiHandle):
            sessions.enter_context(asked.asking(deadline.left))
        return _ask(asked, deadline)


def _ask(engine: EngineHandle, deadline: Deadline) -> list[WorkerReport]:
    with contextlib.ExitStack() as doors:
        exporters = [_core.Exporter(None) for _ in range(engine.workers)]
        for exporter in exporters:
            doors.callback(exporter.close)
        left = deadline.left
        messages = [
            Control(op="inspect", session="0", update=0, deadline=left, address=door.address)
            for door in exporters
        ]

        def ask(_: int, engine: EngineHandle) -> None:
            send_control(engine, messages, weight_version=None, timeout=left)

        asking = Calls([(0, engine)], ask)
        found = []
        for number, exporter in enumerate(exporters):
            try:
                answer = exporter.accept(deadline.left, asking.check)
                found.append(WorkerReport(**json.loads(answer)))
            except _core.DeadlineError:
                raise _core.DeadlineError(
                    f"engine {engine.name}: worker {number} does not answer; is it on this host?"
                ) from None
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
                raise _core.ProtocolError(
                    f"a worker's answer: {error}; use the same wsync on both sides"
                ) from None
        asking.join(deadline.left)
    return sorted(found, key=lambda worker: worker.worker)


def table(workers: Sequence[WorkerReport]) -> str:
    """One line a worker, and below it what is out of the ordinary, each once."""
    head = ["worker", "model", "tensors", "boxes", "fills", "copies", "fallbacks", "bytes kept"]
    rows = [head]
    notes: dict[str, list[int]] = {}
    for each in workers:
        row = [str(each.worker), each.module or each.loader]
        if each.unlearnt:
            rows.append([*row, *"-----", "-"])
            notes.setdefault(f"not learnt: {each.unlearnt}", []).append(each.worker)
        else:
            share = each.kept_nbytes / each.model_nbytes if each.model_nbytes else 0.0
            counts = (len(each.tensors), each.boxes, each.fills, each.copies, len(each.fallbacks))
            kept = f"{each.kept_nbytes:,} ({share:.0%} of {each.model_nbytes:,})"
            rows.append([*row, *(f"{count:,}" for count in counts), kept])
        for name, reason in each.fallbacks.items():
            notes.setdefault(f"{name} goes through load_weights: {reason}", []).append(each.worker)
        if not each.consistent:
            notes.setdefault(each.inconsistency, []).append(each.worker)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) for row in rows]
    lines += [f"worker {', '.join(map(str, who))}: {text}" for text, who in notes.items()]
    return "\n".join(line.rstrip() for line in lines)


def listing(workers: Sequence[WorkerReport], pattern: str = "") -> str:
    """One line a box of the tensors whose names match: worker, tensor, box, parameter."""
    lines = []
    for each in workers:
        for tensor in each.tensors:
            if not re.search(pattern, tensor["name"]):
                continue
            cast = "" if tensor["kept_as"] == tensor["dtype"] else f" as {tensor['kept_as']}"
            for box in tensor["boxes"]:
                spans = zip(box["start"], box["extent"], strict=True)
                ranges = ", ".join(f"{start}:{start + extent}" for start, extent in spans)
                name, into = tensor["name"], box["into"]
                lines.append(f"{each.worker}  {name}[{ranges}] {tensor['dtype']}{cast} -> {into}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what an engine has learnt; 0, 1 where it cannot be asked, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        "wsync inspect", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the engine, for example http://127.0.0.1:30000")
    text = "list where the tensors go, those whose names match"
    parser.add_argument("--tensors", metavar="REGEX", nargs="?", const="", help=text)
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE (-: print it)")
    parser.add_argument("--workers", type=int, help="tensor-parallel size, if it cannot be asked")
    parser.add_argument("--api-key", help="the engine's bearer key")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds (default 30)")
    chosen = parser.parse_args(argv)
    try:
        re.compile(chosen.tensors or "")
    except re.error as error:
        parser.error(f"--tensors {chosen.tensors}: {error}")
    if chosen.timeout <= 0:
        parser.error(f"--timeout {chosen.timeout:g}: not positive")
    try:
        found = inspect(
            chosen.url, workers=chosen.workers, api_key=chosen.api_key, timeout=chosen.timeout
        )
        if chosen.json:
            text = json.dumps([vars(each) for each in found], indent=1)
            if chosen.json == "-":
                print(text)
                return 0
            Path(chosen.json).write_text(text + "\n", encoding="utf-8")
    except (_core.WsyncError, OSError) as error:
        print(f"wsync inspect: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if chosen.tensors is not None:
        print("\n" + listing(found, chosen.tensors))
    return 0
