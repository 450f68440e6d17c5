"""What every trainer rank and engine worker did in one update, as wsync.machine.trace writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(folder: Path, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The last update of every process, trainer ranks first; names are those of process ids."""
    records = []
    for path in folder.glob("*.jsonl"):
        record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        pid, rank = record["pid"], record["rank"]
        known = names.get(pid, f"engine process {pid}, worker {rank}")
        record["name"] = f"trainer rank {rank}" if record["role"] == "trainer" else known
        records.append(record)
    last = max((record["update"] for record in records), default=0)
    records = [record for record in records if record["update"] == last]
    return sorted(records, key=lambda r: (r["role"] != "trainer", r["rank"], r["name"]))
