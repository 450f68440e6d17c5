"""What a user can choose about updates."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NoReturn

from wsync import _core
from wsync.machine.deadline import check_seconds

_CHOICES: Final = {
    "stock_memory": ("auto", "host", "gpu"),
    "delivery": ("auto", "wsync", "direct", "stock", "distributed"),
    "broadcast": ("auto", "wsync", "bucket", "tensor"),
    "backend": ("auto", "gloo", "nccl"),
    "exchange": ("auto", "shared", "gloo", "nccl"),
    "pause_mode": ("abort", "retract", "in_place"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices that hold for all updates of a connection.

    Attributes:
        deadline: seconds that an engine worker waits for anything, and that engines have to say
            what they are when a trainer connects, to pause or to go on; trainer ranks wait 5 s
            longer for each other, and for the request that is open during an update 10 s longer.
        round_nbytes: bytes that move to one worker in one step; 0 chooses: 32 MiB on the host; on
            GPUs 1 GiB where each has at least 16 GiB free for each worker that its rank serves when
            a trainer connects, and nothing is parked and no engine is remote; else 256 MiB.
        ring_nbytes: bytes of the ring of one worker; 0 chooses: four rounds, or the model if that
            is less.
        bucket_nbytes: bytes of a round where some engine runs without wsync and takes one request
            per bucket.  Experts that a checkpoint has in one larger tensor (Qwen3.5-MoE) are sent
            one by one; another tensor of more bytes has a bucket of its own, and a warning.
        stock_memory: where buckets for engines without wsync lie when the weights are on a GPU:
            "host", a file of /dev/shm that every worker reads; "gpu", memory of the GPU of trainer
            rank 0, by CUDA's interprocess handles: every worker has to see that GPU and /dev/shm,
            under one kernel and IPC namespace, or its server ends; "auto" takes "gpu" for an
            engine of one worker that engine_gpu_offsets puts on that GPU, and else "host".
        delivery: "wsync" (engines run wsync's receiver), "stock" (they take flattened buckets),
            "distributed" (they are remote: see `broadcast`), or "auto", which asks each engine,
            and is "direct" for trainer ranks all of whose weights lie in host memory that can be
            lent, in pieces for which processes have descriptors enough.
            "direct" is "wsync" for trainers whose weights lie in memory that other processes can
            map: of the host (`model.share_memory()`), or of a GPU (`wsync.exportable`).  Each
            worker on a rank's host copies them from there to its parameters, and keeps that memory
            mapped until an update finds them elsewhere.  What cannot be read there comes through
            its ring in the same update, and is named once.
        broadcast: what remote engines take: "wsync" (they run wsync's receiver, and each worker is
            sent what it keeps), a "bucket" in one broadcast, or one for each "tensor" (slime's
            actors of 0.2.2, whose update_weights_from_distributed has no load_format); "auto"
            asks each engine: wsync or bucket.
        backend: of the groups that buckets are broadcast in: "gloo", "nccl", or "auto".
        pause_mode: what an update does to running requests.  "abort" ends them, and they return the
            tokens that they have.  "retract" keeps them and computes their keys and values anew
            with the new weights.  "in_place" keeps them with the keys and values of the old
            weights.  See "Running requests" in wsync/guide/engines.md.
        flush_cache: whether engines empty their prefix cache before the update.  "in_place" needs
            False.  With False, SGLang reuses prefixes that old weights have computed, in every
            mode.  To avoid that, name the weight version in each request's `extra_key`: SGLang
            shares a prefix only between requests with the same `extra_key`.
        exchange: "auto", "shared" (all trainer ranks on one host, with GPUs that reach each other's
            memory, and no remote engine runs wsync's receiver), "gloo" or "nccl" (all trainer
            ranks, and remote workers that run wsync's receiver, have a GPU each, and the same
            version of NCCL).
        park: whether the rings of workers on the trainer's hosts, on both sides, and the staging
            of a gloo or nccl exchange give their memory back between updates: for GPUs whose
            memory engine and trainer need for themselves in between (slime's colocate mode).
            Getting it anew costs time in every update, and fails the update where there is none.
            A ring that a loader keeps looking at stays, with a warning.  The memory of codes and
            scales is given back, too (see `quantise`).  Engines that read in place have let go of
            the trainer's memory when an update returns, and map it anew in the next.
        threads: copying threads of one trainer rank, 64 at most; 0 chooses: one, and for weights in
            host memory that a GPU does not reach up to four, by the cores for each GPU.  Weights in
            host memory are quantised by the rank's share of the host's cores, if that is more.
        directory: where sockets live; None for the temporary directory.
        checkpoint: folder of the model's Hugging Face checkpoint, with whose names and shapes the
            trainer's are compared when it connects; slime's updaters take args.hf_checkpoint.  It
            stands for the folder that engines were started from, which is looked for if this is
            None.  "" switches the comparison off.
        keep: tensors that nobody delivers and that stay as engines without wsync's receiver have
            them: names in the checkpoint, or shell patterns of these ("model.visual.*", where "*"
            stands for dots, too).  What the checkpoint has, no trainer rank delivers and this does
            not name is refused.  It withholds nothing: a tensor that is delivered is loaded.
            Engines with wsync's receiver read WSYNC_KEEP in their own environment, and this for
            what only some layers have delivered.
        quantise: how weights are delivered: None as the trainer holds them, a mapping by which they
            are quantised (the quantization_config of a checkpoint's config.json), or "checkpoint",
            as the checkpoint's says, if it has one; a mapping of nothing but "producer"
            and "transform_ue8m0" means the checkpoint's, too.  What is quantised is what has scales
            in the checkpoint; without a folder of tensors, all linear layers but those of its
            lists.  "transform_ue8m0": True packs the scales of FP8 blocks for DeepGEMM, as SGLang
            keeps them on Blackwell.
        retry: of slime's classes: whether an update that fails because an engine was gone,
            restarted or late, or a rank late, is tried once more before slime sees an error.  All
            ranks wait for each other before that, for at most 30 s.
        progress: True or False; None shows a progress bar in a notebook, and where
            stderr is a terminal.
    """

    deadline: float = 120.0
    round_nbytes: int = 0
    ring_nbytes: int = 0
    bucket_nbytes: int = 512 << 20
    stock_memory: str = "auto"
    delivery: str = "auto"
    broadcast: str = "auto"
    backend: str = "auto"
    pause_mode: str = "abort"
    flush_cache: bool = True
    exchange: str = "auto"
    park: bool = False
    threads: int = 0
    directory: str | None = None
    checkpoint: str | None = None
    keep: Sequence[str] = ()
    quantise: Mapping[str, Any] | str | None = field(default=None, hash=False)
    retry: bool = True
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                self._fail(name, f"is none of {allowed}")
        for name in ("threads", "round_nbytes", "ring_nbytes", "bucket_nbytes"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or isinstance(value, bool):
                self._fail(name, "is no integer")
            object.__setattr__(self, name, operator.index(value))  # numpy's, too
            if value < 0:
                self._fail(name, "is negative")
        if self.threads > _core.MAX_THREADS:
            self._fail("threads", f"is over {_core.MAX_THREADS}")
        check_seconds("deadline", self.deadline)
        for name in ("directory", "checkpoint"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                self._fail(name, "is no text")
            object.__setattr__(self, name, value and os.fspath(value))
        if self.directory:  # engines have another working directory
            object.__setattr__(self, "directory", os.path.abspath(self.directory))
        # None: null in WSYNC_OPTIONS
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep or ())
        if not all(isinstance(name, str) for name in keep):
            self._fail("keep", "is no list of names or patterns, as ['model.visual.*']")
        object.__setattr__(self, "keep", keep)
        if isinstance(self.quantise, Mapping):  # a copy of its own: the caller's may change
            object.__setattr__(self, "quantise", json.loads(json.dumps(self.quantise)))
        elif self.quantise not in (None, "checkpoint"):
            self._fail("quantise", "is no quantization_config, 'checkpoint' or None")

    def _fail(self, name: str, why: str) -> NoReturn:
        raise _core.InvalidArgumentError(f"{name}={getattr(self, name)!r:.200} {why}")

    def refuse(self, without_effect: Mapping[str, str]) -> None:
        """Raises InvalidArgumentError for a choice that has no effect, given by name with what it
        is for."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in without_effect and value != each.default:
                raise _core.InvalidArgumentError(
                    f"{each.name}={value!r} has no effect here: it is for "
                    f"{without_effect[each.name]}"
                )
        if self.pause_mode == "in_place" and self.flush_cache:
            raise _core.InvalidArgumentError(
                "pause_mode='in_place' keeps running requests and their cache: give "
                "flush_cache=False with it"
            )

    @staticmethod
    def named(where: str, given: Any) -> dict[str, Any]:
        """Choices that somebody has written down under these names, at a place that an error
        tells; a text is JSON."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise _core.InvalidArgumentError(f"{where}={given!r:.200}: {error}") from None
        if not isinstance(given, Mapping):
            raise _core.InvalidArgumentError(f"{where}={given!r:.200}: a mapping is wanted")
        known = [each.name for each in fields(Options)]
        for name in given:
            if name not in known:
                raise _core.InvalidArgumentError(
                    f"{where}: no option {name!r}; there are {', '.join(known)}"
                )
        return dict(given)

    @staticmethod
    def of(given: Options | None) -> Options:
        """What a caller has given for options, None for the defaults."""
        if not isinstance(given, Options | None):
            raise _core.InvalidArgumentError(f"options={given!r}: wsync.Options(...) is wanted")
        return Options() if given is None else given

    @property
    def exchange_deadline(self) -> float:
        return self.deadline + 5.0

    @property
    def request_deadline(self) -> float:
        return self.deadline + 10.0


def numbers(name: str, given: Any) -> list[int]:
    """What a caller has given as one number for each engine; `name` is the argument's."""
    try:
        return [operator.index(number) for number in given]
    except TypeError:
        raise _core.InvalidArgumentError(
            f"{name}={given!r}: a list of one integer for each engine is wanted"
        ) from None
