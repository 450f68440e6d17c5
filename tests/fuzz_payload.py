"""The reader of request payloads on any bytes, for atheris (libFuzzer for Python):
`python -P tests/fuzz_payload.py [libFuzzer options] CORPUS...`; `.ci/fuzz.sh` runs it.  Without
atheris it reads each file of the corpus, and each as often again with some bytes changed.

A payload is read or is a ProtocolError; what is read is plain values, and tensors that lie inside
their storage.  The same bytes are read as a storage inside a payload, and as a message inside.
Shared memory and sockets that a payload names are not touched: the calls that would do it give an
empty storage.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    atheris: Any = importlib.import_module("atheris")
    instrumented = atheris.instrument_imports(
        include=[
            "pickle",
            "wsync.messages.payload",
            "wsync.messages.control",
        ]
    )
except ImportError:
    atheris, instrumented = None, contextlib.nullcontext()

with instrumented:
    import torch

    from wsync._core import ProtocolError
    from wsync.bucket import FlattenedTensorMetadata
    from wsync.messages import payload, torch_shm_reader
    from wsync.messages.control import Control

_PLAIN = (str, bytes, int, float, torch.dtype, torch.Size, FlattenedTensorMetadata, type(None))


def without_peers(*_arguments: object) -> Any:
    return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]


def values(value: object, seen: set[int]) -> Iterator[object]:
    """Every value inside, each once: payloads may hold themselves."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner: list[object] = []
    if isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, dict):
        inner = [part for pair in value.items() for part in pair]
    for part in inner:
        yield from values(part, seen)


def check(value: object) -> None:
    if isinstance(value, torch.Tensor):
        last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        end = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
        assert end <= value.untyped_storage().nbytes(), (value.shape, value.stride())
        return
    plain = isinstance(value, (*_PLAIN, list, tuple, dict, payload._State))
    storage = isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage)
    named = callable(value)  # what is only named is not called
    assert plain or storage or named, type(value)


def read(data: bytes) -> None:
    try:
        value = payload.load(data)
        for part in values(value, set()):
            check(part)
        control = payload.control_bytes(value)
    except (ProtocolError, RecursionError):
        control = data  # as it is, for the reader of what lies inside a payload
        read_inside(data)
    if control is not None:
        try:
            message = Control.from_bytes(control)
        except ProtocolError:
            return
        assert Control.from_bytes(message.to_bytes()) == message


def read_inside(data: bytes) -> None:
    """As the bytes of a storage."""
    call = b"\x80\x04ctorch.storage\n_load_from_bytes\n" + pickle.dumps(data, 4)[2:-1] + b"\x85R."
    try:
        storage: Any = payload.load(call)
    except ProtocolError:
        return
    check(storage)
    assert storage.nbytes() <= len(data), storage


def replay(folders: list[str]) -> None:
    """Without atheris; ends with an error that names the file and the seed."""
    files = [path for folder in folders for path in sorted(Path(folder).iterdir())]
    units = 0
    for path in files:
        data = path.read_bytes()
        for seed in range(200):
            draw = random.Random(seed)
            changed = bytearray(data)
            for _ in range(min(seed, 4) if data else 0):
                changed[draw.randrange(len(data))] = draw.randrange(256)
            try:
                read(bytes(changed[: draw.randrange(len(data) + 1)] if seed % 9 == 8 else changed))
            except BaseException as error:
                raise AssertionError(f"{path}, seed {seed}") from error
            units += 1
    print(f"stat::number_of_executed_units: {units}")
    sys.exit(0 if units else 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch_shm_reader.read_file = without_peers  # type: ignore[assignment]
    torch_shm_reader.read_descriptor = without_peers  # type: ignore[assignment]
    if atheris is None:
        replay([argument for argument in sys.argv[1:] if os.path.isdir(argument)])
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
