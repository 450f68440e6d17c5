"""SGLang's own FlattenedTensorBucket, without SGLang's dependencies.

`sglang/srt/weight_sync/tensor_bucket.py` needs torch alone.  It is taken from an installed sglang,
else from a wheel that `pip download --no-deps` puts into the cache of the tests, and run as this
module's own code, so that its classes can be pickled between processes.  Where neither works, the
same work is done by a class of this file, and ORIGIN says so.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VERSION = "0.5.17"
_FILE = "sglang/srt/weight_sync/tensor_bucket.py"


def _installed() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder).parent / _FILE
        if path.is_file():
            return path
    return None


def _downloaded() -> Path | None:
    cache = Path(os.environ.get("WSYNC_TEST_CACHE") or "~/.cache/wsync-tests").expanduser()
    tree = cache / f"sglang-{VERSION}"
    if (tree / _FILE).is_file():
        return tree / _FILE
    alone = cache / f"sglang-{VERSION}-tensor_bucket.py"
    if alone.is_file():
        return alone
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
        try:
            subprocess.run(
                [*command, f"sglang=={VERSION}"], check=True, capture_output=True, timeout=240
            )
            wheel = next(Path(folder).glob("*.whl"))
            source = zipfile.ZipFile(wheel).read(_FILE)
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError):
            return None
    cache.mkdir(parents=True, exist_ok=True)
    alone.write_bytes(source)
    return alone


@dataclass
class _Metadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _CatBucket:
    """Flattens with one torch.cat and hands out views, as SGLang's class does."""

    def __init__(
        self,
        named_tensors: list[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: list[Any] | None = None,
    ) -> None:
        if named_tensors is None:
            assert flattened_tensor is not None and metadata is not None
            self.flattened_tensor, self.metadata = flattened_tensor, metadata
            return
        parts = [tensor.flatten().view(torch.uint8) for _, tensor in named_tensors]
        self.metadata, end = [], 0
        for (name, tensor), part in zip(named_tensors, parts, strict=True):
            start, end = end, end + part.numel()
            entry = _Metadata(name, tensor.shape, tensor.dtype, start, end, part.numel())
            self.metadata.append(entry)
        self.flattened_tensor = torch.cat(parts)

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list[Any]:
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        flat = self.flattened_tensor
        return [
            (m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
            for m in self.metadata
        ]


FlattenedTensorBucket: Any = _CatBucket
FlattenedTensorMetadata: Any = _Metadata
ORIGIN = "torch.cat in the manner of SGLang"

_path = _installed() or _downloaded()
if _path is not None:
    exec(compile(_path.read_text(), str(_path), "exec", dont_inherit=True), globals())
    ORIGIN = "SGLang's FlattenedTensorBucket"


def pose() -> None:
    """Lets pickles that name SGLang's module find these classes in this process."""
    *parents, name = itertools.accumulate(_FILE.removesuffix(".py").split("/"), "{}.{}".format)
    for parent in parents:
        sys.modules.setdefault(parent, types.ModuleType(parent))
    sys.modules.setdefault(name, sys.modules[__name__])
