"""Trainer ranks acting together: collectives that can be given up, and one error for all.

The first rank that fails publishes its error on a board in the process group's store.  Every
wait looks at the board about every 50 ms, so all ranks raise the same error soon after.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from wsync import _core

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BOARD_SECONDS = 0.05


def host_identity() -> str:
    """Text that is equal for two processes exactly if they can share memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{socket.gethostname()} {boot.read().strip()}"


class TrainerGroup:
    """All ranks of a trainer, with a gloo communicator of their own.

    Every rank makes one at the same time.  Without an initialised process group, or with one
    of a single rank, nothing is ever communicated.

    Args:
        group: the ranks that take part; None for the default group.
        timeout: seconds after which a collective has failed.

    Raises:
        DeadlineError: not all ranks made one.
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout: float) -> None:
        self.timeout = timeout
        self.closed = False
        self._gloo: ProcessGroup | None = None
        self._board: _Board | None = None
        self.rank, self.size = 0, 1
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size == 1:
            return
        members = dist.get_process_group_ranks(group) if group is not None else None
        self._members = members
        try:
            self._gloo = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=members is not None,
            )
        except RuntimeError as error:
            raise _core.DeadlineError(
                f"{self.size} trainer ranks did not meet within {timeout:.0f} s: {error}"
            ) from error
        # a name of this group's own, whatever other groups its ranks are in
        name = self.all_gather(secrets.token_hex(8).encode())[0].decode()
        self._board = _Board(f"wsync/{name}", self.rank)

    def close(self) -> None:
        """Ends the communicator, with what may be stuck in it; other ranks may still use theirs."""
        gloo, self.closed = self._gloo, True
        if gloo is None or self._members is not None:
            # torch names a group of some ranks by how many groups there are: a name that is
            # free again would meet what the former group left in the store
            return
        self._gloo = None
        with contextlib.suppress(ValueError):  # all groups were destroyed together
            dist.destroy_process_group(gloo)

    def check(self) -> None:
        """Raises the error that any rank has published; called during every wait."""
        if self._board is not None:
            self._board.check()

    def fail(self, error: BaseException) -> BaseException:
        """Publishes `error` unless another rank was first; returns the error to raise."""
        return error if self._board is None else self._board.publish(error)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        if self.size == 1:
            return [data]
        if self._gloo is None:
            raise _core.StateError("the trainer's group is closed")
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(dist.all_gather, sizes, torch.tensor([len(data)]))
        widest = max(int(size) for size in sizes)
        mine = torch.zeros(widest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(widest, dtype=torch.uint8) for _ in range(self.size)]
        if widest:
            self._run(dist.all_gather, parts, mine)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather(b"")

    def exchange(self, output: Any, data: Any, outputs: list[int], inputs: list[int]) -> Any:
        """Starts an all-to-all of contiguous uint8 tensors; `finish` waits for it."""
        return dist.all_to_all_single(
            output, data, outputs, inputs, group=self._gloo, async_op=True
        )

    def finish(self, work: Any, timeout: float) -> None:
        """Polls a collective until it is complete, its error, another's error or the deadline."""
        start = time.monotonic()
        looked, pause = start, 2e-5
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > _BOARD_SECONDS:
                looked = now
                self.check()
                if now - start > timeout:
                    raise _core.DeadlineError(
                        f"a collective of {self.size} trainer ranks took over {timeout:.0f} s"
                    )
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        try:
            work.wait()
        except RuntimeError as error:
            self.check()
            raise _core.PeerClosedError(f"a trainer rank is gone: {error}") from error

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        self.finish(collective(*arguments, group=self._gloo, async_op=True), self.timeout)


class _Board:
    """The first published error, visible to all ranks."""

    def __init__(self, prefix: str, rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(prefix, store)
        self._rank = rank

    def check(self) -> None:
        try:
            published = self._store.check(["error"])
            text = self._store.get("error").decode() if published else ""
        except RuntimeError as error:
            raise _core.PeerClosedError(
                f"the trainer's store cannot be reached; its rank is gone: {error}"
            ) from error
        if text:
            raise _decode_error(text)

    def publish(self, error: BaseException) -> BaseException:
        try:
            text = self._store.compare_set("error", "", _encode_error(error, self._rank)).decode()
        except RuntimeError:
            return error  # the store died with its rank: say what was seen here
        first = _decode_error(text)
        return error if (type(error), str(error)) == (type(first), str(first)) else first


def _encode_error(error: BaseException, rank: int) -> str:
    name = type(error).__name__
    if not isinstance(error, _core.WsyncError):
        name, error = "RemoteError", _core.RemoteError(f"{type(error).__name__}: {error}")
    text = str(error)
    if not text.startswith("trainer rank "):
        text = f"trainer rank {rank}: {text}"
    return json.dumps({"class": name, "text": text})


def _decode_error(text: str) -> BaseException:
    fields = json.loads(text)
    cls: type[BaseException] = getattr(_core, fields["class"], _core.RemoteError)
    return cls(fields["text"])
