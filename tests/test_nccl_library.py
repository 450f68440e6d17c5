"""NCCL as wsync finds it: `wsync doctor` says what is there, or in words why not."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import doctor, fakecuda

_ROOT = Path(__file__).resolve().parent.parent
_HEADER = (_ROOT / "csrc/comm/nccl_library.h").read_text(encoding="ascii")
# What the header's table names, which is all that a library of NCCL needs to have here.
_FUNCTIONS = re.findall(
    r"X\(.*?\b(nccl[A-Z]\w+),", _HEADER.partition("_MAP(X)")[2].partition("typedef")[0], re.DOTALL
)


def finding(library: str, **environment: str) -> tuple[bool, str]:
    return doctor.finding("NCCL", WSYNC_NCCL_LIB=library, **environment)


def build(
    folder: Path, *, version: int = 22809, result: int = 0, without: tuple[str, ...] = ()
) -> str:
    """A library that answers what it is asked when it is loaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in libnccl.so.2 with")
    answers = {
        "ncclGetVersion": f"int ncclGetVersion(int *v) {{ *v = {version}; return {result}; }}",
        "ncclGetErrorString": "char *ncclGetErrorString(int code) { return 0 * code + WORDS; }",
    }
    names = [name for name in _FUNCTIONS if name not in without]
    lines = [answers.get(name, f"int {name}(void) {{ return 3; }}") for name in names]
    source, target = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text('#define WORDS "in its words"\nint other;\n' + "\n".join(lines))
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([compiler, *options, "-o", target, source], check=True)
    return str(target)


def test_the_table_is_read_as_it_is_written() -> None:
    assert len(_FUNCTIONS) == 12
    assert "ncclBroadcast" in _FUNCTIONS


def test_a_library_is_named_with_its_version(tmp_path: Path) -> None:
    path = build(tmp_path)
    assert finding(path) == (True, f"2.28.9 ({path})")


def test_the_stand_in_for_nccl_is_found() -> None:
    library = fakecuda.fake_nccl()
    assert finding(library) == (True, f"2.29.7 ({library})")


def test_a_machine_without_the_library_is_told_where_it_was_looked_for() -> None:
    found, detail = finding("/nowhere/libnccl.so.2")
    assert not found
    assert detail.startswith("no NCCL (it is in the packages nvidia-nccl-cu12 and")
    assert "/nowhere/libnccl.so.2: cannot open shared object" in detail


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ({"version": 21703}, "is NCCL 2.17.3, wsync needs 2.18 or later"),
        ({"without": ("ncclGetVersion",)}, "is another library: it has no ncclGetVersion"),
        ({"without": ("ncclSend",)}, "(NCCL 2.28.9) has no ncclSend, which NCCL 2.7 has"),
        ({"result": 2}, "ncclGetVersion: in its words (2)"),
    ],
    ids=["old", "other", "lacking", "broken"],
)
def test_a_library_that_cannot_be_used_says_why(
    tmp_path: Path, library: dict[str, object], words: str
) -> None:
    path = build(tmp_path, **library)
    found, detail = finding(path)
    assert not found
    assert detail.startswith(f"no NCCL: {path}")
    assert words in detail


def test_the_wheels_come_before_the_system_s_library(tmp_path: Path) -> None:
    for name in ("wheel/nvidia/nccl/lib", "system"):
        (tmp_path / name).mkdir(parents=True)
    wheel = build(tmp_path / "wheel/nvidia/nccl/lib")
    system = build(tmp_path / "system", version=22000)
    folders = {"LD_LIBRARY_PATH": str(tmp_path / "system")}
    assert finding("", **folders) == (True, f"2.20.0 ({system})")
    folders["PYTHONPATH"] = str(tmp_path / "wheel")
    assert finding("", **folders) == (True, f"2.28.9 ({wheel})")


def test_one_that_is_loaded_comes_first_and_stays(tmp_path: Path) -> None:
    """Nothing is loaded before it is asked for; what was not found is looked for again."""
    (tmp_path / "wheel").mkdir()
    torch_s, wheel = build(tmp_path), build(tmp_path / "wheel", version=22000)
    code = f"""
import ctypes, wsync, wsync._core as core
assert "libnccl" not in open("/proc/self/maps").read()
try:
    core.nccl_library(["/nowhere/libnccl.so.2"])
except core.UnsupportedError as error:
    assert "/nowhere/libnccl.so.2: cannot" in str(error), error
else:
    raise AssertionError("found")
ctypes.CDLL({torch_s!r})
assert core.nccl_library([{wheel!r}]) == (22809, {torch_s!r})
assert core.nccl_library(libraries=["/nowhere"]) == (22809, {torch_s!r})
"""
    environment = {name: text for name, text in os.environ.items() if name != "WSYNC_NCCL_LIB"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
