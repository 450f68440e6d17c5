"""`wsync inspect`: shows the versions of running engines' weights, and what their workers keep.

The workers have to run wsync's loader (SGLang: --custom-weight-loader wsync.sglang.load_weights;
vLLM: --worker-extension-cls wsync.vllm.WorkerExtension).  They learn what they keep in a trainer's
first update.  They answer through a Unix socket, so run this on their host, as their user.

Several URLs, or --watch, give one table with a line for each engine.  An engine is lost if it does
not answer, updating if an update of it has not ended, and behind if others report a newer version;
a line below the table says why.  Workers on other hosts are not asked.  SGLang asks its workers
after its running requests have ended, and new requests wait until then.  So --watch asks workers
only for its first table, and --no-workers never: the version comes from the engine's API, and
disturbs no request.

exit status: 0 all engines answer, with the newest version, and no worker says that its weights are
inconsistent or differ from the trainer's; 1 if not; 2 wrong arguments.  --watch ends with Ctrl-C
and status 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Final

from wsync import _core
from wsync.handles.answers import stages_of, without_password
from wsync.handles.base import EngineHandle, handle, how_started
from wsync.handles.worker_facts import obstacle, worker_facts
from wsync.machine.daemon_threads import start
from wsync.machine.deadline import LATER_SECONDS, Deadline, check_seconds, seconds
from wsync.machine.host import is_elsewhere
from wsync.messages.control import UPDATING
from wsync.report import other_values

_HEADS: Final = ("worker", "model", "tensors", "bytes kept", "rounds", "ring bytes")
_FLEET_HEADS: Final = ("engine", "version", "workers", "state", "last verification")
_API_ONLY: Final = "only its API was asked"
_SECONDS: Final = 30.0  # for all answers
_API_SECONDS: Final = 5.0  # if no worker is asked


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """The answers of an engine and its workers.

    weight_version: the version that the engine reports; None if it reports none.
    unasked: why the workers were not asked; "" if they were.
    worker_count: the number of workers; 0 if the engine does not answer.
    lost: why the engine is lost: it does not answer, its update has not ended, or others report a
        newer version.  "" if it is not, and from `look`, which raises an error instead.
    workers: a dictionary for each worker, with these keys:

        worker                   the worker's number
        update, rounds           the number of the last committed update, and of its rounds
        ring_nbytes              bytes of the ring that the update went through
        consistent               whether all weights are from one update
        inconsistency            why some weights are not
        verified                 the last comparison by `Sync.verify`, or None: at (Unix time),
                                 current (whether these weights were compared, and not older ones),
                                 and what Verification.workers has of it
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
    worker_count: int = 0
    lost: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is known to be wrong with the engine and its weights."""
        return not (self.lost or any(fault for said in self.workers for fault in _faults(said)))


def look(engine: object, *, api_key: str | None = None, timeout: float = _SECONDS) -> EngineReport:
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
    found = _described(asked, _version(asked, deadline.left), deadline)
    if found.unasked:
        return found
    return dataclasses.replace(found, workers=worker_facts(asked, deadline.left))


class Engines:
    """Engines that are asked at the same time.

    engines: anything that `wsync.handle` takes.  api_key: their bearer key.
    """

    def __init__(self, engines: Iterable[object], *, api_key: str | None = None) -> None:
        self._members = [_Member(engine, api_key) for engine in engines]

    def look(self, timeout: float, *, workers: bool) -> list[EngineReport]:
        """Asks all engines for the versions of their weights, and names lost engines.

        timeout: seconds for all answers together.  workers: whether workers on this host are asked,
        too.  If not, a report keeps what they have said before, until the version changes.
        """
        deadline, members = Deadline(timeout), self._members
        calls = [start("wsync-look", partial(m.look, deadline, workers)) for m in members]
        wait(calls, timeout + LATER_SECONDS)
        late = f"lost: no answer within {seconds(timeout)}"
        found = [
            call.result() if call.done() else EngineReport(member.name, None, [], lost=late)
            for member, call in zip(members, calls, strict=True)
        ]
        newest = _newest(found)
        for n, each in enumerate(found):
            lost = each.lost
            if (each.weight_version or "").startswith(UPDATING):
                lost = "updating: an update is running, or has failed and left the engine paused"
            elif not lost and each.weight_version != newest:
                lost = f"behind: others report version {newest}"
            found[n] = dataclasses.replace(each, lost=lost)
        return found


class _Member:
    """One of several engines."""

    def __init__(self, engine: object, api_key: str | None) -> None:
        self.name = without_password(str(engine))
        self._handle: EngineHandle | None = None
        self._make = partial(handle, engine, api_key=api_key)
        self._last: EngineReport | None = None

    def look(self, deadline: Deadline, workers: bool) -> EngineReport:
        try:
            self._handle = self._handle or self._make(timeout=deadline.left)
            self.name = self._handle.name
            version = _version(self._handle, deadline.left)
            last = None if workers else self._last
            last = last or _described(self._handle, version, deadline)
        except _core.WsyncError as error:
            self._handle = self._last = None
            return EngineReport(self.name, None, [], lost=f"lost: {self._text(error)}")
        unasked, said = last.unasked, list[dict[str, Any]]()
        if not workers:
            unasked = _API_ONLY
            said = last.workers if version == last.weight_version else []
        elif is_elsewhere(self.name):
            unasked = unasked or "they are on another host"
        elif (version or "").startswith(UPDATING):
            unasked = unasked or "an update is running"
        elif not unasked:
            try:
                said = worker_facts(self._handle, deadline.left)
            except _core.WsyncError as error:
                unasked = self._text(error)
        new: Any = {"weight_version": version, "workers": said, "unasked": "" if said else unasked}
        self._last = dataclasses.replace(last, **new)
        return self._last

    def _text(self, error: _core.WsyncError) -> str:
        return str(error).removeprefix(f"engine {self.name}: ")


def _newest(reports: Sequence[EngineReport]) -> str | None:
    """The highest number among engines' versions.  If there is none, what most engines report."""
    found = [each.weight_version for each in reports if each.weight_version]
    known = [version for version in found if not version.startswith(UPDATING)]
    return max(known, key=lambda v: (int(v) if v.isdecimal() else -1, known.count(v)), default=None)


def _version(engine: EngineHandle, timeout: float) -> str | None:
    version = engine.model_info(timeout).get("weight_version")
    return None if version is None else str(version)


def _described(engine: EngineHandle, version: str | None, deadline: Deadline) -> EngineReport:
    """A report without the workers' answers.  unasked: why they cannot be asked."""
    started = how_started(engine, deadline.left)
    count = engine.workers * stages_of(started)
    return EngineReport(engine.name, version, [], obstacle(engine, started), count)


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
    if "unlearnt" not in said:
        yield "its loader takes whole tensors: there is nothing to learn"
    elif said["unlearnt"]:
        yield f"wsync has not learnt what it keeps: {said['unlearnt']}"
    for name, reason in said.get("fallbacks", {}).items():
        yield f"{name} goes through load_weights: {reason}"
    if said.get("verified"):
        yield f"last verification: {_verified([said])}"
    yield from _faults(said)


def _faults(said: Mapping[str, Any]) -> Iterator[str]:
    """Texts about weights that are wrong."""
    if not said["consistent"]:
        yield said["inconsistency"]
    found = said.get("verified")
    if found and found["current"] and found["different"]:
        yield other_values(found["different"])


def _verified(workers: Sequence[Mapping[str, Any]]) -> str:
    """When workers were last compared with the trainer, and the outcome; "-" if some never were."""
    found = [said["verified"] for said in workers if said.get("verified")]
    if not found or len(found) < len(workers):
        return "-"
    outcome = "equal"
    if any(each["different"] for each in found):
        outcome = "different"
    elif any(each["uncompared"] for each in found):
        outcome = "equal in part" if all(each["tensors"] for each in found) else "not compared"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(each["at"] for each in found)))
    older = "" if all(each["current"] for each in found) else ", older weights"
    return f"{when} {outcome}{older}"


def table(workers: Sequence[Mapping[str, Any]]) -> str:
    """One line for each worker; below them each unusual state once, with the workers' numbers."""
    notes = [(str(said["worker"]), note) for said in workers for note in _notes(said)]
    return _columns([_HEADS, *map(_row, workers)], "worker", notes)


def overview(reports: Sequence[EngineReport]) -> str:
    """One line for each engine; below them the reasons for what is unusual, with the engines."""
    rows: list[Sequence[str]] = [_FLEET_HEADS]
    notes: list[tuple[str, str]] = []
    for each in reports:
        state = each.lost.partition(":")[0] or "answers"
        faults = [f"worker {w['worker']}: {text}" for w in each.workers for text in _faults(w)]
        if each.workers and not each.lost:
            whole = all(said["consistent"] for said in each.workers)
            state = ("different" if faults else "consistent") if whole else "inconsistent"
        count = str(each.worker_count or "-")
        version = each.weight_version or "-"
        version = "-" if version.startswith(UPDATING) else version
        rows.append([each.name, version, count, state, _verified(each.workers)])
        if each.lost:
            notes.append((each.name, each.lost))
        if each.unasked not in ("", _API_ONLY):
            notes.append((each.name, f"its workers were not asked: {each.unasked}"))
        notes += [(each.name, fault) for fault in faults]
    return _columns(rows, "engine", notes)


def _columns(rows: Sequence[Sequence[str]], kind: str, notes: Iterable[tuple[str, str]]) -> str:
    """Aligned rows; below them each note once, with the names of those whom it is about."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    about = defaultdict[str, list[str]](list)
    for name, note in notes:
        about[note].append(name)
    lines += [f"{kind} {', '.join(names)}: {note}" for note, names in about.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints engines' answers.  Returns the exit status; see this module's text."""
    parser = argparse.ArgumentParser(
        "wsync inspect", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "an engine's URL, for example http://127.0.0.1:30000"
    parser.add_argument("url", nargs="+", help=text)
    text = "print everything in JSON: an object, or a list for several engines, one line a table"
    parser.add_argument("--json", action="store_true", help=text)
    text = "print a new table every SECONDS (default 2), until Ctrl-C; write it after the URLs"
    parser.add_argument("--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help=text)
    text = "ask only the engines' APIs, which disturbs no request"
    parser.add_argument("--no-workers", action="store_true", help=text)
    parser.add_argument("--api-key", help="the engines' API key")
    text = "seconds for all answers (default 30; 5 without workers)"
    parser.add_argument("--timeout", type=float, help=text)
    chosen = parser.parse_args(argv)
    try:
        for name in ("watch", "timeout"):
            check_seconds(name, 1.0 if getattr(chosen, name) is None else getattr(chosen, name))
    except _core.InvalidArgumentError as error:
        parser.error(f"--{error}")
    if len(chosen.url) > 1 or chosen.watch is not None or chosen.no_workers:
        return _print_several(chosen)
    try:
        found = look(chosen.url[0], api_key=chosen.api_key, timeout=chosen.timeout or _SECONDS)
    except _core.WsyncError as error:
        print(f"wsync inspect: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return int(not found.good)
    print(f"{found.name}\nweight version: {found.weight_version or 'unknown'}\n")
    print(table(found.workers) if found.workers else f"workers: {found.unasked}")
    return int(not found.good)


def _print_several(chosen: argparse.Namespace) -> int:
    engines, workers = Engines(chosen.url, api_key=chosen.api_key), not chosen.no_workers
    try:
        while True:
            pause = Deadline(chosen.watch or 0.0)
            timeout = chosen.timeout or (_SECONDS if workers else _API_SECONDS)
            found = engines.look(timeout, workers=workers)
            if chosen.json:
                print(json.dumps([dataclasses.asdict(each) for each in found]), flush=True)
            else:
                clear = "\033[H\033[J" * sys.stdout.isatty() + time.strftime("%H:%M:%S\n")
                print(f"{clear if chosen.watch else ''}{overview(found)}", flush=True)
            if chosen.watch is None:
                return int(not all(each.good for each in found))
            workers = False
            time.sleep(pause.left)
    except KeyboardInterrupt:
        if chosen.watch is None:
            raise
        return 0
