"""A Ray cluster of this machine, which tests share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import ray._private.node

import wsync

_TESTS = Path(__file__).resolve().parents[1]
_STORE_NBYTES = 80 << 20  # Ray takes no less than 75 MB


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Two processors; `folder` is empty, with a path short enough for sockets.

    Ray puts the driver's folder in front of its workers' path: in the repository, that would hide
    the package under test.  PYTHONPATH gives workers this package and what they import from the
    tests.
    """
    settings = {
        "PYTHONPATH": os.pathsep.join((str(_TESTS), str(Path(wsync.__file__).parents[1]))),
        "RAY_AUTH_MODE": "disabled",  # no token in the user's home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        # a busy machine may need minutes for what Ray expects in seconds
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
        "RAY_health_check_failure_threshold": "50",
    }
    slow = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=_tenth)
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(ray._private.node, "time", slow),
        contextlib.chdir(folder),
    ):
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            object_store_memory=_STORE_NBYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    try:
        yield
    finally:
        ray.shutdown()


def _tenth() -> float:
    """A clock by which the 30 s that Ray gives its processes to start are five minutes."""
    return time.monotonic() / 10


def start(kind: type, *arguments: Any, **named: Any) -> Any:
    """An actor of a class, which is not counted against the processors."""
    return ray.remote(num_cpus=0)(kind).remote(*arguments, **named)


def kill(*actors: Any) -> None:
    """Ends actors, and waits until their death is seen."""
    for actor in actors:
        ray.kill(actor)
    for actor in actors:
        await_death(actor)


def await_death(actor: Any, timeout: float = 60.0) -> None:
    """Waits until calls of an actor, which has a method `ping`, say that it is dead."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            try:
                ray.get(actor.ping.remote(), timeout=1)
            except ray.exceptions.RayActorError:
                return
        time.sleep(0.05)
    raise AssertionError(f"{actor} is alive {timeout:g} s after it was to die")
