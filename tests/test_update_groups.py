"""An engine worker's groups: who waits for whom, for how long, and what is left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import wsync
from wsync.engine.distributed import UpdateGroups
from wsync.update_group import Store, UpdateGroup


def test_the_trainers_rank_is_not_for_engines() -> None:
    with pytest.raises(wsync.InvalidArgumentError, match="rank_offset 0"):
        UpdateGroups().init(
            master_address="127.0.0.1",
            master_port=1,
            rank_offset=0,
            world_size=1,
            group_name="g",
            backend="gloo",
            meeting=1,
        )


@contextlib.contextmanager
def joined(groups: UpdateGroups, *, name: str = "g", **more: Any) -> Iterator[UpdateGroup]:
    """The trainer's end of a group of two that a worker has joined."""
    store = Store(20)
    address: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": store.port}
    address |= {"rank_offset": 1, "world_size": 2, "group_name": name, "backend": "gloo"}
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(groups.init, **address, meeting=20, **more)
        group = UpdateGroup(
            "127.0.0.1", store.port, rank=0, size=2, name=name, backend="gloo", timeout=20
        )
        joining.result(20)
    try:
        yield group
    finally:
        group.close()
        store.close()


BUCKET: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[3]]}


def test_a_broadcast_that_does_not_come_costs_its_deadline_and_the_group() -> None:
    groups = UpdateGroups()
    late = "a broadcast took over 1 s|a collective of group g took over 1 s"
    for limits in ({"timeout": 1.0}, {}):
        with joined(groups, **limits):
            few = {} if limits else {"timeout": 1.0}
            with pytest.raises(wsync.DeadlineError, match=late):
                groups.receive(group_name="g", **BUCKET, **few)
            with pytest.raises(wsync.InvalidArgumentError, match="in none of that name"):
                groups.receive(group_name="g", **BUCKET)


@pytest.mark.parametrize("how", ["told", "another"])
def test_a_worker_that_waits_for_a_broadcast_can_be_called_away(how: str) -> None:
    groups = UpdateGroups()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        first = stack.enter_context(joined(groups, name="first"))
        stack.enter_context(joined(groups, name="stage"))  # of the same trainer, so far
        taken = pool.submit(groups.receive, group_name="first", **BUCKET)
        first.broadcast([torch.arange(3.0)])
        assert torch.equal(taken.result(20)[0][1], torch.arange(3.0))
        waiting = pool.submit(groups.receive, group_name="first", **BUCKET)
        time.sleep(0.3)
        assert not waiting.done()
        if how == "told":
            groups.destroy("first")
        else:
            stack.enter_context(joined(groups, name="second"))
        with pytest.raises(wsync.StateError, match="group 'first': this worker has left it"):
            waiting.result(20)
        groups.destroy("stage")


def test_of_two_that_join_one_group_at_once_one_does() -> None:
    groups = UpdateGroups()
    address: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
    address |= {"world_size": 2, "group_name": "g", "backend": "gloo", "meeting": 1.0}
    with ThreadPoolExecutor() as pool:
        errors = [pool.submit(groups.init, **address).exception(20)]
        both = [pool.submit(groups.init, **address) for _ in range(8)]
        errors += [future.exception(20) for future in both]
    assert {type(error) for error in errors} == {wsync.DeadlineError, wsync.InvalidArgumentError}
    with joined(groups):  # those that failed are in no group
        groups.destroy("g")
