"""Where the members of a process group meet, and how each of them joins it."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from wsync import _core
from wsync.exchange.groups import UpdateGroup
from wsync.machine.deadline import LATER_SECONDS, Check, Deadline
from wsync.machine.lanes import result, start


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
            device: what the group sends from, as `groups.device_of` gives it.
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
                self.host,
                self.port,
                rank=rank,
                size=self.size,
                name=self.name,
                backend=self.backend,
                device=device,
                timeout=timeout if collective_timeout is None else collective_timeout,
                meeting=timeout + LATER_SECONDS,
                greet=greet,
                check=still_wanted,
            )

        joining = start("wsync-join", make)
        late = f"group {self.name}: {self.size} members did not meet at {self.host}:{self.port}"
        try:
            return result(joining, Deadline(timeout), check, late)
        except BaseException:
            given_up.set()
            joining.add_done_callback(_leave)
            raise


def _leave(joining: Future[UpdateGroup]) -> None:
    if joining.exception() is None:
        joining.result().close()
