"""A trainer rank that delivers whole tensors to one worker, written with the exporter alone."""

from collections.abc import Mapping, Sequence

import torch

from wsync._core import Exporter, Layout, LayoutBuilder, Memory, Stream, describe, pack
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
        builder = LayoutBuilder()
        self.offsets: dict[str, int] = {}
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
                self.offsets[name] = offset
                offset += aligned(tensor.nbytes)
        return builder.build()

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
        for round in range(len(self.rounds)) if rounds is None else rounds:
            self.exporter.acquire(round - 2 if round >= 2 else -1, None, SECONDS)
            table = describe([tensors[name] for name in self.rounds[round]])
            offsets = [self.offsets[name] for name in self.rounds[round]]
            pack(table, self.ring.address, self.ring.nbytes, offsets, self.stream)
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
