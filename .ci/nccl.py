"""nccl.py ROOT CACHE PROGRAM: wsync's table of NCCL's functions is that of the releases below.

PROGRAM (tests/c/nccl_probe.c) loads each library as wsync does and asks what needs no GPU.  The
declarations are compared with its nccl.h by the compiler (tests/c/nccl_abi.c), which must also find
what is planted.  What is missing comes from PyPI and is kept in CACHE.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import headers
import wheels

# The one that torch 2.11 brings, and a later one.
RELEASES = ("nvidia-nccl-cu13==2.28.9", "nvidia-nccl-cu13==2.32.3")
HEADER = "comm/nccl_library.h"
# All that nccl.h takes from CUDA.
CUDA = {
    "cuda_runtime.h": """#include <stddef.h>
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
""",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
}
# What is planted in wsync's header, and what the compiler must then say.
PLANTS = (
    ("WSYNC_NCCL_IN_PROGRESS = 7", "WSYNC_NCCL_IN_PROGRESS = 8", "WSYNC_NCCL_IN_PROGRESS is not"),
    ("char bytes[128]", "char bytes[120]", "sizeof(wsync_nccl_id_t) is not"),
    ("    int traffic_class;\n", "", "traffic_class"),
    ("    int max_ctas;\n", "    unsigned max_ctas;\n", "max_ctas has another type"),
    ("(const void *data, size_t count,", "(const void *data, int count,", "ncclSend"),
    ("int root, wsync_nccl_comm_t comm", "wsync_nccl_comm_t comm", "ncclBroadcast"),
)
WORDS = {0: "no error", 1: "cuda", 2: "system", 3: "internal", 4: "argument", 5: "usage",
         6: "remote", 7: "in progress"}  # fmt: skip


def release(name: str, cache: Path) -> Path:
    """A release's folder, with lib and include."""
    return wheels.install(name, cache) / "nvidia/nccl"


def probe(program: Path, nccl: Path) -> list[tuple[str, str]]:
    """What the program says: the first word of each line, and the rest of it."""
    library = nccl / "lib/libnccl.so.2"
    environment = {name: text for name, text in os.environ.items() if "NCCL" not in name}
    done = subprocess.run(
        [program, library],
        env=environment | {"NCCL_SOCKET_IFNAME": "lo"},  # there may be no other
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode != 0:
        sys.exit(f"{library}: {done.stdout}{done.stderr}")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in done.stdout.splitlines()]


def entries(header: str) -> list[str]:
    """The functions of the table."""
    return re.findall(r"\b(nccl[A-Z]\w+),\s*\d+,", header)


def examine_library(answers: list[tuple[str, str]], nccl: Path) -> list[str]:
    """It is that of the header, and answers as wsync expects it."""
    code = re.search(r"NCCL_VERSION_CODE (\d+)", (nccl / "include/nccl.h").read_text())
    version = int(code.group(1)) if code else 0
    results = {rest[:1]: rest[2:] for word, rest in answers if word == "result"}
    wrong = []
    if ("version", str(version)) not in answers:
        wrong.append(f"version of the header {version}, of the library {answers[:1]}")
    if ("path", str(nccl / "lib/libnccl.so.2")) not in answers:
        wrong.append(f"another library: {answers[1]}")
    if ("id", "0") not in answers:
        wrong.append(f"ncclGetUniqueId failed: {answers[-1]}")
    for number, word in WORDS.items():
        if word not in results.get(str(number), ""):
            wrong.append(f"result {number}: no {word!r} in {results.get(str(number))!r}")
    return wrong


def main() -> int:
    root, cache, program = map(Path, sys.argv[1:])
    header = (root / "csrc" / HEADER).read_text()
    source = root / "tests/c/nccl_abi.c"
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in CUDA.items():
            (folder / file).write_text(text)
        for item in RELEASES:
            nccl = release(item, cache)
            complaints = examine_library(probe(program, nccl), nccl)
            folders = [root / "csrc", nccl / "include", folder]
            if said := headers.compile(source, folders):
                complaints.append(f"nccl.h:\n{said}")
            wrong += [f"{item}: {complaint}" for complaint in complaints]
        wrong += headers.planted(source, folders, HEADER, PLANTS)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    count = len(RELEASES) * len(entries(header))
    print(f"checked: {count} functions of {len(RELEASES)} releases, and {len(PLANTS)} plants")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
