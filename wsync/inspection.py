"""`wsync inspect`: shows the version of a running engine's weights, and what each worker keeps.

The workers have to run wsync's loader (SGLang: --custom-weight-loader wsync.sglang.load_weights;
vLLM: --worker-extension-cls wsync.vllm.WorkerExtension).  They learn what they keep in a trainer's
first update.  They answer through a Unix socket, so run this on their host, as their user.  SGLang
answers after its running requests have ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle, handle, how_started
from wsync.handles.worker_facts import worker_facts
from wsync.machine.deadline import Deadline, check_seconds
from wsync.messages.control import LOAD_FORMAT

_HEADS: Final = ("worker", "model", "tensors", "bytes kept", "rounds", "ring bytes")


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """The answers of an engine and its workers.

    weight_version: the version that the engine reports; None if it reports none.
    unasked: why the workers were not asked; "" if they were.
    workers: a dictionary for each worker, with these keys:

        worker                   the worker's number
        update, rounds           the number of the last committed update, and of its rounds
        ring_nbytes              bytes of the ring that the update went through
        consistent               whether all weights are from one update
        inconsistency            why some weights are not
        loader                   the class of the loader
        module                   the class of the model, if wsync learns what the worker keeps
        unlearnt                 why wsync has not learnt what the worker keeps; "" if it has

    A worker that has learnt what it keeps adds: model_tensors, model_nbytes, kept_nbytes, fallbacks
    (tensors that go through the engine's own load_weights, and why) and tensors.  Each tensor has
    name, dtype, shape, kept_as (a dtype) and boxes.  Each box has into (a parameter), and start and
    extent (in the tensor).
    """

    name: str
    weight_version: str | None
    workers: list[dict[str, Any]]
    unasked: str = ""


def look(engine: object, *, api_key: str | None = None, timeout: float = 30.0) -> EngineReport:
    """Asks an engine for the version of its weights.  If its workers run wsync's loader, asks them
    what they keep.

    Args:
        engine: anything that `wsync.handle` takes.
        api_key: the engine's bearer key.
        timeout: seconds for all answers together.

    Raises:
        DeadlineError: the engine or a worker does not answer; a worker may be on another host.
        RemoteError: the engine refuses the request; an update may be running.
    """
    check_seconds("timeout", timeout)
    deadline = Deadline(timeout)
    asked = handle(engine, api_key=api_key, timeout=timeout)
    version = asked.model_info(deadline.left).get("weight_version")
    unasked = _obstacle(asked, deadline.left)
    workers = [] if unasked else worker_facts(asked, deadline.left)
    return EngineReport(asked.name, None if version is None else str(version), workers, unasked)


def _obstacle(engine: EngineHandle, timeout: float) -> str:
    """Says why an engine's workers cannot be asked.  Returns "" if they can."""
    if LOAD_FORMAT not in engine.load_formats:
        return f"does not run wsync's loader; its load formats are {engine.load_formats}"
    started = how_started(engine, timeout)
    if started.get("speculative_algorithm") not in (None, "", "NGRAM"):
        return "drafts tokens: each question would make SGLang process the draft's weights again"
    return ""


def _row(said: Mapping[str, Any]) -> list[str]:
    tensors, kept = "-", "-"
    if not said.get("unlearnt", True):
        whole, part = said["model_nbytes"], said["kept_nbytes"]
        tensors = f"{len(said['tensors']):,}"
        kept = f"{part:,} ({part / max(whole, 1):.0%} of {whole:,})"
    model = said.get("module", said["loader"])
    rounds = (f"{said[name]:,}" for name in ("rounds", "ring_nbytes"))
    return [str(said["worker"]), model, tensors, kept, *rounds]


def _notes(said: Mapping[str, Any]) -> Iterator[str]:
    """Texts about a worker's unusual state."""
    if unlearnt := said.get("unlearnt", "its loader does not need this"):
        yield f"wsync has not learnt what it keeps: {unlearnt}"
    for name, reason in said.get("fallbacks", {}).items():
        yield f"{name} goes through load_weights: {reason}"
    if not said["consistent"]:
        yield said["inconsistency"]


def table(workers: Sequence[Mapping[str, Any]]) -> str:
    """One line for each worker; below them each unusual state once, with the workers' numbers."""
    rows = [[*_HEADS], *map(_row, workers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    notes = defaultdict[str, list[str]](list)
    for said in workers:
        for note in _notes(said):
            notes[note].append(str(said["worker"]))
    lines += [f"worker {', '.join(numbers)}: {note}" for note, numbers in notes.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints an engine's answers.  Returns 0, 1 if it cannot be asked, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        "wsync inspect", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the engine's URL, for example http://127.0.0.1:30000")
    parser.add_argument("--json", action="store_true", help="print everything as a JSON object")
    parser.add_argument("--api-key", help="the engine's API key")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds in all (default 30)")
    chosen = parser.parse_args(argv)
    try:
        found = look(chosen.url, api_key=chosen.api_key, timeout=chosen.timeout)
    except _core.WsyncError as error:
        print(f"wsync inspect: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    print(f"{found.name}\nweight version: {found.weight_version or 'unknown'}\n")
    print(table(found.workers) if found.workers else f"workers: {found.unasked}")
    return 0
