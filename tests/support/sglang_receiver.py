"""Run as a script: unpickles weight-update payloads the way an SGLang server does.

    python sglang_receiver.py TREE      (a base64 payload a line in, a JSON object a line out)

`sglang.srt.utils.common` imports half an inference engine, so its unpickler and serialiser are
taken out of the real file and run alone; `sglang.srt.weight_sync.tensor_bucket` is imported as it
is.  Answers {"tensors": [[name, dtype, shape, sha256 of the bytes], ...]} or {"error": text}.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

WANTED = {"_safe_load_torch_storage", "SafeUnpickler", "MultiprocessingSerializer"}


def add_packages(tree: Path) -> None:
    """sglang's packages without their __init__ files."""
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        package = types.ModuleType(name)
        package.__path__ = [str(tree.joinpath(*name.split(".")))]
        sys.modules[name] = package


def load_serializer(tree: Path) -> Any:
    path = tree / "sglang" / "srt" / "utils" / "common.py"
    module = ast.parse(path.read_text(), str(path))
    module.body = [n for n in module.body if getattr(n, "name", None) in WANTED]
    found = {getattr(n, "name", "") for n in module.body}
    assert {"SafeUnpickler", "MultiprocessingSerializer"} <= found, f"{path} has {found}"
    names: dict[str, Any] = {
        "ForkingPickler": ForkingPickler,
        "io": io,
        "pickle": pickle,
        "pybase64": base64,
        "torch": torch,
    }
    exec(compile(module, str(path), "exec"), names)
    return names["MultiprocessingSerializer"]


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


def receive(serializer: Any, text: str) -> list[list[object]]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    value = serializer.deserialize(text)
    if isinstance(value, dict):
        value = FlattenedTensorBucket(
            flattened_tensor=value["flattened_tensor"], metadata=value["metadata"]
        ).reconstruct_tensors()
    return [[name, str(t.dtype), list(t.shape), digest(t)] for name, t in value]


def main() -> None:
    tree = Path(sys.argv[1])
    add_packages(tree)
    serializer = load_serializer(tree)
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"tensors": receive(serializer, line.strip())}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
