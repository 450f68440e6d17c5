"""One trainer rank's codes and scales: their memory, and how it is filled."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Final

import torch

from wsync import _core
from wsync.exchange.trainer_group import TrainerGroup
from wsync.machine.device import find, of, settle
from wsync.report import Report

_ENTRY_NBYTES: Final = 4  # a float32
_MERGED_NBYTES: Final = 1 << 20  # of the table, in one step


class Image:
    """A rank's codes and scales, made anew at the start of every update.

    Each rank quantises what it holds.  If several ranks hold elements of one block, each of these
    ranks first finds its own largest element.  Then all of them use the largest of these elements.
    No weight moves.

    Args:
        model: the merged layout of all ranks.
        rank: this rank.
        buffers: the number of this rank's parameters, also those that are not in the model.
        rules: the tensors to quantise, how, and the tensors that result; the same on all ranks.
        threads: the number of host threads that quantise.

    Raises:
        InvalidArgumentError, UnsupportedError: a tensor cannot be quantised by its rule; the text
            names it.
    """

    def __init__(
        self,
        model: _core.Layout,
        rank: int,
        buffers: int,
        rules: Sequence[_core.QuantiseRule],
        threads: int,
    ) -> None:
        self._quantiser = _core.Quantiser(model, rank, buffers, rules)
        self._threads = threads
        self._where: torch.device | None = None
        self._stream: _core.Stream | None = None
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def layout(self) -> _core.Layout:
        """What the rank delivers: codes and scales are in the buffers after its parameters."""
        return self._quantiser.layout

    @property
    def nbytes(self) -> int:
        return self._quantiser.image_nbytes

    def describe(self, report: Report) -> None:
        """Reports the bytes of the image and of the weights that it is made from."""
        stats = self._quantiser.stats
        report.image_nbytes = self.nbytes
        report.quantised_nbytes = stats["quantised_nbytes"]
        report.repeated_nbytes = stats["repeated_nbytes"]

    def fill(
        self, weights: _core.TensorTable, group: TrainerGroup, timeout: float
    ) -> _core.TensorTable:
        """Quantises; returns the current tensors of the buffers of `layout`.  All ranks call it
        together.

        Args:
            weights: the rank's parameters.
            group: the ranks.
            timeout: seconds that each of two passes over the weights may take.
        """
        try:
            return self._fill(weights, group, timeout)
        except BaseException:
            self.close()  # the stream may still run
            raise

    def _fill(
        self, weights: _core.TensorTable, group: TrainerGroup, timeout: float
    ) -> _core.TensorTable:
        stream, image, amaxes = self._made(weights)
        results = _core.describe([image, amaxes], ["codes and scales", "amaxes"], gpu=True)
        sources, spans = _core.BufferTable.of(weights), _core.BufferTable.of(results)
        if len(amaxes):
            amaxes.zero_()
        settle(stream.device, timeout, group.check)  # some stream may still be writing the weights
        if len(amaxes):
            stream.quantise(self._quantiser, sources, spans, codes=False)
            stream.synchronize(timeout, group.check)
            _merge(amaxes, group)
            settle(stream.device, timeout, group.check)
        stream.quantise(self._quantiser, sources, spans, codes=True)
        stream.synchronize(timeout, group.check)
        ends = self._quantiser.ends
        buffers = [image[a:b] for a, b in itertools.pairwise([0, *ends])]
        names = ["codes and scales"] * len(buffers)
        return weights.joined(_core.describe(buffers, names, gpu=True))

    def park(self) -> None:
        """Gives the memory back until the next update."""
        self._memory = None

    def close(self) -> None:
        stream, self._stream = self._stream, None
        self.park()
        if stream is not None:
            stream.abandon()
            stream.close()

    def _made(self, weights: _core.TensorTable) -> tuple[_core.Stream, torch.Tensor, torch.Tensor]:
        """A stream, the image and the table of amaxes, on the device of the weights."""
        where = torch.device("cpu" if weights.gpu is None else f"cuda:{weights.gpu}")
        if self._where != where:
            self.close()
            self._where = where
        if self._memory is None:
            with torch.inference_mode(False):  # later updates may write to it in another mode
                self._memory = self._make(where)
        if self._stream is None:
            self._stream = _core.Stream(self._threads, find(of(weights)))
        return self._stream, *self._memory

    def _make(self, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        image = _bytes(self.nbytes, where)
        if constants := self._quantiser.constants:
            known = torch.frombuffer(bytearray(constants), dtype=torch.uint8)
            image[: len(constants)] = known
        table = _bytes(self._quantiser.amax_count * _ENTRY_NBYTES, where)
        return image, table.view(torch.float32)


def _merge(amaxes: torch.Tensor, group: TrainerGroup) -> None:
    """Replaces each amax by the largest of all ranks, one part of the table at a time.  It compares
    the bits as integers, which order magnitudes correctly, with NaN above all.  Compared as floats,
    subnormal numbers would be 0 in a process that flushes them."""
    if group.size == 1:
        return
    flat, step = amaxes.view(torch.int32), _MERGED_NBYTES // 4
    for begin in range(0, len(flat), step):
        part = flat[begin : begin + step]
        mine = part.cpu()
        merged = mine.clone()
        for data in group.all_gather(ctypes.string_at(mine.data_ptr(), mine.nbytes)):
            theirs = torch.frombuffer(bytearray(data), dtype=torch.int32)
            merged = torch.maximum(merged, theirs)
        part.copy_(merged)


def _bytes(nbytes: int, where: torch.device) -> torch.Tensor:
    """Allocates memory of a device; raises NoMemoryError if the device has none left."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=where)
    try:
        if where.type == "cpu":  # all pages at once, if the machine has them
            return torch.frombuffer(_core.Memory(nbytes), dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device=where)
    except (MemoryError, torch.OutOfMemoryError) as error:
        text = f"no memory for {nbytes} bytes of codes and scales: {error}"
        raise _core.NoMemoryError(text) from error
