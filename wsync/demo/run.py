"""Starts the demo's trainer processes and collects what they found."""

from __future__ import annotations

import math
import multiprocessing.context
import multiprocessing.forkserver
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from wsync.demo.sglang_files import how_to_get
from wsync.doctor import importable
from wsync.machine.environment import variable

MODES = ("colocated", "distributed", "mixed", "disk")
_START_SECONDS = 600.0


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
    engine: str = "transformers"
    engine_tp: int = 2
    engine_ep: int = 1
    engine_path: tuple[str, ...] = ()
    broadcast: str = "auto"
    layers: int = 4
    heads: int = 8
    query_groups: int = 4
    experts: int = 8

    def __post_init__(self) -> None:
        limits = {"tp": self.heads, "pp": self.layers, "ep": self.experts}
        limits |= {"engine_tp": self.heads, "engine_ep": self.engine_tp}
        for name, most in limits.items():
            size = getattr(self, name)
            if size < 1 or most % size:
                raise ValueError(f"{_option(name)} {size}: must divide {most}")
        for name in ("ep", "engine_ep"):
            if getattr(self, name) > 1 and self.model != "qwen3-moe":
                raise ValueError(
                    f"{_option(name)} {getattr(self, name)}: {self.model} has no experts"
                )
        if self.engine == "sglang" and self.mode not in ("colocated", "distributed"):
            raise ValueError(f"--engine sglang: not in mode {self.mode}")
        if self.broadcast != "auto" and self.mode not in ("distributed", "mixed"):
            raise ValueError(f"--broadcast {self.broadcast}: not in mode {self.mode}")
        if self.broadcast != "auto" and self.engine == "sglang":
            raise ValueError(f"--broadcast {self.broadcast}: not with --engine sglang")
        if self.updates < 1:
            raise ValueError(f"--updates {self.updates}: at least 1")

    @property
    def megatron(self) -> bool:
        return importable("megatron.core")

    @property
    def parallel(self) -> dict[str, int]:
        if not self.megatron:
            return {"tp": 1, "pp": 1, "ep": 1}
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep}

    @property
    def ranks(self) -> int:
        return self.pp * math.lcm(self.tp, self.ep) if self.megatron else 1

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
    if settings.engine == "sglang" and (lacking := _sglang_missing(settings.engine_path)):
        raise DemoFailed(lacking)
    missing = [
        name for name in ("torch", "transformers", "fastapi", "uvicorn") if not importable(name)
    ]
    if missing:
        raise DemoFailed(f"{', '.join(missing)}: not installed; wsync's extra [demo] brings it")
    if settings.megatron:
        print(
            f"trainer: megatron-core, {settings.model}, {settings.ranks} processes "
            f"(TP{settings.tp} x PP{settings.pp}, EP{settings.ep})",
            flush=True,
        )
    else:
        print(
            "trainer: megatron-core is not installed, so a plain torch trainer of one process "
            "(--tp, --pp and --ep do not apply)",
            flush=True,
        )
    context = _forked()
    with tempfile.TemporaryDirectory(prefix="wsync-demo-") as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        store = f"{folder}/store"
        try:
            for rank in range(settings.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, settings, store, theirs))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes)
        finally:
            _end(processes)


def _forked() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forked from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wsync.demo.preload"])
    with variable("PYTHONSAFEPATH", "1"):  # the current folder may be the source's
        multiprocessing.forkserver.ensure_running()
    return context


def _sglang_missing(path: Sequence[str]) -> str:
    """What keeps SGLang from being imported, here or from the folders of `path`; or nothing."""
    if PathFinder.find_spec("sglang", list(path)) or importable("sglang"):
        return ""
    return (
        "sglang is not installed.  Its Python files and what they import are enough here; in a "
        f"folder of their own they disturb nothing else:\n{how_to_get()}"
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _collect(pipes: list[Connection]) -> dict[str, Any]:
    """Waits for every rank; the first failure counts."""
    facts: dict[str, Any] = {}
    pending = dict(enumerate(pipes))
    deadline = time.monotonic() + _START_SECONDS
    while pending:
        if time.monotonic() > deadline:
            raise DemoFailed(f"ranks {sorted(pending)} did not finish in {_START_SECONDS:.0f} s")
        for rank, pipe in list(pending.items()):
            if pipe not in wait(list(pending.values()), timeout=0.2):
                continue
            try:
                kind, content = pipe.recv()
            except EOFError:
                raise DemoFailed(f"trainer rank {rank} died") from None
            if kind == "progress":
                print(content, flush=True)
                continue
            if kind == "error":
                raise DemoFailed(f"trainer rank {rank} failed:\n{content}")
            if kind == "lacking":
                raise DemoFailed(content)
            if rank == 0:
                facts = content
            del pending[rank]
    return facts


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.terminate()
            process.join(5)
        if process.is_alive():
            process.kill()


def _rank(rank: int, settings: Settings, store: str, results: Connection) -> None:
    """Main function of one trainer process."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    try:
        from wsync.demo.trainer import train

        def say(text: str) -> None:
            results.send(("progress", text))

        results.send(("facts", train(rank, settings, store, say)))
    except DemoFailed as error:
        results.send(("lacking", str(error)))
        raise SystemExit(1) from None
    except BaseException:
        results.send(("error", traceback.format_exc()))
        raise SystemExit(1) from None


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
