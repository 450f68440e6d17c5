"""What processes take of the memory that they share."""

from __future__ import annotations

import re


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
