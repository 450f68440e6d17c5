"""The page of `wsync demo --report`: what the demo printed, and the pictures that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsync.demo.launcher import MODES
from wsync.pages.bars import length, phases_chart
from wsync.pages.html import (
    Html,
    bytes_text,
    folded,
    joined,
    page,
    seconds_text,
    section,
    share_text,
    table,
    tag,
)
from wsync.pages.timeline import Record, timeline
from wsync.pages.update import bytes_table, figures

Facts = Mapping[str, Any]


def report(facts: Facts, records: Sequence[Record]) -> str:
    """facts: `run_demo`'s; records: of the last update, from wsync.demo.trace_export.read."""
    last = facts["updates"][-1]
    sizes = ", ".join(f"{name.upper()} {size}" for name, size in facts["parallel"].items())
    intro = (
        f"{facts['model']} ({facts['tensors']} tensors, {facts['bytes']:,} bytes), trained by "
        f"Megatron-Core in {facts['ranks']} processes ({sizes}).  In mode {facts['mode']} weights "
        f"travel {MODES[facts['mode']]}."
    )
    parts = [
        tag("p", intro),
        _verdict(facts),
        section(f"The last update, version {last['version']}", figures(last), bytes_table(last)),
    ]
    if facts["deliveries"]:
        parts.append(section("What was sent where", *_where(facts)))
    parts.append(section("All updates", _updates(facts), *_phases(facts)))
    if records:
        parts.append(section(f"Timeline of update {last['version']}", timeline(records)))
    parts.append(section("Engines", *(_engine(engine) for engine in facts["engines"])))
    if facts["learnt"] is False:
        text = "the model has not learnt its text: what it generates is its own"
        parts.append(tag("p", text, class_="dim"))
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts.append(tag("p", versions, class_="dim"))
    return page(f"wsync demo: {facts['model']}", *parts)


def _verdict(facts: Facts) -> Html:
    count = len(facts["updates"])
    if facts["verified"]:
        text = f"Verified: {facts['tensors']} tensors, {facts['bytes']:,} bytes, in every engine "
        return tag("p", f"{text}after each of {count} updates.", class_="good")
    problems = folded("What is wrong", *(tag("p", problem) for problem in facts["problems"]))
    return joined([tag("p", "NOT VERIFIED", class_="bad"), problems])


def _where(facts: Facts) -> list[Html]:
    """A row a worker, under its engine: the bytes of one update."""
    each, model = facts["deliveries"], facts["bytes"]
    most = max(delivery["nbytes"] for delivery in each)
    rows: list[Sequence[str]] = []
    engines = {(delivery["engine"], delivery["way"]) for delivery in each}
    for engine, way in sorted(engines):
        mine = [one for one in each if (one["engine"], one["way"]) == (engine, way)]
        rows.append([tag("span", tag("b", engine), f" by {way}")])
        rows += [_worker(delivery, most, model) for delivery in mine]
    total = sum(delivery["nbytes"] for delivery in each)
    rows.append([tag("b", "all"), "", "", f"{total:,}", share_text(total, model)])
    heads = ["to worker", "from rank", "", "bytes", "of the model"]
    count = len(facts["updates"])
    text = f"Bytes of one update; all {count} brought {bytes_text(count * total)}."
    return [tag("p", text, class_="dim"), table(heads, rows, left=3)]


def _worker(delivery: Facts, most: int, model: int) -> list[str]:
    return [
        "all" if delivery["worker"] is None else str(delivery["worker"]),
        "several" if delivery["rank"] is None else str(delivery["rank"]),
        length(delivery["nbytes"], most),
        f"{delivery['nbytes']:,}",
        share_text(delivery["nbytes"], model),
    ]


def _updates(facts: Facts) -> Html:
    rows = []
    for update in facts["updates"]:
        mark = tag("span", "yes", class_="good") if update["verified"] else _wrong()
        numbers = [f"{update['rounds']}", f"{update['delivered_nbytes']:,}"]
        rows.append((update["version"], mark, *numbers, seconds_text(update["seconds"])))
    unit = "files" if facts["mode"] == "disk" else "rounds"
    heads = ["version", "verified", unit, "bytes", "time"]
    return table(heads, rows, left=2)


def _wrong() -> Html:
    return tag("span", "NO", class_="bad")


def _phases(facts: Facts) -> list[Html]:
    bars = [(f"update {u['version']}", u["seconds"], u["phases"]) for u in facts["updates"]]
    note = tag("p", "What the trainer's rank 0 waited for:", class_="dim")
    return [note, phases_chart(bars)]


def _engine(engine: Facts) -> Html:
    parts = [tag("p", tag("b", engine["name"]), tag("span", f": {engine['checked']}"))]
    parts += [
        tag("p", f"generated {moment}: ", tag("code", engine[moment]))
        for moment in ("before", "after")
        if moment in engine
    ]
    return tag("div", *parts, class_="engine")
