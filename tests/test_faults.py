"""Allocations and system calls of the extension that fail, as Python sees them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "support"
STRUCK = {
    *("malloc", "calloc", "realloc", "memfd_create", "fallocate", "ftruncate", "fstat", "fcntl"),
    *("mmap", "madvise", "pthread_create", "socket", "bind", "listen", "accept4", "connect"),
    *("getsockopt", "sendmsg", "recvmsg", "poll"),
}


def test_every_failure_of_an_update_is_an_exception_and_leaks_no_descriptor(
    tmp_path: Path,
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "wsync was built with a C compiler: where is it?"
    shim = tmp_path / "faults.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", shim, HERE / "faults.c"],
        check=True,
        timeout=120,
    )
    done = subprocess.run(
        [sys.executable, "-P", HERE / "faulty_update.py", shim],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONMALLOC": "pymalloc"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    count, *calls = done.stdout.split()
    assert int(count) > 150
    assert set(calls) == STRUCK
