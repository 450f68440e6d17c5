"""The examples of docstrings, run; those of trainers in the processes of support.procs."""

from __future__ import annotations

import doctest
import inspect
import shlex
from collections.abc import Callable
from typing import Any

import torch
from support import guide
from support.tiny_qwen3 import dense, sums

import wsync

URL = "http://127.0.0.1:30000"  # what examples call an engine


def run(documented: object, url: str, **names: Any) -> dict[str, Any]:
    """Runs what stands behind >>> in a docstring, with these names; the names that there are then.
    Raises AssertionError where it does not do what the docstring says, or where there is none."""
    text = inspect.getdoc(documented) or ""
    parser = doctest.DocTestParser()
    given = {"wsync": wsync, **names}
    test = parser.get_doctest(text.replace(URL, url), given, str(documented), None, 0)
    said: list[str] = []
    done = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    assert done.attempted > 0, f"{documented}: no example"
    assert done.failed == 0, "".join(said)
    return test.globs


def command(function: object, program: str) -> list[str]:
    """The words of the command line in a docstring that begins with `program`."""
    text = (inspect.getdoc(function) or "").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.strip().startswith(program)]
    return shlex.split(line)


def _stepping(parameters: Callable[[], Any], rounds: list[int]) -> Callable[[object], None]:
    @torch.no_grad()
    def step(_: object) -> None:
        rounds.append(len(rounds))
        for parameter in parameters():
            parameter.mul_(1.5)

    return step


def megatron(url: str) -> tuple[list[float], dict[str, str]]:
    """On all ranks: what was logged, and the weights' checksums."""
    from support import hf_reference, megatron_cpu

    parallel = megatron_cpu.Parallel(tp=2)
    with megatron_cpu.groups(parallel):
        trainer = megatron_cpu.build(dense(), parallel)
        chunks, logged, steps = trainer.chunks, [], list[int]()

        def log(metrics: dict[str, float], step: int) -> None:
            logged.append(metrics["wsync/rounds"])

        guide.execute("Your own trainer", {URL: url}, model=chunks, hf_config=trainer.hf)
        step = _stepping(lambda: (p for chunk in chunks for p in chunk.parameters()), steps)
        names = {"chunks": chunks, "hf_config": trainer.hf, "train_step": step, "log": log}
        run(wsync.megatron, url, **names)
        assert steps == [0, 1]
        return logged, sums(hf_reference.hf_state_dict(chunks, trainer.hf))


def fsdp(url: str) -> dict[str, str]:
    """On all ranks: the weights' checksums."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(dense()).float()
    step = _stepping(model.parameters, [])
    after = run(wsync.fsdp, url, model=model, fully_shard=fully_shard, train_step=step)
    assert after["report"].version == "1"
    return sums({name: p.full_tensor() for name, p in model.state_dict().items()})
