"""Process groups of trainer ranks and the workers of engines, made by SGLang's recipe.

Rank 0 is the trainer's and hosts a store; worker w of an engine is rank `rank_offset + w`.  Both
sides of wsync use this module; a stock engine makes the same group with SGLang's
`init_custom_process_group`: a TCPStore under the group's name, and torch's backend on it.
"""

from __future__ import annotations

import atexit
import functools
import re
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from wsync import _core
from wsync.exchange.polled_collectives import Collectives, first_line
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import LATER_SECONDS, Check, Deadline, look_around, seconds
from wsync.machine.device import has_nccl
from wsync.machine.temporary_environment import variable
from wsync.module_tensors import flat_bytes

_c10d: Any = dist  # exports more than it lists

_AHEAD: Final = 2.0  # a collective is started while the one before it may take its whole time
_EXIT_SECONDS: Final = 1.0
_DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}
_NAME: Final = re.compile("wsync-([0-9a-f]+)-pp_[0-9]+")


def default_backend() -> str:
    """NCCL where torch has GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def group_name(connection: str) -> str:
    """The name of the group in which a trainer sends; `connection` is in hex, and new each time
    that a trainer connects."""
    return f"wsync-{connection}-pp_0"


def connection_of(name: str) -> str:
    """The connection that a group belongs to, "" for a group that is not wsync's."""
    found = _NAME.fullmatch(name)
    return found[1] if found else ""


def device_of(backend: str, device: _core.Device | None = None) -> torch.device:
    """What a backend sends from: of NCCL the GPU `device`, or None: the calling thread's current
    one, which in a thread of its own is the first, whatever the others have chosen.

    Raises:
        InvalidArgumentError: for another backend.
        UnsupportedError: NCCL does not work on the device.
    """
    if backend not in _DEVICES:
        raise _core.InvalidArgumentError(f"backend {backend!r}: one of {', '.join(_DEVICES)}")
    if _DEVICES[backend] == "cpu":
        return torch.device("cpu")
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    if not has_nccl(device):
        raise _core.UnsupportedError(f"{device!r}: ranks cannot meet by NCCL")
    return torch.device("cuda", device.ordinal)


class Store:
    """A store that a trainer rank hosts on a free port for one group.

    Made directly, so that what torchrun leaves in the environment (TORCHELASTIC_USE_AGENT_STORE)
    has no say.  `close` ends every wait of those who are still in it.
    """

    def __init__(self, timeout: float) -> None:
        self._server: Any = _c10d.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=_delta(timeout)
        )
        self.port = int(self._server.port)

    def close(self) -> None:
        self._server = None


@dataclass(frozen=True)
class Rendezvous:
    """A store of one member, and the group that so many members make there.

    The name is new each time: a worker may still be in the group of a trainer that is gone.
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
        device: torch.device,
        collective_timeout: float | None = None,
        greet: bool = False,
    ) -> UpdateGroup:
        """Joins the others, within `timeout` seconds.

        Another thread makes the group, because calls of a store do not end while its host is
        stopped.  A group that nobody waits for any more is left.

        Args:
            check: called in this thread while the others are waited for.
            device: what the group sends from, as `device_of` gives it.
            collective_timeout: seconds that a collective may take; None: `timeout`.
            greet: see UpdateGroup.

        Raises:
            DeadlineError: not all came.
        """
        given_up = threading.Event()

        def still_wanted() -> None:
            if given_up.is_set():
                raise _core.StateError(f"group {self.name}: nobody waits for it any more")

        def make() -> UpdateGroup:
            return UpdateGroup(
                self,
                rank,
                timeout=timeout if collective_timeout is None else collective_timeout,
                meeting=timeout + LATER_SECONDS,
                device=device,
                greet=still_wanted if greet else None,
            )

        joining = start("wsync-join", make)
        late = f"group {self.name}: {self.size} members did not meet at {self.host}:{self.port}"
        try:
            return result(joining, Deadline(timeout), check, late)
        except BaseException:
            given_up.set()
            _given_up.add(joining)
            joining.add_done_callback(_leave)
            raise


class UpdateGroup:
    """A member of such a group.

    Args:
        place: where the members meet.
        timeout: seconds of any collective.
        meeting: seconds until all members have come.
        device: what it sends from, as `device_of` gives it.
        greet: where all members greet each other, what is called meanwhile, and may raise to end
            that.  NCCL connects in the first collective, which has no deadline: who calls this in
            a thread of its own has done with that.

    Raises:
        InvalidArgumentError: a rank that is not in the group.
        DeadlineError: not all members came.
    """

    def __init__(
        self,
        place: Rendezvous,
        rank: int,
        *,
        timeout: float,
        meeting: float,
        device: torch.device,
        greet: Check | None,
    ) -> None:
        name, backend, size = place.name, place.backend, place.size
        if not 0 <= rank < size:
            raise _core.InvalidArgumentError(f"rank {rank} in a group of world_size {size}")
        self.rank, self.size = rank, size
        self.timeout = timeout
        self._device = device
        try:
            store: Any = _c10d.TCPStore(
                place.host,
                place.port,
                is_master=False,
                wait_for_workers=False,
                timeout=_delta(meeting),
            )
            # torch.distributed's own prefixes for a group of this name
            for prefix in (name, f"{name}/", f"{self._device.type}/"):
                store = _c10d.PrefixStore(prefix, store)
            group = _make(backend, store, rank, size, meeting)
        except RuntimeError as error:
            raise _core.DeadlineError(
                f"group {name}: {size} members did not meet at {place.host}:{place.port} within "
                f"{seconds(meeting)}: {first_line(error)}"
            ) from error
        group._set_default_timeout(_delta(_AHEAD * timeout + LATER_SECONDS))
        self._group = Collectives(
            group,
            whole=f"group {name}",
            member=f"a member of group {name}",
            lingers=backend == "nccl",
        )
        if greet is not None:
            hello = torch.zeros(1, dtype=torch.float32, device=self._device)
            greeting = self._group.start("allreduce", [hello], dist.AllreduceOptions())
            try:
                self.finish(greeting, meeting, greet)
            except BaseException:
                self.close()
                raise

    def broadcast(self, tensors: Sequence[torch.Tensor], check: Check | None = None) -> None:
        """Sends contiguous tensors from rank 0, or receives them there where this is another.

        They travel as bytes: gloo does not know all dtypes, and NCCL broadcasts no others.

        Raises:
            DeadlineError: it took longer than the group's timeout.
            PeerClosedError: a member is gone.
        """
        flat = [flat_bytes(tensor) for tensor in tensors]
        held = [tensor.to(self._device) for tensor in flat]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works = [self._group.start("broadcast", [tensor], options) for tensor in held]
        deadline = Deadline(self.timeout)
        for work in works:
            self._group.finish(work, deadline.left, check)
        if self.rank != 0:
            for tensor, received in zip(flat, held, strict=True):
                if received is not tensor:
                    tensor.copy_(received)

    def exchange(self, output: Any, data: Any, outputs: list[int], inputs: list[int]) -> Any:
        """Starts an all-to-all of contiguous uint8 tensors; `finish` waits for it."""
        return self._group.start("alltoall_base", output, data, outputs, inputs)

    def finish(self, work: Any, timeout: float, check: Check | None = None) -> None:
        """Waits for an exchange, and calls `check` meanwhile, which may raise to end that; a member
        that is gone is reported as others say it, if they do."""
        verdict = None if check is None else functools.partial(look_around, check)
        self._group.finish(work, timeout, check, verdict)

    def close(self) -> None:
        """Leaves the group; a collective that is stuck keeps nobody but a thread."""
        self._group.close()


def _make(backend: str, store: Any, rank: int, size: int, timeout: float) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, _delta(timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(timeout)
    # read by the constructor: else torch ends this process when a member is gone
    with variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


# joins that nobody waits for, until they have ended
_given_up: Final = set[Future[UpdateGroup]]()


def _leave(joining: Future[UpdateGroup]) -> None:
    _given_up.discard(joining)
    if joining.exception() is None:
        joining.result().close()


@atexit.register
def _await_given_up() -> None:
    """An interpreter that ends aborts the process (up to Python 3.13) where a thread comes back to
    it from torch, as one does whose store has just been closed."""
    wait(_given_up, _EXIT_SECONDS)
