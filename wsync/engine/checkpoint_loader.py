"""Loading a checkpoint folder into parameters that an engine already has."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from wsync._core import LOCAL, BufferTable, LayoutError, Memory, Route, Stream
from wsync.checkpoints.safetensors_layout import Checkpoint, FilePiece, State
from wsync.engine.destination import LoadTarget
from wsync.engine.receiver import Receiver
from wsync.machine.deadline import Deadline

# what the checkpoint holds -> what the worker keeps of it
Targets = Callable[[Mapping[str, tuple[int, ...]]], LoadTarget]

_PIECE_NBYTES: Final = 16 << 20
_SLOTS: Final = 2


def load(
    folder: str | os.PathLike[str],
    targets: Targets,
    receiver: Receiver,
    *,
    threads: int = 1,
    state: State | None = None,
    timeout: float,
) -> None:
    """Replaces every weight of a worker by those of a checkpoint.

    state: what its files have to be, where several workers load it: `Checkpoint.state`.

    All that can be wrong with the files is found before the first byte is written; after that,
    a worker that fails is inconsistent until it is updated again.

    Raises:
        SystemCallError, LayoutError: the files cannot be read, were not written to their end, or
            do not fit the parameters; LayoutError, too, if they are written to meanwhile.
        DeadlineError: the copy took longer than `timeout` seconds.
        StateError: another update is running.
    """
    deadline = Deadline(timeout)
    checkpoint = Checkpoint(folder)
    if state is not None and checkpoint.state != state:
        raise LayoutError(f"{os.fspath(folder)}: was changed while workers came to read it")
    with checkpoint.opened() as descriptors:
        shapes = {name: place.shape for name, place in checkpoint.places.items()}
        found = targets(shapes)
        layout, destinations = found.layout(), found.buffers()
        layout.check_apart(destinations)
        stored, pieces = checkpoint.pieces(_PIECE_NBYTES)
        reading = _Reading(Route(stored, layout), pieces, threads)
        try:
            with receiver.state.replacing(f"loading {os.fspath(folder)}"):
                reading.run(checkpoint, descriptors, destinations, deadline)
                found.check_places()
                found.complete()
                checkpoint.check()
        finally:
            reading.close()


class _Reading:
    """Reads pieces of files in turn while those before are copied to where they go.

    They are read, not mapped: a file that is cut short meanwhile is an error, and no signal.
    """

    def __init__(self, route: Route, pieces: Sequence[FilePiece], threads: int) -> None:
        self._route = route
        self._pieces = pieces
        self._wanted = [i for i in range(route.buffer_count) if route.nbytes(i)]
        nbytes = max((pieces[i].nbytes for i in self._wanted), default=1)
        self._slots = [Memory(nbytes) for _ in range(_SLOTS)]
        spans = [(0, 0)] * len(pieces)
        for turn, i in enumerate(self._wanted):
            spans[i] = (self._slots[turn % _SLOTS].address, pieces[i].nbytes)
        self._sources = BufferTable(spans, owner=self._slots)
        self._streams = [Stream(threads) for _ in range(_SLOTS)]

    def run(
        self,
        checkpoint: Checkpoint,
        descriptors: Sequence[int],
        destinations: BufferTable,
        deadline: Deadline,
    ) -> None:
        for turn, i in enumerate(self._wanted):
            stream = self._streams[turn % _SLOTS]
            stream.synchronize(deadline.left)
            with memoryview(self._slots[turn % _SLOTS]) as slot:
                checkpoint.read(descriptors, self._pieces[i], slot)
            stream.copy(self._route, i, LOCAL, self._sources, destinations)
        for stream in self._streams:
            stream.synchronize(deadline.left)

    def close(self) -> None:
        for stream in self._streams:
            stream.abandon()
            stream.close()
