"""Process groups of trainer ranks and the workers of engines, made by SGLang's recipe.

Rank 0 is the trainer's and hosts a store; worker w of an engine is rank `rank_offset + w`.  Both
sides of wsync use this module; a stock engine makes the same group with SGLang's
`init_custom_process_group`: a TCPStore under the group's name, and torch's backend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from wsync import _core

Check = Callable[[], object]

_c10d: Any = dist  # exports more than it lists

_CHECK_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 2.0  # a deadline of ours comes before the backend's own
_VERDICT_SECONDS: Final = 1.0  # for a member that is gone to be missed elsewhere, with its reason
_DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}


def default_backend() -> str:
    """NCCL where torch has GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


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


class UpdateGroup:
    """A member of such a group.

    Args:
        host, port: where rank 0's store is.
        rank, size: this member and the number of members.
        name: of the group; no other group in this store has it.
        backend: "gloo" or "nccl".
        timeout: seconds until all members have come, and of any collective.
        check: called while `finish` waits; may raise to end it.

    Raises:
        InvalidArgumentError: a rank that is not in the group, or another backend.
        DeadlineError: not all members came.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        size: int,
        name: str,
        backend: str,
        timeout: float,
        check: Check | None = None,
    ) -> None:
        if backend not in _DEVICES:
            raise _core.InvalidArgumentError(f"backend {backend!r}: one of {', '.join(_DEVICES)}")
        if not 0 <= rank < size:
            raise _core.InvalidArgumentError(f"rank {rank} in a group of world_size {size}")
        self.name = name
        self.rank, self.size = rank, size
        self.timeout = timeout
        self._check = check
        self._device = _DEVICES[backend]
        self._underway = 0  # collectives
        try:
            store: Any = _c10d.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=_delta(timeout)
            )
            # torch.distributed's own prefixes for a group of this name
            for prefix in (name, f"{name}/", f"{self._device}/"):
                store = _c10d.PrefixStore(prefix, store)
            self._group = _make(backend, store, rank, size, timeout + _SETTLE_SECONDS)
        except RuntimeError as error:
            raise _core.DeadlineError(
                f"group {name}: {size} members did not meet at {host}:{port} within "
                f"{timeout:.0f} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensors: Sequence[torch.Tensor], check: Check | None = None) -> None:
        """Sends contiguous tensors from rank 0, or receives them there where this is another.

        They travel as bytes: gloo does not know all dtypes, and NCCL broadcasts no others.

        Raises:
            DeadlineError: it took longer than the group's timeout.
            PeerClosedError: a member is gone.
        """
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        held = [tensor.to(self._device) for tensor in flat]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._underway += len(held)
        works = [self._group.broadcast([tensor], options) for tensor in held]
        end = time.monotonic() + self.timeout
        for work in works:
            self._finish(work, end, self.timeout, check)
        if self.rank != 0:
            for tensor, received in zip(flat, held, strict=True):
                if received is not tensor:
                    tensor.copy_(received)

    def exchange(self, output: Any, data: Any, outputs: list[int], inputs: list[int]) -> Any:
        """Starts an all-to-all of contiguous uint8 tensors; `finish` waits for it."""
        work = self._group.alltoall_base(output, data, outputs, inputs)
        self._underway += 1
        return work

    def finish(self, work: Any, timeout: float) -> None:
        """Waits for an exchange; a member that is gone is reported as others say it, if they do."""
        try:
            self._finish(work, time.monotonic() + timeout, timeout, self._check)
        except _core.PeerClosedError:
            end = time.monotonic() + _VERDICT_SECONDS
            while self._check is not None and time.monotonic() < end:
                self._check()
                time.sleep(_CHECK_SECONDS)
            raise

    def close(self) -> None:
        """Leaves the group; a collective that is stuck keeps nobody but its own thread."""
        held, self._group = [self._group], None
        if self._underway:
            threading.Thread(target=held.clear, daemon=True, name="wsync-group").start()

    def _finish(self, work: Any, end: float, timeout: float, check: Check | None) -> None:
        looked, pause = time.monotonic(), 2e-5
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > _CHECK_SECONDS:
                looked = now
                if check is not None:
                    check()
                if now > end:
                    raise _core.DeadlineError(
                        f"group {self.name}: a collective took over {timeout:.0f} s"
                    )
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        try:
            work.wait()
        except RuntimeError as error:
            raise _core.PeerClosedError(
                f"group {self.name}: a member is gone: {_first_line(error)}"
            ) from error
        self._underway -= 1


def _make(backend: str, store: Any, rank: int, size: int, timeout: float) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, _delta(timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
