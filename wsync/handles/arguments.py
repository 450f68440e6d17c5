"""What requests for an update carry, and what they are answered."""

import base64
from collections.abc import Sequence
from typing import Any, Final

from wsync._core import InvalidArgumentError

# what SGLang answers to a pause or a continue
SAID: Final = ("status", "message")
# of SGLang's server_info and model_info, what does not change while it runs
IDENTITY: Final = (
    "random_seed",
    "model_type",
    "architectures",
    "served_model_name",
    "tp_size",
    "pp_size",
    "dp_size",
    "nccl_port",
    "version",
)


def check_payloads(name: str, workers: int, payloads: Sequence[bytes]) -> None:
    if len(payloads) != workers:
        raise InvalidArgumentError(
            f"engine {name}: {len(payloads)} payloads for {workers} workers, one each is needed"
        )


def update_arguments(
    payloads: Sequence[bytes], load_format: str | None, weight_version: int | str | None
) -> dict[str, Any]:
    """Arguments of SGLang's update_weights_from_tensor.

    flush_cache is always false: SGLang's own flush inside an update asserts that the engine is
    idle, and the assertion ends the server.
    """
    arguments: dict[str, Any] = {
        "serialized_named_tensors": [base64.b64encode(data).decode() for data in payloads],
        "load_format": load_format,
        "flush_cache": False,
    }
    if weight_version is not None:
        arguments["weight_version"] = str(weight_version)
    return arguments


def disk_arguments(path: str, weight_version: int | str | None) -> dict[str, Any]:
    """Arguments of SGLang's and slime's update_weights_from_disk."""
    version = {} if weight_version is None else {"weight_version": str(weight_version)}
    return {"model_path": path, **version}
