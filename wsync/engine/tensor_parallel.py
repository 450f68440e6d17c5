"""One engine of several tensor-parallel worker processes with fused, sharded parameters.

`TensorParallelEngine` starts the workers and is the engine's handle: it has the methods of
wsync.handles.EngineHandle.  Each worker declares the boxes that it keeps, so that the trainer
delivers those and nothing else; `delivery="full"` asks for whole tensors instead, which every
worker then cuts itself, as stock engines do.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from wsync import control, payload
from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    PeerClosedError,
    RemoteError,
    StateError,
    WsyncError,
)
from wsync.engine.child import Child
from wsync.engine.loaders import LayoutLoader, Loader, ModuleLoader
from wsync.engine.receiver import Receiver
from wsync.engine.sharded import ShardedModel

DELIVERIES: Final = ("needed", "full")
_GROUP_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.2


class TensorParallelEngine:
    """An engine of `tp` worker processes, and its handle.

    config: a transformers config (llama, qwen2, qwen3, qwen3_moe).  experts: "tp" cuts every
    expert, "ep" deals them out.  Weights are random until the first update.  Close it, or use
    `with`; the workers end with this process.
    """

    def __init__(
        self,
        config: Any,
        *,
        tp: int = 2,
        experts: str = "tp",
        dtype: str = "float32",
        delivery: str = "needed",
        name: str = "tensor-parallel",
        seed: int = 0,
        timeout: float = 120.0,
    ) -> None:
        if delivery not in DELIVERIES:
            raise InvalidArgumentError(f"delivery {delivery!r}: one of {', '.join(DELIVERIES)}")
        if tp < 1:
            raise InvalidArgumentError(f"tp {tp}: at least 1")
        self.name = name
        self.workers = tp
        self.load_formats = (control.LOAD_FORMAT,)
        self.weight_version = "default"
        self.paused = False
        self._config = config
        self._lock = threading.Lock()
        self._sequence = 0
        self._children: list[Child] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-tp-")
        settings = {
            # plain values: a worker need not import transformers
            "config": SimpleNamespace(**{**config.to_dict(), "model_type": config.model_type}),
            "tp": tp,
            "experts": experts,
            "dtype": dtype,
            "delivery": delivery,
            "seed": seed,
            "store": os.path.join(self._folder.name, "store"),
        }
        try:
            for rank in range(tp):
                self._start(rank)
            self._call("start", [{**settings, "rank": rank} for rank in range(tp)], timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorParallelEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def close(self) -> None:
        """Ends the workers."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.close()
        self._folder.cleanup()

    # --- the handle -------------------------------------------------------------------------

    def pause(self, mode: str, timeout: float) -> None:
        self._call("ping", None, timeout)
        self.paused = True

    def flush(self, timeout: float) -> None:
        self._call("ping", None, timeout)

    def resume(self, timeout: float) -> None:
        """RemoteError while a worker's weights are inconsistent."""
        self._check_consistent(timeout)
        self.paused = False

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        if len(payloads) != self.workers:
            raise InvalidArgumentError(
                f"engine {self.name}: {len(payloads)} payloads for {self.workers} workers"
            )
        self._call("update", [(data, load_format) for data in payloads], timeout)
        if weight_version is not None:
            self.weight_version = str(weight_version)

    def model_info(self, timeout: float) -> dict[str, Any]:
        reasons = [reason for reason in self._call("reason", None, timeout) if reason]
        return {
            "weight_version": self.weight_version,
            "tp_size": self.workers,
            "model_type": self._config.model_type,
            "consistent": not reasons,
            "reason": "; ".join(reasons),
        }

    # --- what a user looks at ---------------------------------------------------------------

    def logits(self, ids: Sequence[int], timeout: float = 60.0) -> torch.Tensor:
        """fp32 logits [len(ids), vocab] of one prompt."""
        self._check_consistent(timeout)
        data, shape = self._call("logits", [list(ids)] * self.workers, timeout)[0]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)

    def generate(
        self, ids: Sequence[int], *, max_new_tokens: int = 16, timeout: float = 60.0
    ) -> list[int]:
        """Greedy continuation of a prompt; StateError while the engine is paused."""
        if self.paused:
            raise StateError(f"engine {self.name}: generation is paused")
        tokens = list(ids)
        deadline = time.monotonic() + timeout
        for _ in range(max_new_tokens):
            left = deadline - time.monotonic()
            tokens.append(int(self.logits(tokens, left)[-1].argmax()))
        return tokens[len(ids) :]

    def weights(self, timeout: float = 60.0) -> dict[str, torch.Tensor]:
        """Whole Hugging Face tensors put together from the workers' live parameters.

        LayoutError where workers that hold the same elements disagree, or where an element is
        held by none.
        """
        whole: dict[str, torch.Tensor] = {}
        held: dict[str, torch.Tensor] = {}
        for rank, pieces in enumerate(self._call("pieces", None, timeout)):
            for name, dtype, shape, start, extent, data in pieces:
                kind: torch.dtype = getattr(torch, dtype)
                values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                values = values.view(kind).reshape(extent).view(_bits(kind))
                if name not in whole:
                    whole[name] = torch.zeros(shape, dtype=kind)
                    held[name] = torch.zeros(shape, dtype=torch.bool)
                box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
                target, known = whole[name].view(_bits(kind))[box], held[name][box]
                if not torch.equal(target[known], values[known]):
                    raise LayoutError(f"{name}: worker {rank} disagrees with an earlier one")
                target.copy_(values)
                known.fill_(True)
        for name, known in held.items():
            if not known.all():
                raise LayoutError(f"{name}: {int((~known).sum())} elements are on no worker")
        return whole

    # --- the workers ------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "wsync.engine.tensor_parallel"]
        # gloo over the loopback interface: the workers are on this host
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        with theirs:
            child = Child(
                [*command, str(theirs.fileno())],
                f"{self.name} worker {rank}",
                environment=environment,
                pass_fds=[theirs.fileno()],
            )
        self._children.append(child)
        self._pipes.append(ours)

    def _check_consistent(self, timeout: float) -> None:
        info = self.model_info(timeout)
        if not info["consistent"]:
            raise RemoteError(f"engine {self.name}: {info['reason']}")

    def _call(self, what: str, arguments: Sequence[Any] | None, timeout: float) -> list[Any]:
        """Asks every worker and returns their answers.  Fails with the first that fails, dies
        or is late; answers that come after that are dropped."""
        where = f"engine {self.name}: {what}"
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise DeadlineError(f"{where}: another call did not end within {timeout:g} s")
        try:
            self._sequence += 1
            for rank, pipe in enumerate(self._pipes):
                argument = None if arguments is None else arguments[rank]
                try:
                    pipe.send((self._sequence, what, argument))
                except OSError as error:
                    raise self._gone(where, rank) from error
            answers: dict[int, Any] = {}
            while len(answers) < self.workers:
                missing = [rank for rank in range(self.workers) if rank not in answers]
                if time.monotonic() >= deadline:
                    late = ", ".join(map(str, missing))
                    raise DeadlineError(f"{where}: worker {late}: no answer within {timeout:g} s")
                self._collect(where, missing, answers, deadline - time.monotonic())
            return [answers[rank] for rank in range(self.workers)]
        finally:
            self._lock.release()

    def _collect(
        self, where: str, missing: Sequence[int], answers: dict[int, Any], remaining: float
    ) -> None:
        pipes = {self._pipes[rank]: rank for rank in missing}
        for ready in wait_for(list(pipes), min(max(remaining, 0.0), _POLL_SECONDS)):
            assert isinstance(ready, Connection)
            rank = pipes[ready]
            try:
                sequence, success, answer = ready.recv()
            except (EOFError, OSError) as error:
                raise self._gone(where, rank) from error
            if sequence != self._sequence:
                continue  # of a call that was given up
            if not success:
                raise RemoteError(f"{where}: {answer}")
            answers[rank] = answer

    def _gone(self, where: str, rank: int) -> PeerClosedError:
        child = self._children[rank]
        with contextlib.suppress(Exception):
            child.process.wait(1.0)
        return PeerClosedError(
            f"{where}: worker {rank} ended with {child.process.poll()}: {child.log()}"
        )


class _Worker:
    """A worker process: its share of the model, its receiver."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.rank: int = settings["rank"]
        self.model = ShardedModel(
            settings["config"],
            rank=self.rank,
            tp=settings["tp"],
            experts=settings["experts"],
            dtype=getattr(torch, settings["dtype"]),
            seed=settings["seed"],
        )
        if settings["tp"] > 1:
            dist.init_process_group(
                "gloo",
                init_method="file://" + settings["store"],
                rank=self.rank,
                world_size=settings["tp"],
                timeout=timedelta(seconds=_GROUP_SECONDS),
            )
        loader: Loader
        if settings["delivery"] == "needed":
            loader = LayoutLoader(self.model.layout(), list(self.model.tensors.values()))
        else:
            loader = ModuleLoader(self.model)
        self.receiver = Receiver(loader, worker=self.rank)

    def answer(self, what: str, argument: Any) -> Any:
        """The answer to one question; exceptions become the text of a failure."""
        if what == "update":
            return self._update(*argument)
        if what == "reason":
            return "" if self.receiver.consistent else self.receiver.reason
        if what == "logits":
            logits = self.model.logits(argument).float().contiguous()
            # plain bytes: torch would share tensors by descriptors
            return (logits.numpy().tobytes(), tuple(logits.shape)) if self.rank == 0 else None
        if what == "pieces":
            return [self._piece(piece) for piece in self.model.pieces]
        if what in ("ping", "start"):
            return None
        raise InvalidArgumentError(f"unknown question {what!r}")

    def _update(self, data: bytes, load_format: str | None) -> str:
        content: Any = payload.load(data)
        if load_format == control.LOAD_FORMAT:
            success, text = self.receiver.handle(payload.control_bytes(content))
            if not success:
                raise RemoteError(text)
            return text
        if load_format == "flattened_bucket":
            from wsync.bucket import FlattenedTensorBucket

            content = FlattenedTensorBucket(
                flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
            ).reconstruct_tensors()
        elif load_format is not None:
            raise InvalidArgumentError(f"unknown load_format {load_format!r}")
        self.model.load_weights(content)
        return "Success"

    def _piece(self, piece: Any) -> tuple[Any, ...]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        values = self.model.box(piece).contiguous().reshape(-1).view(torch.uint8)
        data = values.numpy().tobytes()
        return piece.name, dtype, piece.shape, piece.start, piece.extent, data


def _serve(pipe: "Connection[Any, Any]") -> None:
    """A worker's main loop: until the parent closes the pipe."""
    worker: _Worker | None = None
    while True:
        try:
            sequence, what, argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if what == "start":
                worker = _Worker(argument)
            assert worker is not None
            reply = (sequence, True, worker.answer(what, argument))
        except WsyncError as error:
            reply = (sequence, False, str(error))
        except Exception as error:
            who = "worker" if worker is None else f"worker {worker.rank}"
            reply = (sequence, False, f"{who}: {type(error).__name__}: {error}")
        pipe.send(reply)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """Integers of the same size: bytes are compared, not numbers."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


if __name__ == "__main__":
    torch.set_num_threads(1)
    _serve(Connection(int(sys.argv[1])))
