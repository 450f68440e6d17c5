"""Run as a script: unpickles weight-update payloads the way an SGLang server does.

    python sglang_receiver.py TREE [UUID...]     (base64 lines in, lines of JSON out)

`sglang.srt.utils.common` imports half an inference engine, so its unpickler and serialiser are
taken out of the real file and run alone; `sglang.srt.weight_sync.tensor_bucket` is imported as it
is.  Answers {"tensors": [[name, dtype, shape, sha256 of the bytes], ...]} or {"error": text}.

With UUIDs, torch believes that there are such GPUs, and SGLang's own patch_torch is at work up to
the call of CUDA: that is done on tests/fakecuda, whose memory torch then reads, and noted in
{"opened": [[device, handle, bytes, offset, file, counter, event, waits], ...]}.
"""

from __future__ import annotations

import ast
import base64
import ctypes
import hashlib
import io
import json
import pickle
import sys
import types
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import torch

WANTED = {"_safe_load_torch_storage", "SafeUnpickler", "MultiprocessingSerializer"}


def add_packages(tree: Path) -> None:
    """sglang's packages without their __init__ files."""
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync", "sglang.srt.utils"):
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


class Gpus:
    """CUDA's part of torch, as a process has it that unpickles."""

    def __init__(self, uuids: list[str]) -> None:
        self.opened: list[list[object]] = []
        cuda: Any = torch.cuda
        cuda._lazy_init = lambda: None
        cuda.device_count = lambda: len(uuids)
        cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuids[device])
        storage: Any = torch.UntypedStorage
        storage._new_shared_cuda = staticmethod(self._open)
        storage._release_ipc_counter_cuda = staticmethod(self._count_down)
        common: Any = types.ModuleType("sglang.srt.utils.common")
        common.is_musa = common.is_npu = lambda: False
        common.torch_release = (2, 13)
        sys.modules["sglang.srt.utils.common"] = common
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()

    def _open(self, *arguments: Any) -> Any:
        from support.gpu_reader import Mapped
        from support.played_gpu import reach

        assert [type(value) for value in arguments] == [
            *(int, bytes, int, int, bytes, int, bytes, bool)
        ]
        self.opened.append([a.hex() if isinstance(a, bytes) else a for a in arguments])
        device, handle, nbytes, offset, file, counter, *_ = arguments
        memory = Mapped(device, handle[2:])
        data = (ctypes.c_uint8 * nbytes).from_address(reach(memory.address + offset))

        def let_go() -> None:
            memory.close()
            self._count_down(file, counter)

        weakref.finalize(data, let_go)
        return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()

    @staticmethod
    def _count_down(file: bytes, counter: int) -> None:
        path = "/dev/shm" + file.decode()
        numpy.memmap(path, numpy.int64, "r+", offset=64, shape=(10_000,))[counter] -= 1


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
    sys.path.append(str(Path(__file__).parent.parent))
    gpus = Gpus(sys.argv[2:]) if sys.argv[2:] else None
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"tensors": receive(serializer, line.strip())}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if gpus is not None:
            answer["opened"], gpus.opened = gpus.opened, []
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
