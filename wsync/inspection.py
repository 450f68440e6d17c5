"""`wsync inspect`: what a running engine says of its weights, and what its workers have learnt to
keep of a model.

The workers have to run wsync's loader (SGLang: --custom-weight-loader wsync.sglang.load_weights;
vLLM: --worker-extension-cls wsync.vllm.WorkerExtension), and learn when a trainer updates them.
They answer over a socket of their own, so this runs on their host, as their user.  SGLang answers
when the requests under way are done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle, handle, how_started, send_control
from wsync.handles.sglang_base import ApiHandle
from wsync.handles.vllm import VllmHandle, VllmServer
from wsync.machine.deadline import Deadline, check_seconds
from wsync.messages.control import LOAD_FORMAT, Control
from wsync.trainer.requests import Calls

_UNKNOWN: Final = "unknown"
_HEADS: Final = (
    *("worker", "model", "tensors", "boxes", "fills", "copies", "fallbacks", "bytes kept"),
    *("rounds", "ring bytes"),
)


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What one worker says.

    update: number of the last committed one.  consistent, inconsistency: whether its weights are
    those of one update, else why not.  loader, module: what loads, into which model.  unlearnt:
    why nothing has been learnt, "" where something has.  fills, copies: constants, and copies
    inside the model, after each update.  fallbacks: tensors that go through the engine's own
    load_weights, and why.  skipped: tensors that it makes no use of.  unwritten: (parameter,
    bytes that no tensor fills).  twins: (tensor, tensor) that are loaded to one place and have to
    be the same.
    rounds, ring_nbytes: of the last update, and of the ring that it took them through.
    tensors: name, dtype, shape, kept_as (a dtype) and boxes: into (a parameter), start and extent
    in the tensor.
    """

    worker: int
    update: int | None
    consistent: bool
    inconsistency: str
    loader: str
    module: str = ""
    unlearnt: str = "its loader knows by itself what it takes"
    model_tensors: int = 0
    model_nbytes: int = 0
    kept_nbytes: int = 0
    fills: int = 0
    copies: int = 0
    rounds: int = 0
    ring_nbytes: int = 0
    fallbacks: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    unwritten: list[list[Any]] = field(default_factory=list)
    twins: list[list[str]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def boxes(self) -> int:
        return sum(len(tensor["boxes"]) for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What an engine says.

    server: what it is, and of which version.  weight_version: what it calls its weights, whoever
    has updated them; None where it does not say that.  workers: what they say, if they run wsync's
    loader; unasked: why they were not asked, else "".
    """

    name: str
    server: str
    weight_version: str | None
    workers: list[WorkerReport] = field(default_factory=list)
    unasked: str = ""


def look(engine: object, *, api_key: str | None = None, timeout: float = 30.0) -> EngineReport:
    """Asks an engine, given as to `wsync.handle`, what it is and what it calls its weights, and its
    workers what they keep, where they run wsync's loader.

    Raises:
        DeadlineError: it does not answer, or a worker does not: it may be on another host.
        RemoteError: it refuses; an update may be running.
    """
    check_seconds("timeout", timeout)
    deadline = Deadline(timeout)
    try:
        asked = handle(engine, api_key=api_key, timeout=timeout)
    except _core.RemoteError as error:
        if not (isinstance(engine, str) and engine.startswith("vllm+")):
            raise
        server = VllmServer(engine.removeprefix("vllm+"), api_key=api_key)  # without the extension
        version, weights = server.version(deadline.left), server.get_weight_version(deadline.left)
        return EngineReport(
            name=engine,
            server=_called("vLLM", version),
            weight_version=weights,
            unasked=str(error),
        )
    server_name, weight_version = _says(asked, deadline)
    without = _without(asked, deadline.left)
    return EngineReport(
        name=asked.name,
        server=server_name,
        weight_version=weight_version,
        workers=[] if without else _asked(asked, deadline),
        unasked=without,
    )


def _without(engine: EngineHandle, timeout: float) -> str:
    """Why the workers of an engine cannot be asked, or ""."""
    if LOAD_FORMAT in engine.load_formats:
        started = how_started(engine, timeout)
        if started.get("speculative_algorithm") not in (None, "", "NGRAM"):
            return (
                "drafts tokens: each question would have SGLang process the draft's weights again"
            )
        if (stages := started.get("pp_size") or 1) != 1:
            return f"has {stages} pipeline stages, and SGLang answers for the first one only"
        return ""
    return f"does not run wsync's loader, it takes {engine.load_formats}"


def _says(engine: EngineHandle, deadline: Deadline) -> tuple[str, str | None]:
    """What an engine calls itself, and its weights."""
    found = engine.model_info(deadline.left)
    kind, version, weights = "engine", None, found.get("weight_version")
    if isinstance(engine, VllmHandle):
        said = engine.says(deadline.left)
        kind, version = "vLLM", said["version"]
        weights = said["weight_version"] or weights
    elif isinstance(engine, ApiHandle):
        with contextlib.suppress(_core.RemoteError):  # not all have it
            version = engine.server_info(deadline.left).get("version")
        kind = "SGLang" if version and not str(version).startswith("wsync") else ""
    return _called(kind, version), None if weights is None else str(weights)


def _called(kind: str, version: object) -> str:
    return f"{kind} {version or ''}".strip() or _UNKNOWN


def _asked(engine: EngineHandle, deadline: Deadline) -> list[WorkerReport]:
    with contextlib.ExitStack() as sessions:
        if isinstance(engine, ApiHandle):
            sessions.enter_context(engine.asking(deadline.left))
        return _ask(engine, deadline)


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
            except (ValueError, TypeError, RecursionError) as error:
                raise _core.ProtocolError(
                    f"a worker's answer: {error}; use the same wsync on both sides"
                ) from None
        asking.join(deadline.left)
    return sorted(found, key=lambda worker: worker.worker)


def _row(each: WorkerReport) -> list[str]:
    row = [str(each.worker), each.module or each.loader]
    if each.unlearnt:
        row += ["-"] * 6
    else:
        share = each.kept_nbytes / each.model_nbytes if each.model_nbytes else 0.0
        counts = (len(each.tensors), each.boxes, each.fills, each.copies, len(each.fallbacks))
        row += [f"{count:,}" for count in counts]
        row.append(f"{each.kept_nbytes:,} ({share:.0%} of {each.model_nbytes:,})")
    return [*row, f"{each.rounds:,}", f"{each.ring_nbytes:,}"]


def _notes(workers: Sequence[WorkerReport]) -> list[str]:
    """What is out of the ordinary, each once."""
    notes = defaultdict[str, list[int]](list)
    for each in workers:
        if each.unlearnt:
            notes[f"nothing learnt: {each.unlearnt}"].append(each.worker)
        for name, reason in each.fallbacks.items():
            notes[f"{name} goes through load_weights: {reason}"].append(each.worker)
        if not each.consistent:
            notes[each.inconsistency].append(each.worker)
    return [f"worker {', '.join(map(str, who))}: {text}" for text, who in notes.items()]


def table(workers: Sequence[WorkerReport]) -> str:
    """One line a worker, and below it what is out of the ordinary."""
    rows = [[*_HEADS], *map(_row, workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, *_notes(workers)])


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
    """Prints what an engine says; 0, 1 where it cannot be asked, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        "wsync inspect", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the engine, for example http://127.0.0.1:30000")
    text = "list where the tensors go, those whose names match"
    parser.add_argument("--tensors", metavar="REGEX", nargs="?", const="", help=text)
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE (-: print it)")
    parser.add_argument("--api-key", help="the engine's bearer key")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds (default 30)")
    chosen = parser.parse_args(argv)
    try:
        re.compile(chosen.tensors or "")
    except re.error as error:
        parser.error(f"--tensors {chosen.tensors}: {error}")
    try:
        check_seconds("--timeout", chosen.timeout)
    except _core.InvalidArgumentError as error:
        parser.error(str(error))
    try:
        found = look(chosen.url, api_key=chosen.api_key, timeout=chosen.timeout)
        if chosen.json:
            text = json.dumps(dataclasses.asdict(found), indent=1)
            if chosen.json == "-":
                print(text)
                return 0
            Path(chosen.json).write_text(text + "\n", encoding="utf-8")
    except (_core.WsyncError, OSError) as error:
        print(f"wsync inspect: {error}", file=sys.stderr)
        return 1
    version = _UNKNOWN if found.weight_version is None else found.weight_version
    print(found.name, f"server: {found.server}", f"weight version: {version}", sep="\n")
    print("\n" + (table(found.workers) if found.workers else f"workers: {found.unasked}"))
    if found.workers and chosen.tensors is not None:
        print("\n" + listing(found.workers, chosen.tensors))
    return 0
