"""tests/fakecuda as a shared object, for processes that take it for libcuda.so.1."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.engines import cache_folder

_TREE = Path(__file__).resolve().parents[2]


@functools.cache
def fake_driver() -> str:
    """Where it lies, built when its sources have changed; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build tests/fakecuda with")
    sources = [*sorted(_TREE.glob("tests/fakecuda/*.c")), _TREE / "tests/c/kernel_host.c"]
    used = [*_TREE.glob("tests/fakecuda/*.h"), *_TREE.glob("csrc/device/*"), *sources]
    used += [_TREE / "csrc/core/status.h", _TREE / "tests/c/kernel_host.h"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(used))).hexdigest()
    target = cache_folder() / f"libfakecuda-{digest[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            built = Path(folder) / "libfakecuda.so"
            options = [
                "-std=c11",
                "-O1",
                "-fvisibility=hidden",
                "-fPIC",
                "-shared",
                "-D_GNU_SOURCE",
                "-pthread",
            ]
            options += [f"-I{_TREE / 'csrc'}", f"-I{_TREE / 'tests/c'}"]
            subprocess.run([compiler, *options, "-o", built, *sources], check=True, timeout=300)
            built.rename(target)
    return str(target)


def fake_environment(**settings: str) -> dict[str, str]:
    """The environment of a process on the fake; see fakecuda.h for settings."""
    return {**os.environ, "WSYNC_CUDA_LIB": fake_driver(), **settings}
