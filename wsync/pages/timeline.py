"""The timeline of an update: what every trainer rank and engine worker did when.

Records are what wsync.machine.trace writes, with a "name" each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from wsync.pages.bars import AXIS, axis, block, svg, swatch
from wsync.pages.html import Html, joined, seconds_text, tag
from wsync.pages.style import COPIES, KINDS, PHASES, POST, WORKER

Record = Mapping[str, Any]
Window = tuple[int, int]
Span = Sequence[Any]

LANES: Final = ("thread", "stream")
_NAME, _LANE, _GAP = 17, 12, 9  # pixels
_FULL: Final = 2000  # spans of a lane, which are about as many as it has pixels
_GROUPS: Final = {
    "lower bars, copies:": COPIES,
    "trainer ranks wait until:": {**PHASES, "post": POST},
    "engine workers:": WORKER,
}
_OF_ROUNDS: Final = ("load", "post", "staging", "engine", "gather", "copy")
_MOST: Final = 0.7  # of an update: rounds that take more need no drawing of their own


def timeline(records: Sequence[Record]) -> Html:
    """Two drawings: the whole update of the first process and its engines, and the rounds of all
    processes, which are most often a small part of it."""
    whole, rounds = extent(records), rounds_of(records)
    parts = []
    if rounds is None:
        parts.append(_drawing(records, whole, whole[0], "timeline of the update"))
    else:
        overview = _overview(records)
        parts.append(tag("p", "The whole update:", class_="dim"))
        parts.append(_drawing(overview, whole, whole[0], "the whole update", shaded=rounds))
        parts.append(tag("p", "The shaded part, its rounds:", class_="dim"))
        parts.append(_drawing(records, rounds, whole[0], "the rounds of the update"))
    return joined([*parts, *(tag("div", line, class_="legend") for line in _legend(records))])


def extent(records: Sequence[Record]) -> Window:
    """First and last moment of all spans."""
    spans = [span for record in records for span in record["spans"]]
    begin = min((span[3] for span in spans), default=0)
    return begin, max((span[4] for span in spans), default=begin) + 1


def rounds_of(records: Sequence[Record]) -> Window | None:
    """From a little before workers begin to load rounds, or ranks to copy them where no worker is
    among the records, until all have the last one; None where there are no rounds, or where they
    are most of the update."""
    spans = [span for record in records for span in record["spans"]]
    begins = [span[3] for span in spans if span[1] == "load"]
    begins = begins or [span[3] for span in spans if span[0] == "stream" or span[1] == "post"]
    if not begins:
        return None
    ends = [span[4] for span in spans if span[0] == "stream" or span[1] in _OF_ROUNDS]
    margin = max(max(ends) - min(begins), 1000) // 20
    first, last = min(begins) - 2 * margin, max(ends) + margin
    begin, end = extent(records)
    first, last = max(first, begin), min(last, end)
    return (first, last) if last - first < _MOST * (end - begin) else None


def _overview(records: Sequence[Record]) -> list[Record]:
    """The first trainer rank and the first engine worker: waits alone."""
    firsts: dict[str, Record] = {}
    for record in records:
        firsts.setdefault(record["role"], record)
    return [
        {**record, "spans": [span for span in record["spans"] if span[1] != "post"]}
        for record in firsts.values()
    ]


def _drawing(
    records: Sequence[Record], window: Window, zero: int, title: str, shaded: Window | None = None
) -> Html:
    return svg(_height(records), _panel(records, window, zero, shaded), title=title)


def _lanes(record: Record) -> list[str]:
    """Those in which something is drawn."""
    return [lane for lane in LANES if any(s[0] == lane and s[1] in KINDS for s in record["spans"])]


def _height(records: Sequence[Record]) -> float:
    return AXIS + sum(_NAME + _GAP + _LANE * max(len(_lanes(r)), 1) for r in records)


def _panel(records: Sequence[Record], window: Window, zero: int, shaded: Window | None) -> Html:
    bottom = _height(records)
    first, last = ((moment - zero) / 1e9 for moment in window)
    parts = []
    if shaded is not None:
        begin, end = (min(max(_share(moment, window), 0.0), 1.0) for moment in shaded)
        place = {"x": f"{100 * begin:.3f}%", "width": f"{100 * (end - begin):.3f}%"}
        parts.append(tag("rect", **place, y=AXIS - 6, height=f"{bottom:g}", class_="shade"))
    parts.append(axis(first, last, bottom))
    y = float(AXIS)
    for record in records:
        said = {"y": f"{y + 13:g}", "font_size": 12}
        parts.append(tag("text", record["name"], x=0, **said))
        parts.append(tag("text", _sum(record), x="100%", text_anchor="end", **said, class_="dim"))
        y += _NAME
        for lane in _lanes(record):
            parts.append(_lane(record, lane, y, window))
            y += _LANE
        y += _GAP + (0 if _lanes(record) else _LANE)
    return joined(parts)


def _lane(record: Record, lane: str, y: float, window: Window) -> Html:
    """Rounds that are handed over come last, on top of what they stand in."""
    spans = [
        span
        for span in record["spans"]
        if span[0] == lane and span[1] in KINDS and span[4] >= window[0] and span[3] <= window[1]
    ]
    blocks = []
    for _, what, number, begin, end in sorted(_seen(spans, window), key=lambda s: s[1] == "post"):
        shares = (_share(max(begin, window[0]), window), _share(min(end, window[1]), window))
        label = what if number < 0 else f"{what} of round {number}"
        title = f"{label}: {(end - begin) / 1e6:.3f} ms"
        blocks.append(block(what, *shares, y, _LANE - 1, title))
    return joined(blocks)


def _seen(spans: Sequence[Span], window: Window) -> Sequence[Span]:
    """Of very many spans, those that do not lie in one pixel with another of their kind."""
    if len(spans) <= _FULL:
        return spans
    size = (window[1] - window[0]) / _FULL
    return list(
        {(what, b // size, e // size): (ln, what, n, b, e) for ln, what, n, b, e in spans}.values()
    )


def _share(moment: int, window: Window) -> float:
    return (moment - window[0]) / (window[1] - window[0])


def _sum(record: Record) -> str:
    """How much a process copied, in words."""
    copies = [span for span in record["spans"] if span[1] in COPIES]
    seconds = sum(span[4] - span[3] for span in copies) / 1e9
    words = "1 copy" if len(copies) == 1 else f"{len(copies)} copies"
    return f"{words}, {seconds_text(seconds)}" if copies else ""


def _legend(records: Sequence[Record]) -> list[Html]:
    """A line for each group of what there is."""
    seen = {span[1] for record in records for span in record["spans"]}
    lines = []
    for title, kinds in _GROUPS.items():
        keys = [
            tag("span", swatch(kind), f"{kind}: {known.words}")
            for kind, known in kinds.items()
            if kind in seen
        ]
        if keys:
            lines.append(joined([tag("span", title, class_="dim"), *keys]))
    return lines
