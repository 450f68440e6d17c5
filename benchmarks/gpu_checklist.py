"""`gpu --checklist`: what only GPUs can show (gpu_checks.py), run and judged where there are GPUs
enough, each command once; elsewhere it is listed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_checks import CHECKS, Check, Done, Row
from wsync import UnsupportedError, _core

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0  # that a command may take


def run(number: int = 0, checks: Sequence[Check] = CHECKS) -> int:
    """All checks, or one; how many thresholds were missed."""
    if not 0 <= number <= len(checks):
        raise SystemExit(f"--checklist {number}: there are 1 to {len(checks)}")
    count, reason = _gpus()
    print(f"{count} GPUs" + (f": {reason}; nothing is run" if reason else ""))
    done: dict[str, Done] = {}
    missed = held = 0
    for index, check in enumerate(checks, 1):
        if number in (0, index):
            _show(index, check)
            if check.gpus <= count:
                good = _judged(check, done)
                missed, held = missed + (not good), held + good
    print(f"{held} held, {missed} missed")
    return missed


def _show(index: int, check: Check) -> None:
    needs = f" ({check.gpus} GPUs)" if check.gpus > 1 else ""
    print(f"\n{index}. {check.what}{needs}\n   {check.command}")
    print(f"   threshold: {check.threshold}\n   if it is missed: {check.otherwise}", flush=True)


def _judged(check: Check, done: dict[str, Done]) -> bool:
    """Whether all that the command finds, which is run if it has not been, is within bounds."""
    if check.command not in done:
        plain = done.get(check.plain_command)
        done[check.command] = _run(check.command, plain.rows if plain else [])
    result = done[check.command]
    findings = [(f"exit status {result.status}", result.status == 0)]
    if check.judge is not None:
        findings += check.judge(result)
    if result.status != 0:
        print(result.output[-2000:])
    for text, good in findings:
        print(f"   {'held' if good else 'MISSED'}: {text}", flush=True)
    return all(good for _, good in findings)


def _run(command: str, plain: list[Row]) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        file, full = Path(folder) / "rows.jsonl", command
        if " -m benchmarks " in command:
            full += f" --json {shlex.quote(str(file))}"
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment.pop("PYTHONSAFEPATH", None)
        process = subprocess.Popen(
            full,
            shell=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException as error:  # also what the user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output += f"\nended after {SECONDS:.0f} s"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return Done(process.returncode, output, [json.loads(line) for line in lines], plain)


def _gpus() -> tuple[int, str]:
    """How many this process sees, or why none can be used."""
    try:
        _, devices = _core.cuda_devices()
    except UnsupportedError as error:
        return 0, str(error)
    from benchmarks.gpu_device import FAKE  # needs torch, as the commands do

    if any(name.startswith(FAKE) for _, name, _, _ in devices):
        return 0, f"{devices[0][1]} is a stand-in"
    return len(devices), ""
