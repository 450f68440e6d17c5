"""What only GPUs can show, in the order in which to try it on a new machine.

The table in benchmarks/README.md is made of this list:

    python -c "from benchmarks import gpu_checks; print(gpu_checks.table())"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

GPU_TESTS = "python -P -m pytest -m gpu tests/test_gpu.py"
MULTIGPU_TESTS = "python -P -m pytest -m multigpu tests/test_multigpu.py"
GPU = "python -m benchmarks gpu --only"
NCCL = "python -m benchmarks nccl"

Row = dict[str, Any]
Finding = tuple[str, bool]  # a figure, and whether it is within the threshold


@dataclass(frozen=True)
class Done:
    """What a command has left; plain: the rows that it had without its settings."""

    status: int
    output: str
    rows: list[Row] = field(default_factory=list)
    plain: list[Row] = field(default_factory=list)


Judge = Callable[[Done], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """command: from the repository root; otherwise: what to do if the threshold is missed."""

    what: str
    command: str
    threshold: str
    otherwise: str
    gpus: int = 1
    judge: Judge | None = None  # besides the command's exit status

    @property
    def plain_command(self) -> str:
        """Without settings of the environment in front."""
        return re.sub(r"^(\w+=\S+ )+", "", self.command)


# --- judges --------------------------------------------------------------------------------------


def passes(done: Done) -> Iterator[Finding]:
    """pytest's last line: tests that are skipped show nothing."""
    last = done.output.strip().rpartition("\n")[2]
    yield last, "passed" in last and "failed" not in last and "error" not in last


def found(*names: str) -> Judge:
    """Lines of `wsync doctor`."""

    def judge(done: Done) -> Iterator[Finding]:
        for name in names:
            line = re.search(rf"^{name} +(found|missing) .*", done.output, re.MULTILINE)
            yield (line[0], line[1] == "found") if line else (f"no line of {name}", False)

    return judge


def rows(case: str, figure: Callable[[Row], float], low: float, high: float = math.inf) -> Judge:
    """A figure of every row whose case has this in its name lies between two."""

    def judge(done: Done) -> Iterator[Finding]:
        chosen = [row for row in done.rows if case in row["case"]]
        for row in chosen:
            value = figure(row)
            yield f"{row['case']}: {value:.3g}", low <= value <= high
        if not chosen:
            yield f"no row of {case!r}", False

    return judge


def beside(case: str, name: str, low: float, high: float = math.inf) -> Judge:
    """The same of a field, as a multiple of what it is without the command's settings."""

    def judge(done: Done) -> Iterator[Finding]:
        plain = {row["case"]: row[name] for row in done.plain}
        if not plain:
            yield "nothing to compare with: run all, or the command without its settings", False
            return
        yield from rows(case, lambda row: row[name] / plain[row["case"]], low, high)(done)

    return judge


def both(*judges: Judge) -> Judge:
    def judge(done: Done) -> Iterator[Finding]:
        for each in judges:
            yield from each(done)

    return judge


def _milliseconds(name: str) -> Callable[[Row], float]:
    return lambda row: 1e3 * float(row["times"][name])


def share_of(**goals: float) -> Callable[[Row], float]:
    """Of the bytes per second that an update is to reach, by the kind of GPU."""

    def figure(row: Row) -> float:
        goal = next((goal for name, goal in goals.items() if name in row["device"]["name"]), 0.0)
        return float(row["bytes"]) / row["seconds"] / goal if goal else math.inf

    return figure


def _share_of_bus(row: Row) -> float:
    return float(row["busbw"]) / max(row["bare_busbw"], row["peer_busbw"])


def _returned(row: Row) -> float:
    return float(row["returned_nbytes"]) / row["bytes"]


CHECKS = (
    Check(
        "the driver is one that wsync can use, and NVRTC is there",
        "wsync doctor",
        "its rows of both say found",
        "do what the row says",
        judge=found("GPU driver", "NVRTC"),
    ),
    Check(
        "the compiled kernels move and quantise every byte as the host does",
        f'{GPU_TESTS} -k "kernels or codes"',
        "passes",
        "nothing below counts until it does",
        judge=passes,
    ),
    Check(
        "the kernels touch no byte that is not theirs",
        f"compute-sanitizer --tool memcheck --error-exitcode 9 {GPU_TESTS} -k kernels",
        "passes, with 0 errors",
        "nothing below counts until it does",
        judge=passes,
    ),
    Check(
        "streams of two processes wait for each other's words, round after round",
        f"{GPU_TESTS} -k thousand",
        "passes",
        "the order of csrc/device/cuda_stream.c is wrong on this driver: host waits",
        judge=passes,
    ),
    Check(
        "memory of `wsync.exportable()` is mapped by others, and goes back to the driver",
        f"{GPU_TESTS} -k exportable",
        "passes",
        "do without the block: rings need none",
        judge=passes,
    ),
    Check(
        "weights are read in place out of torch's own memory",
        f"{GPU_TESTS} -k copied_out",
        "passes",
        '`Options(delivery="direct")` is not for this driver',
        judge=passes,
    ),
    Check(
        "all else: torch's streams, paused memory, torch's own buckets, backups, a killed engine",
        GPU_TESTS,
        "passes",
        "what the test says",
        judge=passes,
    ),
    Check(
        "memory is shared as fast as it is made",
        f"{GPU} memory",
        "1 GiB made in 3 ms, mapped in 1 ms",
        "`Options(park=True)` costs that much more",
        judge=both(
            rows("1024 MiB made and mapped", _milliseconds("make"), 0, 3),
            rows("1024 MiB made and mapped", _milliseconds("map"), 0, 1),
        ),
    ),
    Check(
        "a stream that waits lets the other process have the GPU",
        f"{GPU} order",
        "a turn with 4 KiB takes less than 1 ms",
        "the wait keeps its time slice: rounds of 1 GiB, MPS, or direct delivery",
        judge=rows("a turn with 4 KiB", lambda row: 1e3 * float(row["seconds"]), 0, 1),
    ),
    Check(
        "one channel, as Megatron sets it, holds no waiting stream up",
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {GPU} order",
        "`seconds` at most 1.5 times those without",
        "priorities do not give streams channels of their own on this driver",
        judge=beside("a turn with", "seconds", 0, 1.5),
    ),
    Check(
        "the copy kernel is bound by memory",
        f"{GPU} copy",
        "`ratio` of long runs and a layer at least 0.9, of rows of 192 B 0.75, of longer ones 0.85",
        "compare the rows of pack and unpack: prefetches of 128 B, loads in flight",
        judge=both(
            rows("two long runs", lambda row: row["ratio"], 0.9),
            rows("a layer of", lambda row: row["ratio"], 0.9),
            *(rows(f"rows of {n} B", lambda row: row["ratio"], 0.85) for n in (256, 384, 512, 768)),
            rows("rows of 192 B", lambda row: row["ratio"], 0.75),
        ),
    ),
    Check(
        "the kernel that quantises is bound by memory",
        f"{GPU} quantise",
        "`ratio` of each at least 0.85",
        "registers and loads of the kernel of that method",
        judge=rows("quantise:", lambda row: row["ratio"], 0.85),
    ),
    Check(
        "updates between two processes on one GPU reach their goal, every byte right",
        f"{GPU} update",
        "with rounds of 1 GiB at least 763 GB/s on an H200 (61 GB in 80 ms), 460 on an H100",
        "`phases` of the row; the turns and the copies above",
        judge=rows(", 1024 MiB", share_of(H200=61.06e9 / 0.080, H100=38.6e9 / 0.084), 1),
    ),
    Check(
        "what is read in place moves once",
        f"{GPU} update",
        "direct at least 1,527 GB/s on an H200 (61 GB in 40 ms), 1,103 on an H100",
        "`phases` of the row; the copy kernel above",
        judge=rows(", direct", share_of(H200=61.06e9 / 0.040, H100=38.6e9 / 0.035), 1),
    ),
    Check(
        "NCCL is found, the one that torch has loaded",
        "wsync doctor",
        "its NCCL row names torch's file",
        "have WSYNC_NCCL_LIB name the file",
        2,
        judge=found("NCCL"),
    ),
    Check(
        "real kernels, channels and peers move every byte",
        NCCL,
        "exit status 0",
        '`Options(exchange="gloo")`, and a report',
        2,
    ),
    Check(
        "rounds fill the bus",
        NCCL,
        '`busbw` of each "moved" at least 0.9 of `bare_busbw`, and of `peer_busbw`',
        "larger rounds, more thread blocks",
        2,
        judge=rows(": moved", _share_of_bus, 0.9),
    ),
    Check(
        "the host's work stays small with real drivers",
        NCCL,
        '`ratio` of each "processor of a round" at least 3',
        "a profile of the thread that calls NCCL",
        2,
        judge=rows(": processor of a round", lambda row: row["ratio"], 3),
    ),
    Check(
        "a parked exchange gives its staging back",
        NCCL,
        "all of the staging came back; the next update at most 1.5 times the usual",
        "a profile of the first round",
        2,
        judge=both(
            rows("after it was parked", _returned, 1),
            rows("after it was parked", lambda row: 1 / row["ratio"], 0, 1.5),
        ),
    ),
    Check(
        "16 thread blocks are enough (`maxCTAs`)",
        f"NCCL_MAX_CTAS=32 {NCCL}",
        "`busbw` at most 1.05 times that without it",
        "raise it in csrc/comm/nccl_communicator.c",
        2,
        judge=beside(": moved", "busbw", 0, 1.05),
    ),
    Check(
        "one channel, as Megatron sets it, blocks nothing",
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {NCCL}",
        'it ends; `seconds` of "moved" at most 1.1 times',
        "a stream of another priority for NCCL",
        2,
        judge=beside(": moved", "seconds", 0, 1.1),
    ),
    Check(
        "it works as slime and SGLang run it",
        f"NCCL_CUMEM_ENABLE=0 {NCCL}",
        "exit status 0; `busbw` at least 0.9 of that without it",
        "name it among the limits",
        2,
        judge=beside(": moved", "busbw", 0.9),
    ),
    Check(
        "a killed rank ends the update for all others, and leaves no kernel that waits for it",
        f"{MULTIGPU_TESTS} -k killed",
        "passes: one error that names the rank, within 30 s of a deadline of 20",
        "what the test says",
        2,
        judge=passes,
    ),
    Check(
        "torch's NCCL broadcasts to engines as they are, straight from memory of the GPU",
        f"{MULTIGPU_TESTS} -k broadcasts",
        "passes: every byte right, no memory of the host",
        "what the test says",
        2,
        judge=passes,
    ),
)


def table() -> str:
    """In Markdown."""
    lines = ["| | GPUs | what | command | threshold | if it is missed |", "| --- " * 6 + "|"]
    for number, check in enumerate(CHECKS, 1):
        cells = check.what, f"`{check.command}`", check.threshold, check.otherwise
        lines.append(f"| {number} | {check.gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)
