"""The transformers engine, which takes broadcasts of buckets, too, as stock engines do."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from support.update_groups import UpdateGroups, take

from wsync.demo.engines import serve, server
from wsync.demo.engines.serve import ServerProcess
from wsync.demo.engines.transformers import REQUEST_SECONDS, Engine
from wsync.machine.deadline import Deadline


@contextlib.contextmanager
def served(config: Any, **options: Any) -> Iterator[ServerProcess]:
    """One in a process, as serve_in_process starts it."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (
        mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(path)}),
        mock.patch.object(serve, "MODULE", __name__),
    ):
        started = serve.serve_in_process(config, **options)
    with started:
        yield started


class Server(server.EngineServer):
    """With the endpoints of groups."""

    def __init__(self, engine: Engine, port: int) -> None:
        super().__init__(engine, port)
        groups = UpdateGroups()

        def update(
            names: Sequence[str],
            dtypes: Sequence[str],
            shapes: Sequence[Sequence[int]],
            group_name: str,
            end: Deadline,
            load_format: str | None = None,
            weight_version: str | None = None,
        ) -> None:
            bucket = {"names": names, "dtypes": dtypes, "shapes": shapes}
            named = {"group_name": group_name, "weight_version": weight_version}
            take(engine, groups, end=end, load_format=load_format, **named, **bucket)

        calls = {
            "init_weights_update_group": partial(groups.init, meeting=REQUEST_SECONDS),
            "destroy_weights_update_group": groups.destroy,
            "update_weights_from_distributed": update,
        }
        for path, call in calls.items():
            self._calls[path] = call, inspect.signature(call).parameters


if __name__ == "__main__":
    server.EngineServer = Server  # type: ignore[misc]
    serve.main()
