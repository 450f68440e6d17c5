"""Every weight of Qwen3-30B-A3B from a trainer process to an engine process on the same GPU.

wsync with rounds of 64 MiB to 1 GiB, and read in place; and the stock way in torch: a fresh cat per
bucket of 512 MiB, torch's pickle of it, a copy_ per tensor in the engine, and ipc_collect and
empty_cache per bucket.  Both sides make the weights from seeds on the GPU, so that the engine
compares every byte with what it ought to have.  In a dry run the weights are in host memory and
only the rings are the GPU's.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from support.weights_only_engine import BareWorker, ProcessEngine, Shapes

import wsync
from benchmarks import peers, plan_shapes
from benchmarks.bucket import bucket_class
from benchmarks.gpu_device import Gpu
from wsync import _core
from wsync.demo.engines.model_worker import ModelWorker
from wsync.engine.ring_loaders import LayoutLoader
from wsync.machine import device
from wsync.machine.device import VARIABLE
from wsync.machine.temporary_environment import variable

REPEATS = 3
ROUNDS = (64 << 20, 256 << 20, 1 << 30)
DRY_ROUNDS = (1 << 20,)
ROOM = 8 << 30  # beside the weights of both: rings, the stock way's buckets, two contexts
TAKEN = 1.12  # by torch's allocator for each byte of these weights
_SECONDS = 600.0

Ways = dict[str, Callable[[], object]]


def run(gpu: Gpu, layers: int) -> Iterator[dict[str, Any]]:
    shapes = _shapes(gpu, layers)
    nbytes = _nbytes(shapes)
    weights = make(shapes, 0, _where(gpu))
    for worker in (_Worker, _FusedWorker):
        # for weights in host memory
        with variable(VARIABLE, gpu.device.uuid), _Engine(shapes, _where(gpu), worker) as engine:
            peer, seconds, good = "none: the stock way: " + gpu.torch, 0.0, True
            if not gpu.torch:
                origin, kind = bucket_class()
                peer = f"torch IPC, {origin}"
                way = functools.partial(_stock, engine, weights, kind)
                seconds, good = _measure(gpu, engine, weights, way)
            for case, options in _deliveries(gpu):
                known = (peer, seconds, good)
                yield _update(gpu, engine, weights, case, options, nbytes, known)


def _deliveries(gpu: Gpu) -> Iterator[tuple[str, wsync.Options]]:
    """The ways of wsync, by name."""
    common = wsync.Options(progress=False, deadline=_SECONDS, delivery="wsync")
    for nbytes in DRY_ROUNDS if gpu.dry else ROUNDS:
        yield f"{nbytes >> 20} MiB", dataclasses.replace(common, round_nbytes=nbytes)
    yield "direct", dataclasses.replace(common, delivery="direct")


def _shapes(gpu: Gpu, layers: int) -> Shapes:
    """The model, with as many layers as the GPU holds twice."""
    if gpu.dry:
        chosen = plan_shapes.qwen3_moe(1, 4, 64, 512)
    else:
        total = torch.cuda.get_device_properties(gpu.device.ordinal).total_memory
        while layers > 1 and 2 * TAKEN * _nbytes(_of(plan_shapes.qwen3_moe(layers))) > total - ROOM:
            layers -= 1
        chosen = plan_shapes.qwen3_moe(layers)
    return _of(chosen)


def _of(weights: list[plan_shapes.Weight]) -> Shapes:
    return {weight.name: (weight.shape, torch.bfloat16) for weight in weights}


def _nbytes(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())


def _where(gpu: Gpu) -> str:
    return f"cuda:{gpu.device.ordinal}" if not gpu.torch else "cpu"


def make(shapes: Shapes, seed: int, where: str) -> dict[str, torch.Tensor]:
    """Weights that two processes make alike."""
    return {name: _tensor(*facts, seed, i, where) for i, (name, facts) in enumerate(shapes.items())}


def _tensor(shape: Any, dtype: torch.dtype, seed: int, index: int, where: str) -> torch.Tensor:
    generator = torch.Generator(where).manual_seed(seed * 1_000_003 + index)
    options: dict[str, Any] = {"dtype": torch.int16, "generator": generator, "device": where}
    return torch.randint(-30000, 30000, tuple(shape), **options).view(dtype)


def _settle(gpu: Gpu) -> None:
    if not gpu.torch:
        torch.cuda.synchronize()


def _measure(
    gpu: Gpu, engine: _Engine, weights: dict[str, torch.Tensor], way: Callable[[], object]
) -> tuple[float, bool]:
    """Median seconds of one update, and whether all bytes came, first and last."""
    engine.fill(0xA5)
    way()
    verified = engine.right(0)
    times = []
    for _ in range(REPEATS):
        _settle(gpu)
        start = time.perf_counter()
        way()
        engine.settle()
        times.append(time.perf_counter() - start)
    engine.fill(0x5A)
    way()
    return statistics.median(times), verified and engine.right(0)


def _update(
    gpu: Gpu,
    engine: _Engine,
    weights: dict[str, torch.Tensor],
    case: str,
    options: wsync.Options,
    nbytes: int,
    other: tuple[str, float, bool],
) -> dict[str, Any]:
    with wsync.connect(weights, [engine], options=options) as sync:
        reports: list[Any] = []
        seconds, verified = _measure(gpu, engine, weights, lambda: reports.append(sync.update()))
        report = reports[-2]
    gc.collect()
    peer, peer_seconds, good = other
    (path,) = report.paths.values()
    passes = 2 if path == "direct" else 4  # read and written, once or twice
    rate = passes * nbytes / seconds / 1e9
    return gpu.row(
        f"update: {len(weights)} to {engine.tensors} tensors, {case}",
        nbytes,
        seconds,
        peer=peer,
        peer_seconds=peer_seconds or seconds,
        verified=verified and good,
        figure=f"by {path}, {report.rounds} rounds, {rate:.0f} GB/s of the GPU's memory",
        phases=dict(report.phases),
        ring_nbytes=report.ring_nbytes,
    )


# --- the stock way -------------------------------------------------------------------------------


def _stock(engine: _Engine, weights: dict[str, torch.Tensor], kind: Any) -> None:
    for bucket in peers.buckets(weights.items()):
        flattened = kind(named_tensors=bucket)
        payload: Any = {
            "flattened_tensor": flattened.get_flattened_tensor(),
            "metadata": flattened.get_metadata(),
        }
        data = bytes(ForkingPickler.dumps(payload))
        torch.cuda.current_stream().synchronize()  # as SGLang's monkey patch of torch has it done
        engine.take(data)
        del flattened, payload
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class _Engine(ProcessEngine):
    """Bare weights on a device, which take stock buckets as well."""

    def __init__(self, shapes: Shapes, where: str, worker: type[_Worker]) -> None:
        super().__init__(shapes, name="gpu", worker=worker, timeout=_SECONDS)
        kind = bucket_class()[1]
        key = bytes(current_process().authkey)  # torch shares tensors among those who know it
        plain = {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
        self.tensors: int = self._call("place", [(key, kind, plain, where)], _SECONDS)[0]

    def take(self, payload: bytes) -> None:
        self._call("bucket", [payload], _SECONDS)

    def settle(self) -> None:
        """Returns when the GPU has done what the engine has asked of it."""
        self._call("settle", None, _SECONDS)

    def right(self, seed: int) -> bool:
        """Whether every byte is what `make` makes of the seed."""
        answer: bool = self._call("right", [seed], _SECONDS)[0]
        return answer


class _Worker(BareWorker):
    """A tensor for each of the trainer's, as transformers has them."""

    def __init__(self, *, shapes: Shapes, threads: int) -> None:
        super().__init__(shapes=shapes, threads=threads, device=str(_device()))
        self.kept = len(self.tensors)

    def place(self, key: bytes, kind: Any, shapes: Shapes, where: str) -> int:
        current_process().authkey, self._kind, self._shapes, self._where = key, kind, shapes, where
        return self.kept

    def bucket(self, payload: bytes) -> None:
        peers.load(payload, self.tensors, self._kind)

    def settle(self) -> None:
        if self._where != "cpu":
            torch.cuda.synchronize()

    def right(self, seed: int) -> bool:
        return all(
            torch.equal(
                self.tensors[name].view(torch.int16),
                _tensor(*facts, seed, index, self._where).view(torch.int16),
            )
            for index, (name, facts) in enumerate(self._shapes.items())
        )


class _FusedWorker(_Worker):
    """The experts of a layer in two tensors, as SGLang and vLLM have them."""

    def __init__(self, *, shapes: Shapes, threads: int) -> None:
        places = defaultdict[str, list[str]](list)
        for name in shapes:
            layer, experts, rest = name.partition(".experts.")
            which = "w2" if "down_proj" in rest else "w13"
            places[f"{layer}.{which}" if experts else name].append(name)
        builder, fused = _core.LayoutBuilder(), []
        self.tensors = {}
        for names in places.values():
            sizes = [torch.Size(shapes[name][0]).numel() for name in names]
            with _device():
                fused.append(torch.zeros(sum(sizes), dtype=torch.bfloat16))
            parts = zip(names, fused[-1].split(sizes), strict=True)
            self.tensors |= {name: part.view(*shapes[name][0]) for name, part in parts}
            for name in names:
                view = self.tensors[name]
                shape, offset = tuple(view.shape), 2 * int(view.storage_offset())
                box = (name, "bfloat16", shape, [0] * len(shape), shape, len(fused) - 1, offset)
                builder.add_shard(*box, [2 * stride for stride in view.stride()])
        ModelWorker.__init__(self, LayoutLoader(builder.build(), fused, threads=threads))
        self.kept = len(fused)


def _device() -> torch.device:
    """Where the engine's weights are made."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(f"cuda:{device.find(device.wanted()).ordinal}")
