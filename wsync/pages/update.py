"""One update, as a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsync.pages.bars import length, phases_bar
from wsync.pages.html import (
    Html,
    bytes_text,
    folded,
    fragment,
    joined,
    seconds_text,
    section,
    table,
    tag,
)
from wsync.pages.timeline import timeline

_BYTES = {
    "model_nbytes": "the model, in the trainer's dtype",
    "needed_nbytes": "needed by all workers together",
    "delivered_nbytes": "delivered to all workers together",
    "sent_nbytes": "sent from rank to rank for it",
    "quantised_nbytes": "quantised, in the trainer's dtype",
}
_MEMORY = {
    "round_nbytes": "a round of one worker, at most",
    "ring_nbytes": "rings of this rank",
    "staging_nbytes": "staging of this rank",
    "image_nbytes": "codes and scales of this rank",
}


def figures(facts: Mapping[str, Any]) -> Html:
    """What matters most of a Report's facts, in large figures."""
    seconds, delivered = facts["seconds"], facts["delivered_nbytes"]
    shown = {
        "time": seconds_text(seconds),
        "delivered": bytes_text(delivered),
        "rate": f"{bytes_text(delivered / seconds)}/s" if seconds else "-",
        "redundancy": f"{facts['redundancy']:.3f}",
        "tensors": f"{facts['tensors']:,}",
        "workers": f"{facts['workers']:,}",
        "rounds": f"{facts['rounds']:,}",
    }
    each = (tag("div", tag("b", text), tag("span", name)) for name, text in shown.items())
    return tag("div", *each, class_="figures")


def bytes_table(facts: Mapping[str, Any]) -> Html:
    """What was moved, with a bar each, and the memory for it."""
    most = max(facts[name] for name in _BYTES)
    rows: list[Sequence[str]] = []
    for title, known in (("moved", _BYTES), ("memory for it", _MEMORY)):
        rows.append([tag("b", title)])
        for name, words in known.items():
            if nbytes := facts[name]:
                bar = length(nbytes, most) if known is _BYTES else ""
                rows.append((words, bar, f"{nbytes:,}"))
    return table(["", "", "bytes"], rows, left=2)


def engines(facts: Mapping[str, Any]) -> Html:
    """Which way the engines' weights take, what carries them, and what engines load themselves."""
    paths = {name: f" ({path})" for name, path in facts["paths"].items()}
    ways = [
        tag(
            "p",
            tag("span", f"by {way}: ", class_="dim"),
            ", ".join(f"{name}{paths.get(name, '')}" for name in names),
        )
        for way, names in facts["ways"].items()
    ]
    own = [
        tag("p", tag("span", f"by its own load_weights, {name}: ", class_="dim"), text)
        for name, text in facts["own_loading"].items()
    ]
    return joined([*ways, *own])


def update(facts: Mapping[str, Any], spans: Sequence[Sequence[Any]], rank: int) -> str:
    """What a Report says (`Report.facts`), and what its rank did when (`Trace.spans`)."""
    parts = [
        tag("b", f"Weights updated to version {facts['version']}"),
        figures(facts),
        engines(facts),
        section("Phases of this rank", phases_bar(facts["seconds"], facts["phases"])),
        section("Bytes", bytes_table(facts)),
    ]
    if spans:
        name = f"trainer rank {rank}"
        drawn = timeline([{"role": "trainer", "name": name, "spans": spans}])
        parts.append(section("Timeline of this rank", drawn))
    parts.append(folded("All numbers", _everything(facts)))
    return fragment(*parts)


def _everything(facts: Mapping[str, Any]) -> Html:
    """Every fact under its own name."""
    simple = [
        (name, _text(v)) for name, v in facts.items() if not isinstance(v, dict | tuple | list)
    ]
    more = [
        folded(
            f"{name} ({len(values)})", *(tag("p", line, class_="mono") for line in _lines(values))
        )
        for name, values in facts.items()
        if isinstance(values, tuple | list | dict) and values
    ]
    return joined([table(["", "value"], simple), *more])


def _lines(values: Sequence[object] | Mapping[str, object]) -> list[str]:
    if isinstance(values, Mapping):
        return [f"{name}: {_text(value)}" for name, value in values.items()]
    return [str(value) for value in values]


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
