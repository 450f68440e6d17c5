"""Loading a checkpoint folder into parameters that an engine already has."""

import os
from collections.abc import Callable, Mapping

from wsync._core import Route, Stream
from wsync.checkpoint import Checkpoint
from wsync.engine.destination import Target
from wsync.engine.receiver import Receiver

# what the checkpoint holds -> what the worker keeps of it
Targets = Callable[[Mapping[str, tuple[int, ...]]], Target]


def load(
    folder: str | os.PathLike[str],
    targets: Targets,
    receiver: Receiver,
    *,
    threads: int = 1,
    timeout: float,
) -> None:
    """Replaces every weight of a worker by those of a checkpoint.

    All that can be wrong with the files is found before the first byte is written; after that,
    a worker that fails is inconsistent until it is updated again.

    Raises:
        SystemCallError, LayoutError: the files cannot be read, were not written to their end, or
            do not fit the parameters; LayoutError, too, if they are written to meanwhile.
        DeadlineError: the copy took longer than `timeout` seconds.
        StateError: another update is running.
    """
    with Checkpoint(folder) as checkpoint:
        shapes = {name: place.shape for name, place in checkpoint.places.items()}
        found = targets(shapes)
        layout, destinations = found.layout(), found.buffers()
        route = Route(checkpoint.layout(), layout)
        layout.check_apart(destinations)
        sources = checkpoint.buffers()
        stream = Stream(threads)
        try:
            with receiver.replacing(f"loading {os.fspath(folder)}"):
                for file in range(route.buffer_count):
                    stream.copy(route, file, 0, sources, destinations)
                stream.synchronize(timeout)
                found.check()
                checkpoint.check()
        finally:
            stream.abandon()
            stream.close()
