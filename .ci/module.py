"""module.py MODULE BUILD: what the extension exports and links, and that no layer below Python
holds mutable globals."""

import subprocess
import sys
import tempfile
from pathlib import Path

# the second and third: functions that torch looks up (wsync/machine/exportable.py)
EXPORTS = {"PyInit__core", "wsync_exportable_alloc", "wsync_exportable_free"}
LIBRARIES = {"libc.so.6", "libdl.so.2", "libpthread.so.0"}
LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
LAYERS = ("core", "device", "ipc", "comm")
# of a process: its driver, GPUs and NCCL, filled once, how much pinned memory streams have taken,
# and sockets that its forks close
TABLES = {"cuda_driver.c.o", "cuda.c.o", "nccl_library.c.o"}
TABLES |= {"cuda_pageable_feed.c.o", "private_fd.c.o"}
MUTABLE = (".data", ".bss", ".tdata", ".tbss")


def output(*words: str | Path) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def exports(module: Path) -> set[str]:
    return {line.split()[-1] for line in output("nm", "-D", "--defined-only", module).splitlines()}


def needed(module: Path) -> set[str]:
    lines = output("readelf", "-d", module).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def mutable_sections(item: Path) -> list[str]:
    """Sections with writable content, `.data.rel.ro` (relocated constants) aside."""
    found = []
    for line in output("size", "-A", item).splitlines():
        words = line.split()
        if len(words) == 3 and words[1].isdigit() and int(words[1]) > 0:
            name = words[0]
            relocated = name.startswith(".data.rel.ro")
            if not relocated and any(name == m or name.startswith(m + ".") for m in MUTABLE):
                found.append(f"{name} ({words[1]} bytes)")
    return found


def control() -> bool:
    """The check must see a mutable global where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        item = Path(folder) / "planted.o"
        code = "static int count; int bump(void); int bump(void) { return ++count; }"
        subprocess.run(["gcc", "-x", "c", "-c", "-o", item, "-"], input=code, text=True, check=True)
        return bool(mutable_sections(item))


def main() -> int:
    module, build = Path(sys.argv[1]), Path(sys.argv[2])
    wrong = []
    if exports(module) != EXPORTS:
        wrong.append(f"{module}: exports {sorted(exports(module))}, not {sorted(EXPORTS)}")
    libraries = needed(module)
    if not libraries <= LIBRARIES:
        wrong.append(f"{module}: links {sorted(libraries - LIBRARIES)}")
    if not control():
        wrong.append("a planted mutable global was not seen")
    objects = 0
    for layer in LAYERS:
        items = sorted((build / "CMakeFiles" / f"wsync_{layer}.dir").rglob("*.o"))
        if not items:
            wrong.append(f"{layer}: no object files under {build}")
        objects += len(items)
        wrong += [
            f"{item}: {section}"
            for item in items
            if item.name not in TABLES
            for section in mutable_sections(item)
        ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"exports {sorted(exports(module))}, links {sorted(libraries)}")
    print(f"checked: {objects + 2} objects and tables")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
