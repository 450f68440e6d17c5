"""Builds tests/fakecuda and a stand-in for NVRTC for Python tests, and reads the log of calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent.parent
_OPTIONS = ("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-w", "-fvisibility=hidden")
UPLOADED = "bytes uploaded"
REFUSED = "refused"


def environment(folder: Path, *, devices: int = 1) -> dict[str, str]:
    """What makes processes use the stand-ins; they and all files lie in the folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in libcuda.so.1 with")
    folders = [f"-I{_TESTS.parent / 'csrc'}", f"-I{_TESTS / 'c'}", f"-I{_TESTS}"]
    sources = [*sorted((_TESTS / "fakecuda").glob("*.c")), _TESTS / "c" / "kernel_host.c"]
    driver, nvrtc = folder / "libcuda.so.1", folder / "libnvrtc.so"
    subprocess.run([compiler, *_OPTIONS, *folders, *sources, "-o", driver, "-lpthread"], check=True)
    compiling = [compiler, *_OPTIONS, _TESTS / "c" / "fake_nvrtc.c", "-o", nvrtc]
    subprocess.run(compiling, check=True)
    return {
        "WSYNC_CUDA_LIB": str(driver),
        "WSYNC_NVRTC_LIB": str(nvrtc),
        "WSYNC_DEVICE": "cuda:0",
        "WSYNC_FAKE_CUDA_DEVICES": str(devices),
        "WSYNC_FAKE_CUDA_PAGEABLE": "1",
        "WSYNC_FAKE_CUDA_LOG": str(folder / "calls"),
        "WSYNC_FAKE_CUDA_SIZES": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def position() -> int:
    """Where the log of calls ends now."""
    return os.path.getsize(os.environ["WSYNC_FAKE_CUDA_LOG"])


def calls(begin: int) -> dict[int, Counter[str]]:
    """Calls of each process since then, by name; contexts are pushed and popped around most."""
    counts: dict[int, Counter[str]] = {}
    with open(os.environ["WSYNC_FAKE_CUDA_LOG"], encoding="ascii") as log:
        log.seek(begin)
        for line in log:
            pid, call, *rest = line.split()
            count = counts.setdefault(int(pid), Counter())
            if call == "size":
                count[UPLOADED] += int(rest[0])
            elif not call.startswith("cuCtx"):
                count[call] += 1
    return counts
