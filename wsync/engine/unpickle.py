"""Reads the pickles of weight-update requests without running what a stranger put into them.

Only what SGLang's own senders and wsync write is understood: builtin containers, dtypes, sizes,
tensors by value, tensors in torch's named shared memory, and bucket metadata.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

from wsync._core import ProtocolError

_METADATA: Final = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


def loads(data: bytes) -> Any:
    """The object in `data`; ProtocolError names what is not allowed or why it is malformed."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except ProtocolError:
        raise
    except Exception as error:  # a hostile pickle can raise anything
        raise ProtocolError(f"weight payload: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (_METADATA, ("wsync.bucket", _METADATA[1])):
            from wsync.bucket import FlattenedTensorMetadata

            return FlattenedTensorMetadata
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            hint = (
                "; share tensors by value or by file_system, descriptors do not cross processes"
                if name == "rebuild_storage_fd"
                else ""
            )
            raise ProtocolError(f"weight payload: {module}.{name} is not allowed{hint}")
        return allowed


def _storage_from_bytes(data: bytes) -> Any:
    # torch's own function unpickles without restriction
    return torch.load(io.BytesIO(data), weights_only=True)


def _encode_latin1(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise ProtocolError(f"weight payload: text encoding {encoding!r}")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    from torch.multiprocessing import reductions

    utils: Any = torch._utils
    shared: Any = reductions
    return {
        ("_codecs", "encode"): _encode_latin1,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch", "Tensor"): torch.Tensor,
        ("torch._utils", "_rebuild_tensor_v2"): utils._rebuild_tensor_v2,
        ("torch.multiprocessing.reductions", "rebuild_storage_empty"): shared.rebuild_storage_empty,
        (
            "torch.multiprocessing.reductions",
            "rebuild_storage_filename",
        ): shared.rebuild_storage_filename,
        ("torch.multiprocessing.reductions", "rebuild_tensor"): shared.rebuild_tensor,
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"): shared.rebuild_typed_storage,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("torch.storage", "_load_from_bytes"): _storage_from_bytes,
    }


_ALLOWED: Final = _allowed()
