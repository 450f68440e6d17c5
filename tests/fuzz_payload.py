"""The reader of request payloads on any bytes, for atheris (libFuzzer for Python):
`python -P tests/fuzz_payload.py [libFuzzer options] CORPUS...`; `.ci/fuzz.sh` runs it.

A payload is read or is a ProtocolError; what is read is plain values, and tensors that lie inside
their storage.  Shared memory and sockets that a payload names are not touched: the calls that
would do it give an empty storage.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import atheris

with atheris.instrument_imports(
    include=["pickle", "wsync.payload", "wsync.cuda_payload", "wsync.control"]
):
    import torch

    from wsync import cuda_payload, payload
    from wsync._core import ProtocolError
    from wsync.bucket import FlattenedTensorMetadata
    from wsync.control import Control

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
    if isinstance(value, cuda_payload.GpuTensor):
        end = (value.start + value.spanned) * value.dtype.itemsize if value.spanned else 0
        assert end <= value.nbytes, value
        return
    plain = isinstance(value, (*_PLAIN, list, tuple, dict, payload._State))
    storage = isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage)
    named = callable(value)  # what is only named is not called
    assert plain or storage or named, type(value)


def read(data: bytes) -> None:
    try:
        value = cuda_payload.load(data)
        for part in values(value, set()):
            check(part)
        control = payload.control_bytes(value)
    except (ProtocolError, RecursionError):
        control = data  # as it is, for the reader of what lies inside a payload
    if control is not None:
        try:
            message = Control.from_bytes(control)
        except ProtocolError:
            return
        assert Control.from_bytes(message.to_bytes()) == message


warnings.simplefilter("ignore")
for key, function in payload._GLOBALS.items():
    if function in (payload._map_file, payload._map_descriptor):
        payload._GLOBALS[key] = without_peers
atheris.Setup(sys.argv, read)
atheris.Fuzz()
