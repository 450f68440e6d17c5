"""`wsync demo`: a sharded trainer updates two running engines, and every byte is checked."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wsync.doctor import importable
from wsync.machine import trace

_DESCRIPTION = """
A Megatron trainer in several processes takes optimizer steps and updates two inference engines
after each, which run a transformers model behind SGLang's HTTP endpoints.  Every tensor is compared
byte for byte with mbridge's conversion, and the engines' logits with the trainer's.  Everything
runs on the CPU.
"""
MODES = {  # how weights travel
    "colocated": "through memory that trainer and engines share",
    "mixed": "over gloo to the first engine, through shared memory to the other one",
    "distributed": "over gloo, as to engines on other hosts",
    "disk": "as checkpoints in a folder",
}
_REMOTE = {"mixed": 1, "distributed": 2}  # engines that are taken for remote
_EXPERTS = "qwen3-moe"


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; 0 if everything was verified, 1 if not, 2 for bad arguments."""
    chosen = _chosen(arguments)
    if lack := _lack():
        print(f"wsync demo: {lack}", file=sys.stderr)
        return 1
    # trainer processes and two engines share the machine's cores, and gloo this host
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="wsync-demo-") as folder:
        if chosen.report:
            os.environ[trace.VARIABLE] = folder
        return _run(chosen, folder)


def _chosen(arguments: list[str] | None) -> Any:
    """What the command line says, the number of trainer ranks, and the engines' GPU offsets."""
    parser = argparse.ArgumentParser(prog="wsync demo", description=_DESCRIPTION)
    for name, known, text in (
        ("model", ("qwen3", _EXPERTS), "what is trained"),
        ("mode", tuple(MODES), "; ".join(f"{mode}: {how}" for mode, how in MODES.items())),
    ):
        text += " (default %(default)s)"
        parser.add_argument(f"--{name}", choices=known, default=known[0], help=text)
    for name, sizes, text in (
        ("tp", (1, 2, 4, 8), "tensor-parallel size"),
        ("pp", (1, 2, 4), "pipeline-parallel size"),
        ("ep", (1, 2, 4, 8), f"expert-parallel size of {_EXPERTS}"),
    ):
        text += " (default %(default)s)"
        parser.add_argument(f"--{name}", type=int, choices=sizes, default=2, help=text)
    text = "weight updates, each after some optimizer steps (default %(default)s)"
    parser.add_argument("--updates", type=int, default=3, help=text)
    text = "write a page of HTML to FILE: the last update's phases, bytes and timeline"
    parser.add_argument("--report", metavar="FILE", type=Path, help=text)
    chosen = parser.parse_args(arguments)
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: at least 1")
    if chosen.report:
        try:
            chosen.report.open("a").close()
        except OSError as error:
            parser.error(f"{chosen.report}: {error.strerror}")
    if chosen.model != _EXPERTS:
        chosen.ep = 1
    chosen.ranks = chosen.pp * math.lcm(chosen.tp, chosen.ep)
    remote = _REMOTE.get(chosen.mode, 0)
    chosen.offsets = [chosen.ranks] * remote + [0] * (2 - remote) if remote else None
    return chosen


def _lack() -> str:
    """What keeps the demo from running, or ""."""
    needed = ("torch", "transformers", "megatron.core", "mbridge")
    if missing := [name for name in needed if not importable(name)]:
        return f"{', '.join(missing)}: not installed; wsync's extra [demo] brings it"
    found = importlib.metadata.version("transformers")
    if found.startswith("4."):  # megatron-core 0.16.1 and mbridge are for it
        return ""
    return (
        f"transformers {found} is installed, and the demo needs 4.57: pip install "
        "'transformers==4.57.6', in another environment if something here needs the newer one"
    )


def _run(chosen: Any, folder: str) -> int:
    """Runs the trainer's processes, which are forked once this one has imported what they need."""
    sizes = f"TP{chosen.tp} x PP{chosen.pp}, EP{chosen.ep}"
    print(f"trainer: megatron-core, {chosen.model}, {chosen.ranks} processes ({sizes})")
    print(f"mode {chosen.mode}: weights travel {MODES[chosen.mode]}")
    print("importing torch, transformers and megatron-core", flush=True)
    # they say in many words that there is neither TransformerEngine nor a GPU here
    warnings.filterwarnings("ignore", module=r"(mbridge|megatron|torch\.distributed)(\.|$)")
    import mbridge  # noqa: F401 (once, for all ranks)
    from torch.multiprocessing.spawn import ProcessException, start_processes

    from wsync.demo.trainer import train

    start: Any = start_processes
    try:
        start(train, (chosen, folder), chosen.ranks, daemon=True, start_method="fork")
    except ProcessException as error:
        print(f"wsync demo: trainer rank {error.error_index} failed: {error}", file=sys.stderr)
        return 1
    return 0


def traces(folder: str, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """What every process did in its last update, trainer ranks first, as wsync.machine.trace has
    written it.  names: of engine processes, by their ids."""
    records = [
        json.loads(path.read_text().splitlines()[-1]) for path in Path(folder).glob("*.jsonl")
    ]
    for record in records:
        known = names.get(record["pid"], f"engine process {record['pid']}")
        rank = f"trainer rank {record['rank']}"
        record["name"] = rank if record["role"] == "trainer" else known
    return sorted(records, key=lambda r: (r["role"] != "trainer", r["rank"], r["name"]))
