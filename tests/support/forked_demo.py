"""`python -m support.forked_demo ...` is `wsync demo ...` whose processes are all forked: those of
the trainer from this one, the engines' by the nursery that this one comes from."""

from __future__ import annotations

import multiprocessing
import sys

from support import nursery

import wsync.demo.preload  # noqa: F401 (what trainers are forked with)
from wsync.demo import cli, launcher

if __name__ == "__main__":
    nursery.install()
    launcher._forked = lambda: multiprocessing.get_context("fork")
    sys.exit(cli.main(sys.argv[1:]))
