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

from benchmarks.environment import Skipped, check_memory, environment, missing

GB = 10**9
# the memory that each needs at its highest, in all its processes: estimates from above
NEEDED = {
    **{"bucket": 3 * GB, "update": 14 * GB, "distributed": 14 * GB, "disk": 12 * GB},
    **{"plan": 4 * GB, "control": 2 * GB, "memory": 8 * GB, "scaling": 11 * GB, "load": 4 * GB},
    **{"needed": 8 * GB, "quantise": 10 * GB, "gpu": 4 * GB, "nccl": 4 * GB, "pause": 9 * GB},
}
NAMES = tuple(NEEDED)
DIRECT_NEEDED = 11 * GB  # of `update --direct`
GPU_PARTS = ("memory", "order", "copy", "quantise", "update")


def rows(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    check_memory(name, DIRECT_NEEDED if options.get("direct") else NEEDED[name])
    try:
        yield from importlib.import_module(f"benchmarks.{name}").run(**options)
    except ModuleNotFoundError as error:
        raise missing(error) from error


def _show(row: dict[str, Any]) -> None:
    # what a case is about, where that is not a time
    figure = f"  ({row['figure']})" if "figure" in row else ""
    print(
        f"{row['benchmark']:10} {row['case']:34} {row['bytes']:12} {row['seconds']:9.4f} "
        f"{row['peer_seconds']:9.4f} {row['ratio']:7.2f}  {row['verified']!s:8}  "
        f"{row['peer']}{figure}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    text = ", ".join(f"{name} ({nbytes // GB} GB of memory)" for name, nbytes in NEEDED.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {text}")
    parser.add_argument("--json", metavar="FILE", help="append one JSON line per case")
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="gpu, update: of the model's layers, so many (update: an even number)",
    )
    parser.add_argument(
        "--direct",
        action="store_true",
        help=f"update: only direct delivery ({DIRECT_NEEDED // GB} GB of memory)",
    )
    parser.add_argument("--only", choices=GPU_PARTS, help="gpu: of its parts, this one")
    parser.add_argument(
        "--checklist",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="gpu: what only GPUs can show (number N of it): run and judged, or listed without any",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; there are {', '.join(NAMES)}")
    if chosen.checklist is not None:
        if chosen.names != ["gpu"]:
            parser.error("--checklist is one of gpu")
        missed: int = importlib.import_module("benchmarks.gpu_checklist").run(chosen.checklist)
        return 1 if missed else 0
    if chosen.layers < 0:
        parser.error(f"--layers {chosen.layers}: negative")
    wrong = cases = skipped = 0
    facts = environment()
    print(
        f"{'benchmark':10} {'case':34} {'bytes':>12} {'seconds':>9} {'peer s':>9} "
        f"{'ratio':>7}  verified  peer"
    )
    for name in chosen.names or NAMES:
        options: dict[str, Any] = {}
        if name in ("gpu", "update") and chosen.layers:
            options["layers"] = chosen.layers
        if name == "update" and chosen.direct:
            options["direct"] = True
        if name == "gpu" and chosen.only:
            options["only"] = chosen.only
        try:
            for row in rows(name, **options):
                cases += 1
                wrong += not row["verified"]
                _show(row)
                if chosen.json:
                    with open(chosen.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, "environment": facts}) + "\n")
        except Skipped as reason:
            skipped += 1
            print(f"{name:10} skipped: {reason}", flush=True)
    print(f"{cases} cases, {wrong} with wrong bytes" + f", {skipped} skipped" * bool(skipped))
    return 1 if wrong or not cases + skipped else 0


if __name__ == "__main__":
    sys.exit(main())
