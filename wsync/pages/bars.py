"""Bars with axes and legends.  Lengths are in percent of whatever width there is, text is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from wsync.pages.html import Html, joined, seconds_text, share_text, table, tag
from wsync.pages.style import KINDS, PHASES, kind_class

REST: Final = "other"
_TICKS: Final = 5  # at most, and one more: so many find room on a phone
AXIS: Final = 24  # pixels, as what follows
_BAR: Final = 16
_LEAST: Final = 0.12  # percent: what is shorter is drawn this long


def ordered(phases: Iterable[str]) -> list[str]:
    """The phases of an update in their order, then those that are not known, then the rest."""
    places = {name: place for place, name in enumerate(PHASES)}
    return sorted(phases, key=lambda name: (name == REST, places.get(name, len(places))))


def spent(seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
    """An update's phases in their order, and the rest of its time."""
    found = {name: phases[name] for name in ordered(phases)}
    rest = seconds - sum(phases.values())
    return found | ({REST: rest} if rest > 0 else {})


def svg(height: float, *content: str, title: str = "") -> Html:
    """A drawing as wide as there is room."""
    said = (tag("title", title),) if title else ()
    whole = {"width": "100%", "height": f"{height:g}", "role": "img", "class_": "drawing"}
    return tag("svg", *said, *content, **whole)


def swatch(kind: str) -> Html:
    box = tag("rect", width=12, height=12, rx=2, class_=kind_class(kind))
    return tag("svg", box, width=12, height=12, class_="swatch", style="display:inline-block")


def block(kind: str, begin: float, end: float, y: float, height: float, title: str) -> Html:
    """A stretch of a bar, from and to a share of the width (0 to 1)."""
    width = max(100 * (end - begin), _LEAST)
    place = {"x": f"{100 * begin:.3f}%", "y": f"{y:g}", "width": f"{width:.3f}%"}
    return tag("rect", tag("title", title), **place, height=f"{height:g}", class_=kind_class(kind))


def stacked(parts: Mapping[str, float], y: float, whole: float) -> Html:
    """One stretch after another; `whole` is the width, in the parts' unit."""
    blocks, begin = [], 0.0
    for kind, size in parts.items():
        end = begin + size / whole
        blocks.append(block(kind, begin, end, y, _BAR, f"{kind}: {seconds_text(size)}"))
        begin = end
    return joined(blocks)


def ticks(first: float, last: float) -> list[float]:
    """Round numbers between two."""
    step = next(
        size * 10.0**power
        for power in range(-9, 10)
        for size in (1, 2, 5)
        if last - first <= _TICKS * size * 10.0**power
    )
    return [n * step for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


def axis(first: float, last: float, bottom: float) -> Html:
    """Lines down to `bottom`, with the time above that each stands for; in seconds."""
    scale, unit = (1.0, "s") if last >= 2 else (1e3, "ms")
    parts = []
    for value in ticks(first * scale, last * scale):
        share = (value / scale - first) / (last - first)
        anchor = "start" if share < 0.08 else "end" if share > 0.92 else "middle"
        x = f"{100 * share:.3f}%"
        parts.append(tag("line", x1=x, x2=x, y1=AXIS - 6, y2=f"{bottom:g}", class_="grid"))
        place = {"x": x, "y": 11, "text_anchor": anchor, "font_size": 11, "class_": "dim"}
        parts.append(tag("text", f"{value:g} {unit}", **place))
    return joined(parts)


def phases_bar(seconds: float, phases: Mapping[str, float]) -> Html:
    """Where the time of one update went: a bar and a table."""
    parts = spent(seconds, phases)
    whole = max(seconds, sum(parts.values())) or 1.0
    rows = [
        (
            joined([swatch(name), name]),
            KINDS[name].words if name in KINDS else "",
            seconds_text(size),
            share_text(size, whole),
        )
        for name, size in parts.items()
    ]
    bar = svg(_BAR, stacked(parts, 0, whole), title="phases of the update")
    return joined([bar, table(["phase", "waits until", "time", "share"], rows, left=2)])


def length(part: float, whole: float) -> Html:
    """A number's share of the largest, for a cell of a table."""
    share = min(max(part / whole, 0.0), 1.0) if whole else 0.0
    ground = tag("rect", width="100%", height=10, rx=2, class_="shade")
    bar = tag("rect", width=f"{100 * share:.2f}%", height=10, rx=2, class_="plain")
    drawn = tag("svg", ground, bar, width="100%", height=10, style="margin-top:5px")
    return tag("div", drawn, style="min-width:56px")
