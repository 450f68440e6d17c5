"""What each rank of an exchange says of itself before they meet, and whether NCCL serves them all.

Trainer ranks tell each other; a remote worker tells the trainer rank that serves it, when it
connects.  NCCL itself would hang where they do not fit, or say so in words that name nobody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TypeAlias

from wsync import _core
from wsync.machine.device import has_nccl
from wsync.machine.nvidia_wheels import nccl_libraries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank.

    gpu: the UUID of the GPU that its rounds lie on, "" for the host.
    version: of NCCL, 22809 is 2.28.9; 0 where there is none.
    address: what others are told to meet it by NCCL, "" where it cannot.
    lacks: why it cannot, to come after a name.
    in_torch: whether groups of torch on that GPU have NCCL.
    """

    gpu: str = ""
    version: int = 0
    address: str = ""
    lacks: str = "is on the host"
    in_torch: bool = False

    @staticmethod
    def on(device: _core.Device) -> Introduction:
        """What this process says, whose rounds are to lie on a device."""
        if device.ordinal < 0:
            return Introduction()
        gpu, in_torch = device.uuid, has_nccl(device)
        try:
            version, _ = _core.nccl_library(nccl_libraries())
        except _core.UnsupportedError as error:
            return Introduction(gpu=gpu, lacks=f"has {error}", in_torch=in_torch)
        address = _core.Exchange.nccl_address(device)
        return Introduction(gpu=gpu, version=version, address=address, lacks="", in_torch=in_torch)

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Introduction:
        """What the same wsync has made by `to_bytes`."""
        return Introduction(**json.loads(data))


Named: TypeAlias = Sequence[tuple[str, Introduction]]
"""Ranks in order, with what messages call them."""


def misfit(members: Named) -> str:
    """Why ranks cannot be in one communicator of NCCL, whoever makes it: the first two, by name,
    that have different versions, or share a GPU; "" where nothing speaks against it."""
    versions: dict[int, str] = {}
    for name, member in members:
        if member.version:
            versions.setdefault(member.version, name)
    if len(versions) > 1:
        (one, first), (two, second), *_ = versions.items()
        return f"{first} has NCCL {one} and {second} NCCL {two}: all need the same version"
    gpus: dict[str, str] = {}
    for name, member in members:
        if member.gpu in gpus:
            return f"{gpus[member.gpu]} and {name} share {member.gpu}: NCCL needs a GPU for each"
        if member.gpu:
            gpus[member.gpu] = name
    return ""


def obstacle(members: Named) -> str:
    """Why ranks cannot meet by NCCL, by name; "" where they can."""
    lacking = (f"{name} {member.lacks}" for name, member in members if member.lacks)
    return next(lacking, "") or misfit(members)
