"""Process groups of trainer ranks and engines' workers, made in SGLang's way.

Rank 0 belongs to the trainer and hosts a store.  Worker w of an engine is rank `rank_offset + w`.
Both sides of wsync use this module.  A stock engine makes the same group with SGLang's
`init_custom_process_group`: a TCPStore under the group's name, and torch's backend on it.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from wsync import _core
from wsync.exchange.polled_collectives import Collectives, first_line
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import LATER_SECONDS, Check, Deadline, seconds
from wsync.machine.temporary_environment import variable
from wsync.module_tensors import flat_bytes

_c10d: Any = dist  # has more names than its types list

_AHEAD: Final = 2.0  # a collective may start while the one before still has its whole time
_HOST: Final = torch.device("cpu")


def default_backend() -> str:
    """Returns "nccl" if torch has GPUs, else "gloo"."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device_of(backend: str, device: _core.Device | None = None) -> torch.device:
    """Returns the device from which a backend sends.  For NCCL it is the GPU `device`, or by
    default the calling thread's current GPU, which is the first one in a new thread.

    Raises:
        InvalidArgumentError: for another backend.
    """
    if backend not in ("gloo", "nccl"):
        raise _core.InvalidArgumentError(f"backend={backend!r}: expected 'gloo' or 'nccl'")
    if backend == "gloo":
        return _HOST
    ordinal = torch.cuda.current_device() if device is None else device.ordinal
    return torch.device("cuda", ordinal)


class Store:
    """A store that a trainer rank hosts on a free port for one group.

    Made directly, so that torchrun's environment (TORCHELASTIC_USE_AGENT_STORE) has no effect.
    `close` ends every wait of the members that still use it.

    server: the torch.distributed.TCPStore; None once this is closed.
    """

    def __init__(self, timeout: float) -> None:
        self.server: Any = _c10d.TCPStore(
            "localhost",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
        self.port = int(self.server.port)

    def close(self) -> None:
        self.server = None


@dataclass(frozen=True)
class Rendezvous:
    """The address of a member's store, and the group that `size` members make there.

    The name is new each time, because a worker may still be in the group of an earlier trainer.
    """

    host: str
    port: int
    size: int
    backend: str = "gloo"
    name: str = field(default_factory=lambda: f"wsync-{secrets.token_hex(8)}")

    def join(
        self,
        rank: int,
        timeout: float,
        check: Check,
        *,
        device: torch.device = _HOST,
        collective_timeout: float | None = None,
    ) -> UpdateGroup:
        """Joins the other members, within `timeout` seconds.

        Another thread makes the group, because calls of a store do not return while its host is
        stopped.  A group that comes too late is left again.

        Args:
            check: called in this thread while it waits for the other members.
            device: the device from which the group sends, as `device_of` gives it.
            collective_timeout: seconds that a collective may take; None: `timeout`.

        Raises:
            InvalidArgumentError: `rank` is not a rank of the group.
            DeadlineError: not all members joined in time.
        """
        patience = timeout if collective_timeout is None else collective_timeout
        make = functools.partial(UpdateGroup, self, rank, patience, timeout, device)
        joining = start("wsync-join", make)
        late = f"group {self.name}: {self.size} members did not meet at {self.host}:{self.port}"
        try:
            return result(joining, Deadline(timeout), check, late)
        except BaseException:
            joining.add_done_callback(_leave)
            raise


class UpdateGroup(Collectives):
    """A member of a process group that was made in SGLang's way.

    Args:
        place: where the members meet.
        timeout: seconds that a collective may take.
        meeting: seconds that the meeting may take.
        device: the device from which the member sends, as `device_of` gives it.
    """

    def __init__(
        self, place: Rendezvous, rank: int, timeout: float, meeting: float, device: torch.device
    ) -> None:
        name, size = place.name, place.size
        if not 0 <= rank < size:
            raise _core.InvalidArgumentError(f"rank {rank} is not below world_size {size}")
        self._device = device
        limit = timedelta(seconds=meeting + LATER_SECONDS)
        try:
            store: Any = _c10d.TCPStore(
                place.host, place.port, is_master=False, wait_for_workers=False, timeout=limit
            )
            # torch.distributed's own prefixes for a group of this name
            for prefix in (name, f"{name}/", f"{device.type}/"):
                store = _c10d.PrefixStore(prefix, store)
            group = _make(place.backend, store, rank, size, limit)
        except RuntimeError as error:
            raise _core.DeadlineError(
                f"group {name}: {size} members did not meet at {place.host}:{place.port} within "
                f"{seconds(meeting)}: {first_line(error)}"
            ) from error
        group._set_default_timeout(timedelta(seconds=_AHEAD * timeout + LATER_SECONDS))
        whole, member = f"group {name}", f"a member of group {name}"
        lingers = place.backend == "nccl"
        super().__init__(group, timeout=timeout, whole=whole, member=member, lingers=lingers)

    def broadcast(self, tensors: Sequence[torch.Tensor], check: Check = bool) -> None:
        """Sends contiguous tensors from rank 0; on other ranks of a gloo group, receives them into
        `tensors`.

        Tensors travel as bytes, because gloo and NCCL do not broadcast every dtype.

        Raises:
            DeadlineError: the broadcast took longer than the group's timeout.
            PeerClosedError: a member is gone.
        """
        held = [flat_bytes(tensor).to(self._device) for tensor in tensors]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works = [self.start("broadcast", [tensor], options) for tensor in held]
        deadline = Deadline(self.timeout)
        for work in works:
            self.finish(work, deadline.left, check)


def _make(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # read by the constructor; without it torch ends this process when a member is gone
    with variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _leave(joining: Future[UpdateGroup]) -> None:
    if joining.exception() is None:
        joining.result().close()
