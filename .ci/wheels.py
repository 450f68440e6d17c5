"""Packages of NVIDIA's on PyPI, each installed into a folder of its own in the cache."""

import shutil
import subprocess
import sys
from pathlib import Path

PIP_INSTALL = (sys.executable, "-m", "pip", "install", "-qq", "--no-deps")


def install(name: str, cache: Path) -> Path:
    """The folder that holds it."""
    folder = cache / name.replace("==", "-")
    with open(cache / "lock", "ab") as lock:  # as `locked` of .ci/run: others share the cache
        number = lock.fileno()
        subprocess.run(["flock", "-w", "900", str(number)], pass_fds=[number], check=True)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([*PIP_INSTALL, "--target", folder, name], check=True)
            (folder / "complete").touch()
    return folder
