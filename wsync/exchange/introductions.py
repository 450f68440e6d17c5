"""What each rank of an exchange says of itself before they meet, and whether NCCL serves them all.

Trainer ranks tell each other; a remote worker tells the trainer rank that serves it, when it
connects.  NCCL itself would hang where they do not fit, or say so in words that name nobody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from wsync import _core
from wsync.machine.nvidia_wheels import nccl_libraries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank.

    gpu: the UUID of the GPU that its rounds lie on, "" for the host.
    version: of NCCL, 22809 is 2.28.9; 0 where there is none.
    address: what others are told to meet it by NCCL, "" where it cannot.
    lacks: why it cannot, to come after a name.
    """

    gpu: str = ""
    version: int = 0
    address: str = ""
    lacks: str = "is on the host"

    @staticmethod
    def on(device: _core.Device) -> Introduction:
        """What this process says, whose rounds are to lie on a device."""
        if device.ordinal < 0:
            return Introduction()
        gpu = device.uuid
        try:
            version, _ = _core.nccl_library(nccl_libraries())
        except _core.UnsupportedError as error:
            return Introduction(gpu=gpu, lacks=f"has {error}")
        address = _core.Exchange.nccl_address(device)
        return Introduction(gpu=gpu, version=version, address=address, lacks="")

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Introduction:
        """What the same wsync has made by `to_bytes`."""
        return Introduction(**json.loads(data))


def obstacle(members: Sequence[tuple[str, Introduction]]) -> str:
    """Why ranks cannot be in one communicator of NCCL, by name: one that has none, or two that have
    different versions or share a GPU; "" where they can.

    members: what messages call each, and what it says of itself.
    """
    for name, member in members:
        if member.lacks:
            return f"{name} {member.lacks}"
    (first, one), gpus = members[0], dict[str, str]()
    for name, member in members:
        if member.version != one.version:
            versions = f"{first} has NCCL {one.version} and {name} NCCL {member.version}"
            return f"{versions}: all need the same version"
        if member.gpu in gpus:
            return f"{gpus[member.gpu]} and {name} share {member.gpu}: NCCL needs a GPU for each"
        gpus[member.gpu] = name
    return ""
