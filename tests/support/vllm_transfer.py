"""Run as a module where vLLM is: a trainer of two ranks that updates a server through vLLM's own
weight transfer, with wsync's backend and vLLM's client for servers.

    python -m support.vllm_transfer URL WORKERS FOLDER VERSION OUT

WORKERS: of the server; FOLDER: the checkpoint of what it is updated to, of which each rank has a
part; VERSION: what that is called; OUT: a file that has a free port, and in the end the bytes
delivered.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

import wsync
from wsync.vllm.weight_transfer_engine import TrainerInitInfo

RANKS = 2
OPTIONS = wsync.Options(progress=False, deadline=240.0)


class Share(WeightSource):  # type: ignore[misc]
    """Every second tensor of a checkpoint, and the norms, which all ranks have."""

    def __init__(self, folder: Path, rank: int) -> None:
        whole = load_file(folder / "model.safetensors")
        self.tensors = {
            name: tensor
            for place, (name, tensor) in enumerate(sorted(whole.items()))
            if "norm" in name or place % RANKS == rank
        }

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def run(rank: int, url: str, workers: str, folder: str, version: str, out: str) -> None:
    meeting = dist.TCPStore("127.0.0.1", int(Path(out).read_text()), RANKS, rank == 0)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=rank, workers=int(workers), options=OPTIONS),
        client=HTTPVLLMWeightSyncClient(url),
        source=Share(Path(folder), rank),
    )
    report = engine.send_weights(version)
    engine.shutdown()
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(str(report.delivered_nbytes))


def main() -> None:
    given = sys.argv[1:]
    other = multiprocessing.get_context().Process(target=run, args=(1, *given))
    other.start()
    run(0, *given)
    other.join()
    if other.exitcode:
        Path(given[-1]).write_text(f"rank 1 has ended with {other.exitcode}")


if __name__ == "__main__":
    main()
