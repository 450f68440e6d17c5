"""The options of updates."""

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
    "pause_mode": ("auto", "abort", "retract", "in_place"),
    "stage": ("auto", "on", "off"),
    "lost": ("continue", "raise"),
    "verify": ("first", "always", "never"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for all updates of a connection.

    Attributes:
        deadline: seconds that an engine worker waits for any step, and that an engine may take to
            describe itself, to pause or to continue.  Trainer ranks wait 5 s longer for each other,
            and 10 s longer for the request that stays open during an update.
        round_nbytes: bytes that move to one worker in one step.  0 chooses 32 MiB on the host.  On
            GPUs, 0 chooses 1 GiB if `park` is off, no engine is remote, and every GPU has 16 GiB
            free for each worker that its rank serves (at the connection).  If not, 256 MiB.
        ring_nbytes: bytes of one worker's ring.  0 chooses four rounds, or the size of the model if
            that is less.
        bucket_nbytes: bytes of a round if some engine runs without wsync and takes one request
            per bucket.  Experts that a checkpoint has in one larger tensor (Qwen3.5-MoE) are sent
            one by one.  Any other larger tensor gets a bucket of its own, with a warning.
        stock_memory: the memory of buckets for engines without wsync, if weights are on a GPU.
            "host" is a file in /dev/shm that every worker reads.  "gpu" is memory of trainer rank
            0's GPU, shared by CUDA's interprocess handles: every worker must see that GPU and
            /dev/shm, in the same kernel and IPC namespace, or its server ends.  "auto" is "gpu" for
            an engine of one worker that engine_gpu_offsets puts on that GPU, otherwise "host".
        delivery: "wsync": engines run wsync's receiver.  "stock": engines take flattened buckets.
            "distributed": engines are remote (see `broadcast`).  "auto" asks each engine.
            "direct" is "wsync" for weights in memory that other processes can map: host memory
            (`model.share_memory()`) or GPU memory (`wsync.exportable`).  Each worker on a rank's
            host copies these weights to its parameters, and keeps the memory mapped until an update
            finds them elsewhere.  Weights that it cannot read come through its ring in the same
            update, and the log names them once.  "auto" is "direct" for a rank if all its weights
            are in host memory that can be lent, and the processes may open enough descriptors.
        broadcast: what remote engines take.  "wsync": they run wsync's receiver, and each worker is
            sent only what it keeps.  "bucket": one broadcast for each bucket.  "tensor": one
            broadcast for each tensor (for slime's actors of 0.2.2, whose
            update_weights_from_distributed has no load_format).  "auto" asks each engine, and
            chooses "wsync" or "bucket".
        backend: the backend of the groups in which buckets are broadcast: "gloo", "nccl" or "auto".
        pause_mode: what an update does to running requests.  "abort" ends them, and they return the
            tokens that they have.  "retract" keeps them and computes their keys and values anew
            with the new weights.  "in_place" keeps them with the keys and values of the old
            weights.  SGLang with pipeline stages needs "abort".  "auto": "retract" for servers of
            SGLang 0.5.23 and newer without pipeline stages, "abort" for other engines and in
            slime's classes.  See "Running requests" in wsync/guide/engines.md.
        flush_cache: whether engines empty their prefix cache before the update.  "in_place" needs
            False.  With False, SGLang reuses prefixes that old weights have computed, in every
            mode.  To avoid that, name the weight version in each request's `extra_key`: SGLang
            shares a prefix only between requests with the same `extra_key`.
        stage: whether engines take an update's bytes while they generate, and pause only to copy
            them into their weights (see `Sync.stage`).  Each worker then keeps a ring for its whole
            share, in GPU memory if its weights are there; `ring_nbytes` does not limit it.  "off":
            never.  "on": also on the trainer's host, and on GPUs, where this has run on stand-ins
            only; NoMemoryError if a share does not fit.  "auto": if all engines are remote and run
            wsync's receiver with weights in host memory, their load_weights was learnt, the shares
            on a host take at most half of its free memory, and neither `ring_nbytes` nor `park` is
            set.  The first update of a connection is not staged, because engines learn first where
            weights go.
        exchange: how bytes move between trainer ranks.  "shared" needs all ranks on one host, GPUs
            that reach each other's memory, and no remote engine with wsync's receiver.  "nccl"
            needs one GPU for each rank and each remote worker with wsync's receiver, and the same
            version of NCCL for all.  "gloo" always works.  "auto" chooses.
        park: whether wsync frees its memory between updates, for a GPU that engine and trainer
            share (slime's colocate mode).  This frees the rings of workers on the trainer's hosts,
            the staging of a gloo or nccl exchange, and codes and scales (see `quantise`).  Workers
            that read in place unmap the trainer's memory at the end of each update.  Allocating
            again takes time in every update, and the update fails if no memory is left.  A ring
            that a loader still looks at stays, with a warning.
        threads: copying threads of one trainer rank, at most 64.  0 chooses one on the host.  On a
            GPU it chooses up to four, by the number of cores for each GPU; they copy weights in
            host memory that the GPU does not reach.  Quantising weights in host memory may use
            more threads: the rank's share of the host's cores.
        directory: where wsync makes its sockets.  None stands for the temporary directory.
        checkpoint: folder of the model's Hugging Face checkpoint.  When a trainer connects, wsync
            compares the trainer's names and shapes with this checkpoint.  None looks for the folder
            that the engines were started from; "" switches the comparison off.  slime's updaters
            pass args.hf_checkpoint.
        keep: tensors that nobody delivers and that stay as they are in engines without wsync's
            receiver.  Give names in the checkpoint, or shell patterns ("model.visual.*"; "*" also
            matches dots).  A tensor of the checkpoint that is neither delivered nor named here is
            an error.  A delivered tensor is loaded even if it is named here.  Engines with wsync's
            receiver read WSYNC_KEEP in their own environment.  For them, `keep` matters only for
            tensors that the trainer delivers in some layers and not in others.
        quantise: how weights are delivered.  None: as the trainer holds them.  A mapping: quantised
            by this quantization_config (as in a checkpoint's config.json).  "checkpoint": by the
            checkpoint's own, if it has one; a mapping with only "producer" and "transform_ue8m0"
            means this, too.  wsync quantises the tensors that have scales in the checkpoint.
            Without a folder of tensors, it quantises all linear layers except those in the
            mapping's lists.  "transform_ue8m0": True packs the scales of FP8 blocks for DeepGEMM,
            as SGLang keeps them on Blackwell.
        retry: for slime's classes: whether an update that fails because an engine was gone,
            restarted or late, or a rank was late, is tried once more before slime sees the error.
            All ranks wait for each other before the second try, for at most 30 s.
        lost: what `Sync.update` and `stage` do if some of several engines do not answer, are late
            or refuse an update.  "continue": they try again without these engines, and
            `Report.lost` names them.  Later updates take an engine back once it answers; one that
            was late or has refused, once it was restarted.  If two engines that answer refuse an
            update, the error is raised.  A remote engine is left out only if it does not
            answer.  "raise": the error is raised, as `commit` always does.  wsync.verl and slime's
            classes use "raise" unless their options say otherwise; with args.use_fault_tolerance,
            slime's classes use "continue".
        verify: whether workers compare their weights with the trainer's before engines continue,
            as in `Sync.verify`: "first" (after connecting, and again after an error or when engines
            join), "always" or "never".  If tensors differ, a StateError names them, and engines
            stay paused and do not get the version; a single one of several is lost (see `lost`).
            What `stage` has sent is not verified, because the trainer's weights may have changed
            since.
        prometheus: whether rank 0 keeps Prometheus metrics (wsync_...) in the default registry of
            prometheus_client: durations, bytes, the version, the pauses of engines, lost engines
            and failures.  True: the program serves them.  A port: rank 0 serves its registry there,
            to every host and without a password, until its process ends.
        progress: whether to show a progress bar.  None shows one in a notebook, and if stderr is a
            terminal.
    """

    deadline: float = 120.0
    round_nbytes: int = 0
    ring_nbytes: int = 0
    bucket_nbytes: int = 512 << 20
    stock_memory: str = "auto"
    delivery: str = "auto"
    broadcast: str = "auto"
    backend: str = "auto"
    pause_mode: str = "auto"
    flush_cache: bool = True
    stage: str = "auto"
    exchange: str = "auto"
    park: bool = False
    threads: int = 0
    directory: str | None = None
    checkpoint: str | None = None
    keep: Sequence[str] = ()
    quantise: Mapping[str, Any] | str | None = field(default=None, hash=False)
    retry: bool = True
    lost: str = "continue"
    verify: str = "first"
    prometheus: bool | int = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                self._fail(name, f"is not one of {allowed}")
        for name in ("threads", "round_nbytes", "ring_nbytes", "bucket_nbytes"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or isinstance(value, bool):
                self._fail(name, "is not an integer")
            object.__setattr__(self, name, operator.index(value))  # numpy's, too
            if value < 0:
                self._fail(name, "is negative")
        if self.threads > _core.MAX_THREADS:
            self._fail("threads", f"is over {_core.MAX_THREADS}")
        port = self.prometheus
        if not (isinstance(port, bool) or (isinstance(port, int) and 0 < port < 65536)):
            self._fail("prometheus", "is neither True, False nor a port")
        check_seconds("deadline", self.deadline)
        if self.pause_mode == "in_place" and self.flush_cache:
            raise _core.InvalidArgumentError(
                "pause_mode='in_place' keeps running requests and their cache: give "
                "flush_cache=False with it"
            )
        if self.stage == "on" and self.delivery == "direct":
            self._fail("stage", f"does not go with delivery={self.delivery!r}")
        for name in ("directory", "checkpoint"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                self._fail(name, "is not a path")
            object.__setattr__(self, name, value and os.fspath(value))
        if self.directory:  # engines have another working directory
            object.__setattr__(self, "directory", os.path.abspath(self.directory))
        # null in WSYNC_OPTIONS gives None
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep or ())
        if not all(isinstance(name, str) for name in keep):
            self._fail("keep", "is not a list of names or patterns (example: ['model.visual.*'])")
        object.__setattr__(self, "keep", keep)
        if isinstance(self.quantise, Mapping):  # a copy: the caller's may change
            object.__setattr__(self, "quantise", json.loads(json.dumps(self.quantise)))
        elif self.quantise not in (None, "checkpoint"):
            self._fail("quantise", "is not a quantization_config, 'checkpoint' or None")

    def _fail(self, name: str, why: str) -> NoReturn:
        raise _core.InvalidArgumentError(f"{name}={getattr(self, name)!r:.200} {why}")

    def refuse(self, without_effect: Mapping[str, str]) -> None:
        """Raises InvalidArgumentError if an option without effect here is set.
        without_effect: for each option without effect here, what it is for."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in without_effect and value != each.default:
                raise _core.InvalidArgumentError(
                    f"{each.name}={value!r} has no effect here: it is for "
                    f"{without_effect[each.name]}"
                )

    @staticmethod
    def named(where: str, given: Any) -> dict[str, Any]:
        """The options in a mapping or in a JSON text.  where: the name of the place, for errors."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise _core.InvalidArgumentError(f"{where}={given!r:.200}: {error}") from None
        if not isinstance(given, Mapping):
            raise _core.InvalidArgumentError(f"{where}={given!r:.200}: expected a mapping")
        known = [each.name for each in fields(Options)]
        for name in given:
            if name not in known:
                raise _core.InvalidArgumentError(
                    f"{where}: no option {name!r}; there are {', '.join(known)}"
                )
        return dict(given)

    @staticmethod
    def of(given: Options | None) -> Options:
        """Returns the given options.  None stands for the defaults."""
        if not isinstance(given, Options | None):
            raise _core.InvalidArgumentError(f"options={given!r}: expected wsync.Options(...)")
        return Options() if given is None else given

    @property
    def exchange_deadline(self) -> float:
        return self.deadline + 5.0

    @property
    def request_deadline(self) -> float:
        return self.deadline + 10.0


def numbers(name: str, given: Any) -> list[int]:
    """A list of one integer for each engine.  name: the argument's name, for errors."""
    try:
        return [operator.index(number) for number in given]
    except TypeError:
        raise _core.InvalidArgumentError(
            f"{name}={given!r}: expected a list of one integer for each engine"
        ) from None
