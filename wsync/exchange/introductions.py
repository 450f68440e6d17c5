"""What each rank of an exchange reports before they meet, and whether NCCL can serve them all.

Trainer ranks exchange these reports.  When a remote worker connects, it sends its own to the
trainer rank that serves it.  If NCCL cannot serve the ranks, it would hang, or raise an error that
names no rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Final

from wsync import _core
from wsync.machine.host import host_identity
from wsync.machine.nvidia_wheels import nccl_libraries

# NCCL hangs if ranks differ in it.  SGLang sets 0 in its workers, slime and verl also in trainers.
_CUMEM: Final = "NCCL_CUMEM_ENABLE"


def _cumem() -> str:
    return os.environ.get(_CUMEM) or "1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank's report.

    gpu: the UUID of the GPU on which the rank's rounds are; "" if they are on the host.
    version: of NCCL; 22809 is 2.28.9, and 0 is none.
    address: the address at which other ranks meet this rank with NCCL; "" if NCCL is not possible.
    lacks: why NCCL is not possible, as the end of a sentence that begins with a name; "" if it is.
    cumem: NCCL_CUMEM_ENABLE in the environment, by default "1".
    host: the host's identity.  free_nbytes: memory that is free, of the GPU or of the host.
    """

    gpu: str = ""
    version: int = 0
    address: str = ""
    lacks: str = "has its weights in CPU memory"
    cumem: str = dataclasses.field(default_factory=_cumem)
    host: str = dataclasses.field(default_factory=host_identity)
    free_nbytes: int = 0

    @staticmethod
    def on(device: _core.Device) -> Introduction:
        """This process's report, if its rounds are on `device`."""
        free = device.memory_available()
        if device.ordinal < 0:
            return Introduction(free_nbytes=free)
        gpu = device.uuid
        try:
            version, _ = _core.nccl_library(nccl_libraries())
        except _core.UnsupportedError as error:
            return Introduction(gpu=gpu, lacks=f"has {error}", free_nbytes=free)
        address = _core.Exchange.nccl_address(device)
        return Introduction(gpu=gpu, version=version, address=address, lacks="", free_nbytes=free)

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Introduction:
        """Parses what `to_bytes` of the same version of wsync has made."""
        return Introduction(**json.loads(data))


def obstacle(members: Sequence[tuple[str, Introduction]]) -> str:
    """Says why the ranks cannot share an NCCL communicator, or "" if they can.  The text names a
    rank without NCCL, or two ranks that differ in its version or in NCCL_CUMEM_ENABLE, or have the
    same GPU.

    members: each rank's name in messages, and its introduction.
    """
    for name, member in members:
        if member.lacks:
            return f"{name} {member.lacks}"
    (first, one), gpus = members[0], dict[str, str]()
    for name, member in members:
        if member.version != one.version:
            versions = f"{first} has NCCL {one.version} and {name} NCCL {member.version}"
            return f"{versions}: all need the same version"
        if member.cumem != one.cumem:
            values = (
                f"{first} has {_CUMEM}={one.cumem} (1 is the default) and {name} {member.cumem}"
            )
            return f"{values}: set it to one value for all"
        if member.gpu in gpus:
            return f"{gpus[member.gpu]} and {name} share {member.gpu}: NCCL needs a GPU for each"
        gpus[member.gpu] = name
    return ""
