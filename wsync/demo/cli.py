"""`wsync demo`: a sharded trainer updates two running engines, and every byte is checked."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from wsync import pages
from wsync.demo import traces
from wsync.demo.launcher import MODES, DemoFailed, Settings, run_demo
from wsync.machine import trace

_DESCRIPTION = """
A Megatron trainer in several processes takes optimizer steps and updates two inference engines
after each, which run a transformers model behind SGLang's HTTP endpoints.  Every tensor is compared
byte for byte with an independent conversion, and the engines' logits with the trainer's.
Everything runs on the CPU.  In mode disk the trainer writes a checkpoint for each update, which
the engines load, and one more engine starts from the last.
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; 0 if everything was verified, 1 if not, 2 for bad arguments."""
    parser = _parser()
    chosen = vars(parser.parse_args(arguments))
    files = {name: chosen.pop(name) for name in ("json", "report")}
    if chosen["ep"] is None:
        chosen["ep"] = 2 if chosen["model"] == "qwen3-moe" else 1
    try:
        settings = Settings(**chosen)
    except ValueError as error:
        parser.error(str(error))
    for path in filter(None, files.values()):
        try:
            path.open("a").close()
        except OSError as error:
            parser.error(f"{path}: {error.strerror}")
    # four trainer processes and two engines share the machine's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with tempfile.TemporaryDirectory(prefix="wsync-trace-") as folder:
            if files["report"]:
                os.environ[trace.VARIABLE] = folder
            facts = run_demo(settings)
            _write(files, Path(folder), facts)
    except DemoFailed as error:
        print(f"wsync demo: {error}", file=sys.stderr)
        return 1
    print_report(facts)
    return 0 if facts["verified"] else 1


def _parser() -> argparse.ArgumentParser:
    """All but --json and --report are fields of Settings."""
    parser = argparse.ArgumentParser(prog="wsync demo", description=_DESCRIPTION)
    for name, default, known, text in (
        ("model", "qwen3", ("qwen3", "qwen3-moe"), "what is trained"),
        (
            *("mode", "colocated", MODES),
            "how weights travel: " + "; ".join(f"{mode}: {how}" for mode, how in MODES.items()),
        ),
    ):
        text += f" (default {default})"
        parser.add_argument(f"--{name}", choices=known, default=default, help=text)
    for name, size, text in (
        ("tp", 2, "tensor-parallel size: 1, 2, 4 or 8"),
        ("pp", 2, "pipeline-parallel size: 1, 2 or 4"),
        ("ep", None, "expert-parallel size: 1, 2, 4 or 8; 2 for qwen3-moe"),
        ("updates", 3, "weight updates, each after some optimizer steps"),
    ):
        text += f" (default {size or 1})"
        parser.add_argument(f"--{name}", type=int, default=size, help=text)
    text = "write a page to FILE.html: the last update's phases, bytes and timeline"
    parser.add_argument("--report", metavar="FILE", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the facts to FILE")
    return parser


def _write(files: dict[str, Path | None], folder: Path, facts: dict[str, Any]) -> None:
    """The files that are wanted; folder: where the traces are."""
    if path := files["report"]:
        last, names = facts["updates"][-1], facts["processes"]
        records = traces.read(folder, {int(pid): name for pid, name in names.items()})
        verdict = "verified" if last["verified"] else "NOT VERIFIED"
        shown = pages.tag("p", verdict), *pages.update(last, records)
        text = pages.page(f"wsync demo: {facts['model']}", *shown)
        path.write_text(text, encoding="utf-8")
    if path := files["json"]:
        path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def print_report(facts: dict[str, Any]) -> None:
    """The tables and texts that a person wants to see."""
    unit = "files" if facts["mode"] == "disk" else "rounds"
    rows = [["version", "MB", unit, "seconds", "checked"], *map(_row, facts["updates"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    print(
        "MB: "
        + (
            "written by all trainer ranks"
            if unit == "files"
            else "received by all engine processes together; the model has "
            f"{facts['bytes'] / 1e6:.1f}"
        )
    )
    print("\nwhat the trainer's rank 0 waited for in the last update:")
    last = facts["updates"][-1]
    for name, seconds in pages.spent(last["seconds"], last["phases"]).items():
        print(f"  {seconds:.3f} s  {name}: {pages.WORDS[name]}")
    print(f"the audit took {last['audit_seconds']:.3f} s of this, in the slowest worker\n")
    for engine in facts["engines"]:
        print(f"{engine['name']}: {engine['checked']}")
        for moment in ("before", "after"):
            if moment in engine:
                print(f"  generated {moment + ':':<7} {engine[moment]!r}")
    if not facts["learnt"]:
        print("the model has not learnt its text: what it generates is its own")
    print()
    count, total = facts["tensors"], facts["bytes"]
    if facts["verified"]:
        print(f"verified: {count} tensors, {total:,} bytes, in every engine after every update")
    else:
        print("NOT VERIFIED: " + "; ".join(facts["problems"]))


def _row(update: dict[str, Any]) -> list[str]:
    return [
        update["version"],
        f"{update['delivered_nbytes'] / 1e6:.1f}",
        str(update["rounds"]),
        f"{update['seconds']:.3f}",
        "yes" if update["verified"] else "NO",
    ]
