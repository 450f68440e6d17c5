"""Processes of tests/support/nursery.py are as fresh ones are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import nursery

SHOW = """
import json, os, sys
sys.stdout.write(sys.stdin.readline())
print("told", file=sys.stderr)
found = sorted(os.listdir("/proc/self/fd"), key=int)
print(json.dumps([
    sys.argv, os.getcwd(), os.environ["WSYNC_SHOWN"], os.environ.get("WSYNC_HIDDEN"),
    found, __name__, "torch" in sys.modules, os.getppid() == 1,
]))
sys.exit(7)
"""


@pytest.mark.parametrize("start", [subprocess.Popen, nursery.Popen])
def test_a_process_has_what_it_is_given_and_no_more(start: Any, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "WSYNC_HIDDEN"}
    pipe = subprocess.PIPE
    with start(
        [sys.executable, "-P", "-c", SHOW, "one", "two"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=tmp_path,
        env={**environment, "WSYNC_SHOWN": "x"},
        text=True,
    ) as process:
        out, errors = process.communicate("hello\n", timeout=240)
    greeting, shown = out.splitlines()
    assert (process.returncode, greeting, errors) == (7, "hello", "told\n")
    words, folder, given, hidden, descriptors, name, preloaded, orphan = json.loads(shown)
    assert words == ["-c", "one", "two"]
    assert (folder, given, hidden) == (str(tmp_path), "x", None)
    assert descriptors == ["0", "1", "2", "3"]  # the last lists them
    assert (name, preloaded, orphan) == ("__main__", start is nursery.Popen, False)


def test_a_process_that_is_killed_or_raises_says_so() -> None:
    process = nursery.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(240) == process.poll() == -signal.SIGKILL
    process.terminate()  # nobody any more
    assert process.stdin is not None
    process.stdin.close()
    done = nursery.run([sys.executable, "-P", "-c", "raise ValueError(3)"], timeout=240)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: 3\n")


def test_another_command_is_started_as_it_stands(tmp_path: Path) -> None:
    assert nursery.run(["echo", "word"], timeout=240).stdout == "word\n"
    code = "import sys; print('torch' in sys.modules)"
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        environment = {**os.environ, name: str(tmp_path)}
        done = nursery.run([sys.executable, "-P", "-c", code], timeout=240, env=environment)
        assert done.stdout == "False\n"
