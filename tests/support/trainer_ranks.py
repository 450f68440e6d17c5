"""A Megatron trainer with known weights, on the ranks of support.procs.Ranks.

    with Ranks(4, path=sys.path) as ranks:
        pids = ranks.run(trainer_ranks.start, 2, 2)
        errors = ranks.run(trainer_ranks.connect, urls, {"deadline": 3.0})
        errors = ranks.run(trainer_ranks.update, 7)

Every function runs on all ranks.  Errors are what each rank has been told, "" if nothing went
wrong; what is no error of wsync's is raised.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support import known_weights, megatron_cases

import wsync
from wsync import megatron
from wsync.demo import megatron_cpu

SLOW_SECONDS = 30.0  # then a rank writes where it is to its standard error


class _Rank:
    """What this process has, from `start` to its end."""

    def __init__(self, tp: int, pp: int) -> None:
        megatron_cases.use_cpu()
        parallel = megatron_cpu.Parallel(tp=tp, pp=pp)
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(megatron_cpu.groups(parallel))
        with wsync.exportable():  # for connections that read in place
            self.trainer = megatron_cpu.build(known_weights.config(), parallel)
        self.layout = megatron.layout(self.trainer.chunks, self.trainer.hf)
        self.sync: wsync.Sync | None = None


_ranks: list[_Rank] = []


def start(tp: int, pp: int) -> int:
    """Builds the model; the id of this process."""
    _ranks[:] = [_Rank(tp, pp)]
    return os.getpid()


def connect(engines: Sequence[str], options: Mapping[str, Any]) -> str:
    """Connects to engines, and gives up those of before."""
    (here,) = _ranks

    def renew() -> None:
        close()
        here.sync = wsync.connect(here.layout, engines, options=wsync.Options(**options))

    return _error_of(renew)


def update(version: int) -> str:
    """Gives the model the weights of a version, and the engines the model's."""
    (here,) = _ranks
    assert here.sync is not None
    megatron_cases.fill(here.trainer, known_weights.weights(version))
    sync = here.sync
    return _error_of(lambda: sync.update(version=version))


def close() -> None:
    (here,) = _ranks
    sync, here.sync = here.sync, None
    if sync is not None:
        sync.close()


def _error_of(call: Callable[[], object]) -> str:
    faulthandler.dump_traceback_later(SLOW_SECONDS)
    try:
        call()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return ""
