"""One update, as a notebook and the demo's page show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from wsync.pages.html import Html, joined, seconds_text, table, tag
from wsync.pages.style import KINDS, PHASES
from wsync.pages.timeline import Record, swatch, timeline

_REST: Final = "other"
_SHOWN: Final = ("version", "phases", "ways", "paths", "own_loading")  # above the other facts


def spent(seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
    """An update's phases in their order, those that are not known after them, and the rest of its
    time."""
    found = {name: phases[name] for name in (*PHASES, *phases) if name in phases}
    rest = seconds - sum(phases.values())
    return found | ({_REST: rest} if rest > 0 else {})


def update(facts: Mapping[str, Any], records: Sequence[Record]) -> Html:
    """What a Report says (`Report.facts`), and what processes did when (see
    wsync.pages.timeline)."""
    audit = seconds_text(facts["audit_seconds"])
    parts = [
        tag("b", f"Weights updated to version {facts['version']}"),
        *_engines(facts),
        _phases(facts["seconds"], facts["phases"]),
        tag("p", f"The audit took {audit} of this, in the slowest worker."),
    ]
    if any(record["spans"] for record in records):
        parts.append(timeline(records))
    rows = [(name, _text(value)) for name, value in facts.items() if name not in _SHOWN]
    return joined([*parts, table(["", "value"], rows)])


def _engines(facts: Mapping[str, Any]) -> Iterable[Html]:
    """Which way the engines' weights take, what carries them, and what engines load themselves."""
    paths = facts["paths"]
    for way, names in facts["ways"].items():
        said = [f"{name} ({paths[name]})" if name in paths else name for name in names]
        yield tag("p", tag("span", f"by {way}: ", class_="dim"), ", ".join(said))
    for name, text in facts["own_loading"].items():
        yield tag("p", tag("span", f"by its own load_weights, {name}: ", class_="dim"), text)


def _phases(seconds: float, phases: Mapping[str, float]) -> Html:
    rows = []
    for name, size in spent(seconds, phases).items():
        known = KINDS.get(name)
        label = joined([swatch(name), name]) if known else name
        share = f"{size / seconds:.1%}" if seconds else ""
        rows.append((label, known.words if known else "", seconds_text(size), share))
    return table(["phase", "waits until", "time", "share"], rows)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
