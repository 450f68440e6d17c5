"""What processes take of the memory that they share."""

from __future__ import annotations

import re

import tqdm


def shared_nbytes(pid: int) -> int:
    """Resident bytes of shared memory that a process maps."""
    total, counts = 0, False
    with open(f"/proc/{pid}/smaps") as smaps:
        for line in smaps:
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                counts = "/memfd:" in line
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def lock_files() -> list[str]:
    """Makes the lock that every progress bar of tqdm has; the files of this process's locks."""
    tqdm.tqdm.get_lock()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return [line for line in maps if "/sem." in line and "(deleted)" not in line]
