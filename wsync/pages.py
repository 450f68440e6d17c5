"""Makes the HTML of an update, which a notebook or the demo's page shows.

A page needs no network and no script.  It follows the reader's choice of a light or dark theme.
The output is well-formed XML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element, tostring

# The phases of an update in their order.  Each is a wait of a trainer's thread.
_PHASES: Final = {
    "quantise": "codes and scales are made",
    "pause": "engines stop",
    "open": "workers join; in the first update they also learn where weights go, and ranks plan",
    "staging": "other ranks have read the rounds sent before",
    "engine": "workers have taken their rounds",
    "gather": "the bytes from other ranks have arrived",
    "copy": "this rank's own copies have run",
    "prepare": "all workers hold every byte",
    "commit": "engines take the version and continue",
    "begin": "a new folder has files of their full size",
    "write": "files are written",
    "sync": "the disk has them",
    "publish": "the folder gets its name",
    "engines": "engines load the files and continue",
    "other": "ranks agree to begin; also the time between phases",
}
# other spans of a process: its copies, and the waits of an engine's worker
_OTHERS: Final = ("pack", "local", "unpack", "load", "post", "join", "take", "finish", "verdict")
_COLOURS: Final = {
    name: f"hsl({137 * number % 360}, 45%, 55%)" for number, name in enumerate((*_PHASES, *_OTHERS))
}
# shown above the other facts
_SHOWN: Final = ("version", "phases", "ways", "paths", "own_loading", "paused")
_PIXELS: Final = 4000  # in a lane; each shows at most one span of a kind
# characters that XML cannot contain
_UNWRITABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A notebook has its own rules for tables.  The doubled class names take precedence over them.
_STYLE: Final = """
.wsync{color-scheme:light dark;color:CanvasText;background:Canvas;font:14px/1.45 system-ui,
sans-serif;max-width:1100px;margin:0 auto;padding:12px 16px;overflow-wrap:anywhere}
.wsync table{border-collapse:collapse;margin:8px 0;font-variant-numeric:tabular-nums}
.wsync.wsync tr:nth-child(n){background:transparent}
.wsync.wsync th,.wsync.wsync td{padding:3px 14px 3px 0;text-align:left;vertical-align:top;
border:0;border-bottom:1px solid GrayText}
.wsync .key{display:inline-block;width:12px;height:12px;margin-right:6px}
.wsync .lane{position:relative;height:12px;margin:1px 0}
.wsync .lane span{position:absolute;height:100%;min-width:1px}
"""


def tag(name: str, /, *content: str | Element, **attributes: object) -> Element:
    """An element.  A trailing underscore of an attribute is dropped: `class_` becomes class."""
    made = Element(name, {key.rstrip("_"): str(value) for key, value in attributes.items()})
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = part
        else:
            made.text = part
    return made


def fragment(*content: Element) -> str:
    """A part of another page, together with the style that it needs."""
    return _written(tag("div", tag("style", _STYLE), *content, class_="wsync"))


def page(title: str, *content: Element) -> str:
    """A complete HTML file."""
    sized = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    head = tag("head", tag("meta", charset="utf-8"), tag("meta", **sized), tag("title", title))
    body = tag("body", tag("h1", title), *content, class_="wsync")
    head.append(tag("style", _STYLE))
    return f"<!DOCTYPE html>\n{_written(tag('html', head, body, lang='en'))}\n"


def _written(element: Element) -> str:
    text = tostring(element, "unicode", short_empty_elements=False)  # HTML has no <tag/>
    return _UNWRITABLE.sub("\ufffd", text)


def spent(seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase: first the known phases in their order, then unknown ones, then the rest of
    the update's time as "other"."""
    found = {name: phases[name] for name in (*_PHASES, *phases) if name in phases}
    rest = seconds - sum(phases.values())
    return found | ({"other": rest} if rest > 0 else {})


def update(facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Element]:
    """The elements that show a Report and a timeline of its processes.

    facts: as `Report.facts` returns them.  records: as wsync.machine.trace writes them, each with a
    "name" added.
    """
    paths, seconds = facts["paths"], facts["seconds"]
    parts = [tag("b", f"Weights updated to version {facts['version']}")]
    for way, names in facts["ways"].items():
        said = [f"{name} ({paths[name]})" if name in paths else name for name in names]
        parts.append(tag("p", f"by {way}: {', '.join(said)}"))
    for name, size in facts["paused"].items():
        parts.append(tag("p", f"{name} did not generate for {_duration(size)}"))
    for name, text in facts["own_loading"].items():
        parts.append(tag("p", f"by its own load_weights, {name}: {text}"))
    phases = list[list[str | Element]]()
    for name, size in spent(seconds, facts["phases"]).items():
        label = tag("div", _key(name), name)
        phases.append([label, _PHASES.get(name, ""), _duration(size), f"{size / seconds:.1%}"])
    audit = f"The audit took {_duration(facts['audit_seconds'])} of this, in the slowest worker."
    parts += [_table(["phase", "waits until", "time", "share"], phases), tag("p", audit)]
    rows = [(name, _text(value)) for name, value in facts.items() if name not in _SHOWN]
    return [*parts, *_timeline(records), _table(["", "value"], rows)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | Element]]) -> Element:
    lines = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("table", tag("tr", *(tag("th", head) for head in heads)), *lines)


def _timeline(records: Sequence[Mapping[str, Any]]) -> Iterator[Element]:
    """The spans of every process, from the beginning of the update to its end.  The upper lane has
    the waits of the process's thread, the lower lane the copies of its stream."""
    spans = [span for record in records for span in record["spans"]]
    if not spans:
        return
    begin, end = min(span[3] for span in spans), max(span[4] for span in spans) + 1
    yield tag("p", f"Timeline of {_duration((end - begin) / 1e9)}:")
    for record in records:
        yield tag("div", record["name"])
        for lane in ("thread", "stream"):
            own = [span for span in record["spans"] if span[0] == lane and span[1] in _COLOURS]
            yield tag("div", *_bars(own, begin, end), class_="lane")
    seen = {span[1] for span in spans}
    for name in filter(seen.__contains__, _OTHERS):
        yield tag("div", _key(name), name)


def _bars(spans: Iterable[Sequence[Any]], begin: int, end: int) -> Iterator[Element]:
    """The bars of one lane.  "post" bars come last, so that they are drawn on top of the others."""
    share, pixel = 100 / (end - begin), (end - begin) / _PIXELS
    seen = {(span[1], span[3] // pixel, span[4] // pixel): span for span in spans}
    for _, what, number, first, last in sorted(seen.values(), key=lambda span: span[1] == "post"):
        label = what if number < 0 else f"{what} of round {number}"
        place = f"left:{share * (first - begin):.3f}%;width:{share * (last - first):.3f}%"
        style = f"{place};background:{_COLOURS[what]}"
        yield tag("span", title=f"{label}: {_duration((last - first) / 1e9)}", style=style)


def _key(name: str) -> Element:
    return tag("span", class_="key", style=f"background:{_COLOURS.get(name, 'none')}")


def _duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
