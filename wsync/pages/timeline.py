"""The timeline of an update: what every trainer rank and engine worker did when.

Records are what wsync.machine.trace writes, with a "name" each.  Lengths are in percent of
whatever width there is, text is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from wsync.pages.html import Html, joined, seconds_text, tag
from wsync.pages.style import COPIES, KINDS, PHASES, POST, WORKER

Record = Mapping[str, Any]
Window = tuple[int, int]
Span = Sequence[Any]

_LANES: Final = ("thread", "stream")
_AXIS, _NAME, _LANE, _GAP = 24, 17, 12, 9  # pixels
_PIXELS: Final = 4000  # of a lane, in which one span of a kind each is drawn
_TICKS: Final = 5  # at most, and one more: so many find room on a phone
_LEAST: Final = 0.12  # percent: what is shorter is drawn this long
_GROUPS: Final = {
    "lower bars, copies:": COPIES,
    "trainer ranks wait until:": {**PHASES, "post": POST},
    "engine workers:": WORKER,
}


def timeline(records: Sequence[Record]) -> Html:
    """A drawing of all processes, from the first moment of the update to the last."""
    spans = [span for record in records for span in record["spans"]]
    begin = min((span[3] for span in spans), default=0)
    window = begin, max((span[4] for span in spans), default=begin) + 1
    rows, y = [], float(_AXIS)
    for record in records:
        lanes = [
            [span for span in record["spans"] if span[0] == lane and span[1] in KINDS]
            for lane in _LANES
        ]
        said = {"y": f"{y + 13:g}", "font_size": 12}
        rows.append(tag("text", record["name"], x=0, **said))
        rows.append(tag("text", _sum(record), x="100%", text_anchor="end", **said, class_="dim"))
        y += _NAME
        for lane in filter(None, lanes):
            rows.append(_lane(lane, y, window))
            y += _LANE
        y += _GAP
    drawn = joined([_axis((window[1] - begin) / 1e9, y), *rows])
    drawing = tag("svg", drawn, width="100%", height=f"{y:g}", role="img")
    return joined([drawing, *_legend({span[1] for span in spans})])


def swatch(kind: str) -> Html:
    box = tag("rect", width=12, height=12, rx=2, fill=KINDS[kind].colour)
    return tag("svg", box, width=18, height=12)


def _lane(spans: Sequence[Span], y: float, window: Window) -> Html:
    """Rounds that are handed over come last, on top of what they stand in."""
    whole = window[1] - window[0]
    pixel = whole / _PIXELS
    seen = {(span[1], span[3] // pixel, span[4] // pixel): span for span in spans}
    blocks = []
    for _, what, number, begin, end in sorted(seen.values(), key=lambda s: s[1] == "post"):
        label = what if number < 0 else f"{what} of round {number}"
        title = tag("title", f"{label}: {(end - begin) / 1e6:.3f} ms")
        place = {
            "x": f"{100 * (begin - window[0]) / whole:.3f}%",
            "width": f"{max(100 * (end - begin) / whole, _LEAST):.3f}%",
        }
        colour = KINDS[what].colour
        blocks.append(tag("rect", title, **place, y=f"{y:g}", height=_LANE - 1, fill=colour))
    return joined(blocks)


def _axis(seconds: float, bottom: float) -> Html:
    """Lines down to `bottom`, with the time above that each stands for."""
    scale, unit = (1.0, "s") if seconds >= 2 else (1e3, "ms")
    step = next(
        size * 10.0**power
        for power in range(-9, 10)
        for size in (1, 2, 5)
        if seconds * scale <= _TICKS * size * 10.0**power
    )
    parts = []
    for number in range(math.floor(seconds * scale / step) + 1):
        share = number * step / scale / seconds
        anchor = "start" if share < 0.08 else "end" if share > 0.92 else "middle"
        x = f"{100 * share:.3f}%"
        parts.append(tag("line", x1=x, x2=x, y1=_AXIS - 6, y2=f"{bottom:g}", class_="grid"))
        place = {"x": x, "y": 11, "text_anchor": anchor, "font_size": 11, "class_": "dim"}
        parts.append(tag("text", f"{number * step:g} {unit}", **place))
    return joined(parts)


def _sum(record: Record) -> str:
    """How much a process copied, in words."""
    copies = [span for span in record["spans"] if span[1] in COPIES]
    seconds = sum(span[4] - span[3] for span in copies) / 1e9
    return f"copies: {len(copies)}, {seconds_text(seconds)}" if copies else ""


def _legend(seen: set[str]) -> list[Html]:
    """A line for each group of what there is."""
    lines = []
    for title, kinds in _GROUPS.items():
        keys = [
            tag("span", swatch(kind), f"{kind}: {known.words}")
            for kind, known in kinds.items()
            if kind in seen
        ]
        if keys:
            lines.append(tag("div", tag("span", title, class_="dim"), *keys, class_="legend"))
    return lines
