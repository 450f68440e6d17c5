"""What slime's patched SGLang does with versions that hold only changes, written anew from
docs/en/advanced/delta-weight-sync.md of slime 624b824."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def pull(copy: Path, source: Path, number: int) -> list[int]:
    """Brings a host's copy up to a version; returns the versions that it took for that.  The copy's
    file `applied` has the number that it is at; a copy never goes back."""
    state = copy / "applied"
    at = int(state.read_text()) if state.exists() else None
    first = number
    while first > (at or 0) and "delta_encoding" in metadata(source, first):
        first -= 1
    if at is None or first > at:
        assert first > 0, "the versions before are not there"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder(source, first), copy)
        state.write_text(str(first))
        taken = [first]
    else:
        first, taken = at, []
    for each in range(first + 1, number + 1):
        apply(copy, folder(source, each))
        state.write_text(str(each))
        taken.append(each)
    return taken


def folder(source: Path, number: int) -> Path:
    return source / f"weight_v{number:06d}"


def metadata(source: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(source, number) / INDEX).read_text())["metadata"]
    return found


def places(copy: Path) -> dict[str, tuple[Path, int, int]]:
    """Where each tensor's bytes are: file, first byte, end."""
    found = {}
    for path in copy.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, facts in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, end = facts["data_offsets"]
                found[name] = path, begin + first, begin + end
    return found


def apply(copy: Path, version: Path) -> None:
    index = json.loads((version / INDEX).read_text())
    facts, where = index["metadata"], places(copy)
    assert (facts["delta_encoding"], facts["compression_format"]) == ("xor", "zstd")
    assert facts["checksum_format"] == "adler32"
    assert int(facts["base_version"]) == int((copy / "applied").read_text())
    assert int(facts["version"]) == int(version.name.removeprefix("weight_v"))
    files = {path.name for path in version.glob("*.safetensors")}
    assert {*index["weight_map"].values()} == files
    for path in map(version.joinpath, files):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                assert index["weight_map"][name] == path.name
                frame = file.get_tensor(name).tobytes()
                # as SGLang reads it: one frame
                change = zstandard.ZstdDecompressor().decompress(frame)
                target, begin, end = where[name]
                whole = np.memmap(target, np.uint8, "r+")
                whole[begin:end] ^= np.frombuffer(change, np.uint8)
                assert f"{zlib.adler32(whole[begin:end]):08x}" == file.metadata()[name], name
                whole.flush()
