"""`python -m support.forked_demo ...` is `wsync demo ...` whose processes are all forked: those of
the trainer from this one, the engines' by the nursery that this one comes from."""

from __future__ import annotations

import functools
import importlib
import sys
from multiprocessing import forkserver
from typing import Any

from support import nursery

import wsync.demo.preload  # noqa: F401 (what trainers are forked with)
from wsync.demo import cli


def main() -> int:
    """The demo's exit status."""
    nursery.install()
    # the module: torch.multiprocessing has a function of the same name
    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")
    start = spawn.start_processes

    @functools.wraps(start)
    def forked(*arguments: Any, **options: Any) -> Any:
        return start(*arguments, **{**options, "start_method": "fork"})

    spawn.start_processes = forked
    forkserver.ensure_running = lambda: None
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
