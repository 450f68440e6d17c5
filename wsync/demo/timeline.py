"""A picture of one update: what every trainer rank and engine worker did when.

Reads what wsync.machine.trace has written and makes an SVG, or the JSON that chrome://tracing and
Perfetto show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# what: (colour, what the legend says); only these are drawn
STYLES = {
    "pack": ("#3b7dd8", "pack: shards to staging"),
    "local": ("#62b5e5", "local: shards to ring"),
    "gather": ("#e0a030", "gather: wait for peers' staging"),
    "unpack": ("#2a9d6f", "unpack: staging to ring"),
    "engine": ("#d3c7e6", "wait for the engine"),
    "pause": ("#dddddd", "pause, open"),
    "open": ("#dddddd", ""),
    "prepare": ("#b9b9b9", "prepare, commit"),
    "commit": ("#b9b9b9", ""),
    "load": ("#c8553d", "load: ring to parameters"),
    "post": ("#222222", "post a round"),
}
LANES = ("thread", "stream")
SUFFIXES = (".svg", ".json")

Window = tuple[int, int]

_LEFT, _WIDTH, _TOP = 250, 1150, 30
_HEAD, _ROW, _LANE = 50, 44, 17
_TICKS = 10


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
    text = svg(records, title) if path.suffix == ".svg" else json.dumps(chrome(records))
    path.write_text(text, encoding="utf-8")


def chrome(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chrome's trace event format; times in microseconds."""
    events: list[dict[str, Any]] = []
    start, _ = _extent(records)
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


def svg(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """Two panels, the whole update and its rounds alone.  Every process has two lanes: its
    thread's waits above, its stream's copies below."""
    start, end = _extent(records)
    panel = _HEAD + _ROW * len(records)
    shown = {span[1] for record in records for span in record["spans"]}
    legend = [(what, *style) for what, style in STYLES.items() if what in shown and style[1]]
    bottom = _TOP + 2 * panel
    height = bottom + 30 + 20 * ((len(legend) + 3) // 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="26" font-size="16">{escape(title)}</text>',
        *_panel(records, _TOP, start, (start, end), "the whole update"),
        *_panel(records, _TOP + panel, start, _rounds(records), "its rounds"),
    ]
    for index, (what, colour, text) in enumerate(legend):
        x, y = 16 + index % 4 * 340, bottom + 16 + index // 4 * 20
        width = 2 if what == "post" else 12
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 10}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    records: Sequence[Mapping[str, Any]], top: int, zero: int, window: Window, title: str
) -> list[str]:
    rows = top + _HEAD - 12
    parts = [f'<text x="16" y="{rows - 10}" font-weight="bold">{title}</text>']
    parts += _axis(zero, window, rows, rows + _ROW * len(records))
    for index, record in enumerate(records):
        y = rows + index * _ROW
        parts.append(f'<path d="M16 {y}H{_LEFT + _WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="16" y="{y + 25}">{escape(record["name"])}</text>')
        for lane, text in enumerate(("thread", "copies")):
            place = f'x="{_LEFT - 8}" y="{y + 16 + lane * (_LANE + 2)}" text-anchor="end"'
            parts.append(f'<text {place} font-size="10" fill="#888">{text}</text>')
        # posts last, on top of what they stand in
        for span in sorted(record["spans"], key=lambda span: span[1] == "post"):
            if span[1] in STYLES and span[4] >= window[0] and span[3] <= window[1]:
                parts += _bar(span, y + 3, window)
    return parts


def _bar(span: Sequence[Any], top: int, window: Window) -> list[str]:
    lane, what, number, begin, end = span
    scale = _WIDTH / (window[1] - window[0])
    x = _LEFT + (max(begin, window[0]) - window[0]) * scale
    width = _LEFT + (min(end, window[1]) - window[0]) * scale - x
    y, height = top + LANES.index(lane) * (_LANE + 2), _LANE
    if what == "post":
        width, height = 1.5, _LANE + 2
    label = what if number < 0 else f"{what} of round {number}"
    box = f'x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="{height}"'
    edge = ' stroke="white" stroke-width="0.5"' if width > 3 else ""
    title = f"<title>{label}: {(end - begin) / 1e6:.3f} ms</title>"
    parts = [f'<rect {box} fill="{STYLES[what][0]}"{edge}>{title}</rect>']
    if number >= 0 and width > 14:
        middle = f'x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle"'
        parts.append(f'<text {middle} font-size="10" fill="white">{number}</text>')
    return parts


def _axis(zero: int, window: Window, top: int, bottom: int) -> list[str]:
    """Milliseconds since `zero`, at round numbers."""
    total = (window[1] - window[0]) / 1e6
    step = next(
        size * 10.0**power
        for power in range(-3, 7)
        for size in (1, 2, 5)
        if total / (size * 10.0**power) <= _TICKS
    )
    first = (window[0] - zero) / 1e6
    parts = []
    for tick in range(math.ceil(first / step), int((first + total) / step) + 1):
        x = _LEFT + (tick * step - first) / total * _WIDTH
        parts.append(f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{top - 8}" text-anchor="middle" font-size="11">'
            f"{tick * step:g} ms</text>"
        )
    return parts


def _rounds(records: Sequence[Mapping[str, Any]]) -> Window:
    """From a little before the first round was posted until the last one was loaded."""
    spans = [span for record in records for span in record["spans"]]
    posts = [span[3] for span in spans if span[1] == "post"]
    ends = [span[4] for span in spans if span[0] == "stream" or span[1] == "load"]
    if not posts or not ends:
        return _extent(records)
    margin = max(max(ends) - min(posts), 1000) // 20
    return min(posts) - margin, max(ends) + margin


def _extent(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """First and last moment of all spans."""
    spans = [span for record in records for span in record["spans"]]
    if not spans:
        return 0, 1
    return min(span[3] for span in spans), max(span[4] for span in spans)
