"""A picture of one update: what every trainer rank and engine worker did when.

Reads what wsync.machine.trace has written and makes an SVG, or the JSON that chrome://tracing and
Perfetto show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wsync.pages.timeline import LANES, extent, file

SUFFIXES = (".svg", ".json")


def read(folder: Path, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The last update of every process, trainer ranks first; names are those of process ids."""
    records = []
    for path in folder.glob("*.jsonl"):
        record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        pid, rank = record["pid"], record["rank"]
        known = names.get(pid, f"engine process {pid}, worker {rank}")
        record["name"] = f"trainer rank {rank}" if record["role"] == "trainer" else known
        records.append(record)
    last = max((record["update"] for record in records), default=0)
    records = [record for record in records if record["update"] == last]
    return sorted(records, key=lambda r: (r["role"] != "trainer", r["rank"], r["name"]))


def write(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """By the name's ending: .svg or .json."""
    text = file(records, title) if path.suffix == ".svg" else json.dumps(chrome(records))
    path.write_text(text, encoding="utf-8")


def chrome(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chrome's trace event format; times in microseconds."""
    events: list[dict[str, Any]] = []
    start, _ = extent(records)
    for process, record in enumerate(records):
        place = {"pid": process, "ph": "M"}
        events.append({**place, "name": "process_name", "args": {"name": record["name"]}})
        for thread, lane in enumerate(LANES):
            name = {"name": "thread_name", "args": {"name": lane}}
            events.append({**place, "tid": thread, **name})
        for lane, what, number, begin, end in record["spans"]:
            event = {
                "name": what if number < 0 else f"{what} {number}",
                "cat": what,
                "pid": process,
                "tid": LANES.index(lane),
                "ts": (begin - start) / 1e3,
            }
            if end > begin:
                events.append({**event, "ph": "X", "dur": (end - begin) / 1e3})
            else:
                events.append({**event, "ph": "i", "s": "t"})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
