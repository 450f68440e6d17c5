"""Run as a script in the environment of SGLang's server: forks servers that have imported what they
need, and whose own processes are forked, too.

Each line of the input is a JSON list: the file for what a server writes, then its arguments.  It
is answered with the process's number.  Nobody asks for their statuses.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys

_NEEDED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "wsync.sglang",
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    for name in _NEEDED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            serve(log, arguments, theirs)
        os.close(theirs)
        os.read(ours, 1)  # until it has its session, or has ended
        os.close(ours)
        print(child, flush=True)


def serve(log: str, arguments: list[str], begun: int) -> None:
    """The rest of a server's life."""
    status = 1
    try:
        os.setsid()
        os.write(begun, b"y")
        os.closerange(3, 1 << 10)  # the pipes of this and of the nursery
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
            os.dup2(opened, number)
        workers = int(arguments[arguments.index("--tp-size") + 1])
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
        chosen = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda *_, **__: chosen("fork", force=True)
        sys.modules.pop("sglang.launch_server")
        sys.argv = ["sglang.launch_server", *arguments]
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
