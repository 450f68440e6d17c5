"""tests/fakecuda as a shared object, for processes that take it for libcuda.so.1, with stand-ins
for NVRTC and NCCL; and the log of what such processes have called."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.engines import cache_folder

_TREE = Path(__file__).resolve().parents[2]
_OPTIONS = ("-std=c11", "-O1", "-fvisibility=hidden", "-fPIC", "-shared", "-D_GNU_SOURCE")
UPLOADED = "bytes uploaded"


def _built(name: str, sources: Sequence[Path], used: Sequence[Path], *options: str) -> str:
    """Where the library lies, built when its sources have changed; skips without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler to build {name} with")
    contents = (path.read_bytes() for path in sorted({*used, *sources}))
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    target = cache_folder() / f"{name}-{digest[:16]}.so"
    if not target.exists():
        folders = [f"-I{_TREE / 'csrc'}", f"-I{_TREE / 'tests/c'}"]
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            built = Path(folder) / name
            command = [compiler, *_OPTIONS, *options, *folders, *sources]
            command += ["-o", built, "-pthread", "-ldl"]
            subprocess.run(command, check=True, timeout=300)
            built.rename(target)
    return str(target)


@functools.cache
def fake_driver() -> str:
    """Where the driver lies."""
    sources = [*sorted(_TREE.glob("tests/fakecuda/*.c")), _TREE / "tests/c/kernel_host.c"]
    used = [*_TREE.glob("tests/fakecuda/*.h"), *_TREE.glob("csrc/device/*")]
    used += [_TREE / "csrc/core/base/status.h", _TREE / "tests/c/kernel_host.h"]
    return _built("libfakecuda", sources, used)


@functools.cache
def fake_nvrtc() -> str:
    return _built("libfakenvrtc", [_TREE / "tests/c/fake_nvrtc.c"], [])


@functools.cache
def fake_nccl() -> str:
    """Where tests/fakenccl lies."""
    sources = sorted(_TREE.glob("tests/fakenccl/*.c"))
    used = [*_TREE.glob("tests/fakenccl/*.h"), *_TREE.glob("tests/fakecuda/*.h")]
    used += [_TREE / "csrc/comm/nccl_library.h", _TREE / "csrc/device/cuda_driver.h"]
    return _built("libfakenccl", sources, used)


def fake_environment(**settings: str) -> dict[str, str]:
    """The environment of a process on the fake; see fakecuda.h for settings."""
    return {**os.environ, "WSYNC_CUDA_LIB": fake_driver(), **settings}


def coherent(*, devices: int = 1) -> dict[str, str]:
    """Settings with which weights in host memory are moved through a GPU that reads all of it."""
    return {
        "WSYNC_CUDA_LIB": fake_driver(),
        "WSYNC_NVRTC_LIB": fake_nvrtc(),
        "WSYNC_DEVICE": "cuda:0",
        "WSYNC_FAKE_CUDA_DEVICES": str(devices),
        "WSYNC_FAKE_CUDA_MEMORY": str(4 << 30),
        "WSYNC_FAKE_CUDA_PAGEABLE": "1",
    }


def logged(folder: Path, *, devices: int = 1) -> dict[str, str]:
    """The same with a log of all calls, and kernels compiled anew."""
    return {
        **coherent(devices=devices),
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
            elif call not in ("cuCtxPushCurrent", "cuCtxPopCurrent"):
                count[call] += 1
    return counts
