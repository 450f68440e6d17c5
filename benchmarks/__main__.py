"""python -m benchmarks [NAME...] --json FILE

Runs benchmarks and prints one row per case; see benchmarks/README.md for what each number
means.  The exit status is 1 if any byte was wrong, 2 if a name is unknown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.environment import environment

NAMES = (
    *("bucket", "update", "distributed", "disk", "plan", "control", "memory", "scaling", "load"),
    "needed",
)


def rows(name: str) -> Iterator[dict[str, Any]]:
    yield from importlib.import_module(f"benchmarks.{name}").run()


def _figure(row: dict[str, Any]) -> str:
    """What a case is about, where that is not a time."""
    return f"  ({row['figure']})" if "figure" in row else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per case")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; there are {', '.join(NAMES)}")
    wrong = cases = 0
    facts = environment()
    print(
        f"{'benchmark':10} {'case':34} {'bytes':>12} {'seconds':>9} {'peer s':>9} "
        f"{'ratio':>7}  verified  peer"
    )
    for name in chosen.names or NAMES:
        for row in rows(name):
            cases += 1
            wrong += not row["verified"]
            print(
                f"{row['benchmark']:10} {row['case']:34} {row['bytes']:12} {row['seconds']:9.4f} "
                f"{row['peer_seconds']:9.4f} {row['ratio']:7.2f}  {row['verified']!s:8}  "
                f"{row['peer']}{_figure(row)}",
                flush=True,
            )
            if chosen.json:
                with open(chosen.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, "environment": facts}) + "\n")
    print(f"{cases} cases, {wrong} with wrong bytes")
    return 1 if wrong or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
