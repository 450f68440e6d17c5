"""python -m benchmarks.chart ROWS > update.svg

The README's picture: bars of `python -m benchmarks update --json ROWS`, for light and dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any
from xml.sax.saxutils import escape

PEER = "slime's loop, torch threads 1"
# what a case's name ends with: whose bar that is
WAYS = {
    ", direct": "wsync, read in place",
    "": "wsync, its receiver",
    ", stock engine": "wsync, engine as it is",
}
SLIME = "slime's way"
WIDTH, LABELS, VALUES = 760, 170, 70  # pixels, as what follows
BAR, STEP, HEAD, GAP = 12, 18, 22, 14
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.head { font-weight: 600; }
.wsync { fill: #1a7f5a; }
.slime { fill: #a8b0b9; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.wsync { fill: #3fb68b; }
.slime { fill: #6e7781; }
}
"""


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of each way, by case; of the peer, the best that was measured beside one of them."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["benchmark"] != "update" or not row["peer"].startswith(PEER):
            continue
        ending = next(end for end in sorted(WAYS, reverse=True) if row["case"].endswith(end))
        name = row["case"].removesuffix(ending).replace(", shared", "")
        case = found.setdefault(name, {})
        case[WAYS[ending]] = row["seconds"]
        case[SLIME] = min(case.get(SLIME, row["peer_seconds"]), row["peer_seconds"])
    order = [*WAYS.values(), SLIME]
    return {case: {way: ways[way] for way in order if way in ways} for case, ways in found.items()}


def picture(rows: Iterable[Mapping[str, Any]]) -> str:
    """An SVG document; all bars have one scale, in seconds."""
    cases = groups(rows)
    longest = max(max(ways.values()) for ways in cases.values())
    room = WIDTH - LABELS - VALUES
    parts, y = [], 0
    for case, ways in cases.items():
        y += HEAD
        parts.append(f'<text class="head" x="0" y="{y - 8}">{escape(case)}</text>')
        for way, seconds in ways.items():
            width, kind = max(room * seconds / longest, 1.0), "slime" if way == SLIME else "wsync"
            parts += [
                f'<text x="{LABELS - 10}" y="{y + BAR - 2}" text-anchor="end">{escape(way)}</text>',
                f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}"/>',
                f'<text x="{LABELS + width + 6:.1f}" y="{y + BAR - 2}">{seconds:.2f} s</text>',
            ]
            y += STEP
        y += GAP
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>Seconds of an update, wsync's ways beside slime's</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(picture(map(json.loads, file)))


if __name__ == "__main__":
    main()
