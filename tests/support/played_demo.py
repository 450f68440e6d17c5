"""`python -m support.played_demo ...` is `wsync demo ...` on GPUs that tests/fakecuda plays: each
trainer rank has one, where its weights lie, and each engine worker has one of those after."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support import forked_demo
from support import remote_nccl_cases as cases
from support.played_gpu import by_handle, placed

import wsync
from wsync.demo import launcher, two_engines
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.layout import TrainerLayout

_run_rank = launcher._rank


def _rank(rank: int, settings: launcher.Settings, folder: Path) -> None:
    """Main function of a trainer process, which sees its own GPU alone."""
    os.environ |= {"WSYNC_FAKE_CUDA_FIRST": str(rank), "WSYNC_FAKE_CUDA_DEVICES": "1"}
    layout, free = wsync.megatron.layout, itertools.count(settings.ranks)

    def on_gpu(*arguments: Any) -> TrainerLayout:
        return placed(layout(*arguments), by_handle)

    with (
        mock.patch.object(wsync.megatron, "layout", on_gpu),
        mock.patch.object(two_engines, "serve_in_process", functools.partial(_serve, free)),
    ):
        _run_rank(rank, settings, folder)


def _serve(free: Iterator[int], config: Any, **options: Any) -> ServerProcess:
    with mock.patch.dict(os.environ, cases.all_gpus(), WSYNC_DEVICE=f"cuda:{next(free)}"):
        return serve_in_process(config, **options)


if __name__ == "__main__":
    launcher._rank = _rank
    sys.exit(forked_demo.main())
