"""A trainer rank that delivers whole tensors to one worker, written with the exporter alone."""

from collections.abc import Mapping, Sequence

import torch

from wsync._core import (
    BufferTable,
    Exporter,
    Layout,
    LayoutBuilder,
    Memory,
    Route,
    Stream,
    describe,
)
from wsync.machine.device import find
from wsync.messages.control import BORROWS, Control

Tensors = Mapping[str, torch.Tensor]
SECONDS = 60.0


def aligned(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Trainer:
    """A trainer rank that delivers whole tensors; rounds[k] are the names in round k.  The ring
    holds two slots, so that a slot is written again while the update runs."""

    def __init__(self, tensors: Tensors, rounds: Sequence[Sequence[str]], session: str = "a1"):
        self.session = session
        self.rounds = rounds
        self.exporter = Exporter()
        sizes = [sum(aligned(tensors[name].nbytes) for name in names) for names in rounds]
        self.slot = max([*sizes, 64])
        self.manifest = self._manifest(tensors)
        self.blob = b""

    def _manifest(self, tensors: Tensors) -> Layout:
        builder, own = LayoutBuilder(), LayoutBuilder()
        self.sent: list[str] = []  # a buffer each, where the trainer has them
        for name, tensor in tensors.items():
            builder.add_tensor(name, dtype_of(tensor), list(tensor.shape))
        for round, names in enumerate(self.rounds):
            offset = round % 2 * self.slot
            for name in names:
                tensor = tensors[name].contiguous()
                strides = [stride * tensor.element_size() for stride in tensor.stride()]
                zeros = [0] * tensor.dim()
                shape = list(tensor.shape)
                builder.add_shard(
                    name, dtype_of(tensor), shape, zeros, shape, round, offset, strides
                )
                own.add_shard(
                    name, dtype_of(tensor), shape, zeros, shape, len(self.sent), 0, strides
                )
                self.sent.append(name)
                offset += aligned(tensor.nbytes)
        manifest = builder.build()
        self.route = Route(own.build(), manifest)
        return manifest

    def control(self, update: int, op: str = "open", deadline: float = SECONDS) -> bytes:
        address = self.exporter.address if op == "open" else ""
        message = Control(
            op=op, session=self.session, update=update, deadline=deadline, address=address
        )
        return message.to_bytes()

    def accept(self) -> None:
        said = self.exporter.accept(SECONDS)
        self.lends = said.startswith(BORROWS)
        self.blob = said.partition(b"\n")[2] if self.lends else said
        device = find(self.exporter.worker_uuid)
        self.ring = Memory(2 * self.slot, device)
        self.stream = Stream(1, device)
        self.exporter.attach(self.ring, self.manifest.to_bytes(), SECONDS)

    def send(self, tensors: Tensors, rounds: range | None = None) -> None:
        sources = BufferTable.of(describe([tensors[name].contiguous() for name in self.sent]))
        rings = BufferTable([(self.ring.address, self.ring.nbytes)] * len(self.rounds), self.ring)
        for round in range(len(self.rounds)) if rounds is None else rounds:
            self.exporter.acquire(round - 2 if round >= 2 else -1, None, SECONDS)
            for name in self.rounds[round]:
                self.stream.copy(self.route, self.sent.index(name), 0, sources, rings)
            self.exporter.post(round, self.stream, SECONDS)

    def update(self, number: int, tensors: Tensors) -> tuple[int, int, int]:
        self.exporter.begin(number, len(self.rounds), SECONDS)
        self.send(tensors)
        self.stream.synchronize(SECONDS)
        receipt = self.exporter.prepared(SECONDS)
        self.exporter.commit(SECONDS)
        return receipt


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
