"""slime's rollout side in small, as Ray actors: the calls of slime 624b824, their order and what
they leave behind, none of its code.  RolloutManager and RolloutServer.recover in
slime/ray/rollout.py, _run_health_checks and _kill_engine in slime/utils/health_monitor.py,
SGLangEngine in slime/backends/sglang_utils/sglang_engine.py.  A transformers engine stands for
SGLang's server, and there is no router.  Nothing here imports torch, which takes a process seconds.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

from wsync.demo.engines.serve import serve_in_process
from wsync.handles.base import handle


class Engine:
    """slime's SGLangEngine."""

    def init(self, checkpoint: str) -> None:
        self._server = serve_in_process(checkpoint, timeout=240)

    def pids(self) -> tuple[int, int]:
        return self._server.pid, os.getpid()

    def get_url(self) -> str:
        return self._server.url

    def health_generate(self) -> None:
        handle(self._server.url, timeout=60).model_info(60)

    def shutdown(self) -> None:
        self._server.close()

    def update_weights_from_tensor(self, **request: Any) -> None:
        raise AssertionError("weights went through the actor")


class Manager:
    """slime's RolloutManager, with a health monitor that looks when it is told to."""

    def __init__(self, checkpoint: str, count: int) -> None:
        self._checkpoint = checkpoint
        self._engines: list[Any] = [None] * count
        self._generated = self._looks = False
        self._start()

    def _start(self) -> None:
        started = []
        for place, engine in enumerate(self._engines):
            if engine is None:
                self._engines[place] = ray.remote(num_cpus=0)(Engine).remote()
                started.append(self._engines[place])
        self._new = len(started)
        ray.get([engine.init.remote(self._checkpoint) for engine in started])

    def recover_updatable_engines(self) -> None:
        if not self._generated:
            return
        self._start()
        if self._looks:
            self.look()
        self._looks = False

    def look_while_recovering(self) -> None:
        """Makes the monitor's look end after the next recovery has begun, as a long one does."""
        self._looks = True

    def look(self) -> None:
        """The health monitor's look at all engines while slime generates."""
        self._generated = True
        for place, engine in enumerate(self._engines):
            if engine is None:
                continue
            try:
                ray.get(engine.health_generate.remote())
            except Exception:
                with contextlib.suppress(Exception):
                    ray.get(engine.shutdown.remote())
                    ray.kill(engine)
                self._engines[place] = None

    def get_updatable_engines_and_lock(self) -> tuple[Any, ...]:
        count = len(self._engines)
        return self._engines, None, self._new, [1] * count, [*range(count)], [{}] * count

    def clear_updatable_num_new_engines(self) -> None:
        self._new = 0
