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

# Variables by which a rank chooses its transports, and their defaults.  NCCL hangs if ranks differ.
# SGLang sets NCCL_CUMEM_ENABLE=0 in its workers, slime and verl also in trainers.
_TRANSPORTS: Final = {
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
}


def _settings() -> dict[str, str]:
    return {name: os.environ.get(name) or usual for name, usual in _TRANSPORTS.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank's report.

    gpu: the UUID of the GPU on which the rank's rounds are; "" if they are on the host.
    version: of NCCL; 22809 is 2.28.9, and 0 is none.
    address: the address at which other ranks meet this rank with NCCL; "" if NCCL is not possible.
    lacks: why NCCL is not possible, as the end of a sentence that begins with a name; "" if it is.
    settings: the variables in the environment that must be the same for all ranks.
    host: the host's identity.  free_nbytes: memory that is free, of the GPU or of the host.
    """

    gpu: str = ""
    version: int = 0
    address: str = ""
    lacks: str = "has its weights in CPU memory"
    settings: dict[str, str] = dataclasses.field(default_factory=_settings)
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
    rank without NCCL, or two ranks that have different versions or settings, or the same GPU.

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
        for variable, value in member.settings.items():
            if value != one.settings[variable]:
                values = f"{first} has {variable}={one.settings[variable]} and {name} {value}"
                return f"{values}: set it to one value for all"
        if member.gpu in gpus:
            return f"{gpus[member.gpu]} and {name} share {member.gpu}: NCCL needs a GPU for each"
        gpus[member.gpu] = name
    return ""
