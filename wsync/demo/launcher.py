"""Starts the demo's trainer processes and collects what they found."""

from __future__ import annotations

import importlib.metadata
import json
import math
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsync.doctor import importable
from wsync.machine.temporary_environment import variable

MODES = {  # and how weights travel in each
    "colocated": "through memory that trainer and engines share",
    "distributed": "over gloo, as to engines on other hosts",
    "mixed": "over gloo to the first engine, through shared memory to the other one",
    "disk": "through a checkpoint, which the engines load",
}
_FACTS = "facts.json"  # rank 0's
_LEAVE_SECONDS = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


class DemoFailed(RuntimeError):
    """A process of the demo failed; the text says which and why."""


@dataclass(frozen=True)
class Settings:
    """What to show.  Raises ValueError for sizes that the demo's model cannot be cut into."""

    model: str
    tp: int
    pp: int
    ep: int
    updates: int = 3
    mode: str = "colocated"
    layers: int = 4
    heads: int = 8
    query_groups: int = 4
    experts: int = 8

    def __post_init__(self) -> None:
        limits = {"tp": self.heads, "pp": self.layers, "ep": self.experts}
        for name, most in limits.items():
            size = getattr(self, name)
            if size < 1 or most % size:
                raise ValueError(f"--{name} {size}: must divide {most}")
        if self.ep > 1 and self.model != "qwen3-moe":
            raise ValueError(f"--ep {self.ep}: {self.model} has no experts")
        if self.updates < 1:
            raise ValueError(f"--updates {self.updates}: at least 1")

    @property
    def ranks(self) -> int:
        return self.pp * math.lcm(self.tp, self.ep)

    def config(self) -> Any:
        """The Hugging Face configuration of the model: small, with a vocabulary of bytes."""
        import transformers

        common = {
            "vocab_size": 257,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.query_groups,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        }
        if self.model == "qwen3":
            return transformers.Qwen3Config(**common)
        return transformers.Qwen3MoeConfig(
            **common,
            moe_intermediate_size=96,
            num_experts=self.experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        )


def run_demo(settings: Settings) -> dict[str, Any]:
    """Runs the trainer's processes to the end; returns rank 0's facts.

    Raises:
        DemoFailed: a process failed or died; the others have been ended.
    """
    needed = ("torch", "transformers", "megatron.core")
    missing = [name for name in needed if not importable(name)]
    if missing:
        raise DemoFailed(f"{', '.join(missing)}: not installed; wsync's extra [demo] brings it")
    found = importlib.metadata.version("transformers")
    if not found.startswith("4."):  # megatron-core 0.16.1 and mbridge are for it
        raise DemoFailed(
            f"transformers {found} is installed, and the demo needs 4.57: pip install "
            "'transformers==4.57.6', in another environment if something here needs the newer one"
        )
    print(
        f"trainer: megatron-core, {settings.model}, {settings.ranks} processes "
        f"(TP{settings.tp} x PP{settings.pp}, EP{settings.ep})\n"
        f"mode {settings.mode}: weights travel {MODES[settings.mode]}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="wsync-demo-") as folder:
        _run_ranks(settings, Path(folder))
        facts: dict[str, Any] = json.loads(Path(folder, _FACTS).read_text(encoding="utf-8"))
        return facts


def _run_ranks(settings: Settings, folder: Path) -> None:
    """Runs the trainer's processes, forked from one that has imported what they need."""
    multiprocessing.set_forkserver_preload(["wsync.demo.preload"])
    multiprocessing.resource_tracker.ensure_running()  # which would unblock what is blocked below
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # until wsync.demo.preload runs
    try:
        with variable("PYTHONSAFEPATH", "1"):  # the current folder may be the source's
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    try:
        print("importing torch, transformers and megatron-core", flush=True)
        from torch.multiprocessing.spawn import start_processes

        start: Any = start_processes
        given = (settings, folder)
        ranks = start(_rank, given, settings.ranks, join=False, start_method="forkserver")
        _await(ranks)
    finally:
        processes = multiprocessing.active_children()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_LEAVE_SECONDS)
            process.kill()


def _await(ranks: Any) -> None:
    from torch.multiprocessing.spawn import ProcessException

    try:
        while not ranks.join():
            pass
    except ProcessException as error:
        raise DemoFailed(f"trainer rank {error.error_index} failed: {error}") from None


def _leave(*_: object) -> None:
    """Ends a rank and what it has started, once: Ctrl-C sends a signal to every process of a
    terminal, and then the launcher ends the ranks."""
    for number in _ENDING:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _rank(rank: int, settings: Settings, folder: Path) -> None:
    """Main function of one trainer process."""
    import torch

    from wsync.demo.trainer import train

    for number in _ENDING:
        signal.signal(number, _leave)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    facts = train(rank, settings, folder)
    if rank == 0:
        (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
