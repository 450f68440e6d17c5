"""`wsync demo`: a sharded trainer updates two running engines; the demo checks every byte."""

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
A Megatron trainer in several processes takes optimizer steps, and then updates two inference
engines.  It repeats both for every update.  The engines run a transformers model behind SGLang's
HTTP endpoints.  Every tensor is compared byte for byte with mbridge's conversion, and the engines'
logits are compared with the trainer's.  Everything runs on the CPU.
"""
MODES = {  # how weights travel
    "colocated": "through memory that trainer and engines share",
    "mixed": "over gloo to the first engine, through shared memory to the second engine",
    "distributed": "over gloo, as to engines on other hosts",
    "disk": "as checkpoints in a folder",
}
_REMOTE = {"mixed": 1, "distributed": 2}  # the number of engines that count as remote
_EXPERTS = "qwen3-moe"


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo.  Returns 0 if everything was verified, 1 if not, 2 for bad arguments."""
    chosen = _chosen(arguments)
    if lack := _lack():
        print(f"wsync demo: {lack}", file=sys.stderr)
        return 1
    # one thread each: trainer and engines share the cores; gloo stays on this host
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="wsync-demo-") as folder:
        if chosen.report:
            os.environ[trace.VARIABLE] = folder
        return _run(chosen, folder)


def _chosen(arguments: list[str] | None) -> Any:
    """The arguments, plus `ranks` (of the trainer) and `offsets` (the engines' GPU offsets)."""
    parser = argparse.ArgumentParser(prog="wsync demo", description=_DESCRIPTION)
    for name, known, text in (
        ("model", ("qwen3", _EXPERTS), "the model to train"),
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
    text = "number of weight updates, each after some optimizer steps (default %(default)s)"
    parser.add_argument("--updates", type=int, default=3, help=text)
    text = "write an HTML page of the last update to FILE: phases, bytes and timeline"
    parser.add_argument("--report", metavar="FILE", type=Path, help=text)
    chosen = parser.parse_args(arguments)
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: must be at least 1")
    if chosen.report:
        try:
            chosen.report.open("a").close()
        except OSError as error:
            parser.error(f"--report {chosen.report}: {error.strerror}")
    if chosen.model != _EXPERTS:
        chosen.ep = 1
    chosen.ranks = chosen.pp * math.lcm(chosen.tp, chosen.ep)
    remote = _REMOTE.get(chosen.mode, 0)
    chosen.offsets = [chosen.ranks] * remote + [0] * (2 - remote) if remote else None
    return chosen


def _lack() -> str:
    """Says why the demo cannot run.  Returns "" if it can."""
    needed = ("torch", "transformers", "megatron.core", "mbridge")
    if missing := [name for name in needed if not importable(name)]:
        return f"{', '.join(missing)}: not installed; run pip install '.[demo]' in a clone of wsync"
    found = importlib.metadata.version("transformers")
    if found.startswith("4."):  # megatron-core 0.16.1 and mbridge need it
        return ""
    return (
        f"transformers {found} is installed, and the demo needs 4.57: pip install "
        "'transformers==4.57.6'; if other programs need the newer one, use another environment"
    )


def _run(chosen: Any, folder: str) -> int:
    """Imports the packages, then forks the trainer's processes and waits for them."""
    sizes = f"TP{chosen.tp} x PP{chosen.pp}, EP{chosen.ep}"
    print(f"trainer: megatron-core, {chosen.model}, {chosen.ranks} processes ({sizes})")
    print(f"mode {chosen.mode}: weights travel {MODES[chosen.mode]}")
    print("importing torch, transformers and megatron-core", flush=True)
    # these warn at length that TransformerEngine and a GPU are missing
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
    """The spans of every process in its last update, as wsync.machine.trace has written them.
    Trainer ranks come first.  names: the engine processes' names, by process id."""
    records = [
        json.loads(path.read_text().splitlines()[-1]) for path in Path(folder).glob("*.jsonl")
    ]
    for record in records:
        known = names.get(record["pid"], f"engine process {record['pid']}")
        rank = f"trainer rank {record['rank']}"
        record["name"] = rank if record["role"] == "trainer" else known
    return sorted(records, key=lambda r: (r["role"] != "trainer", r["rank"], r["name"]))
