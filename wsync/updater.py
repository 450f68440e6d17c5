"""slime's weight-update interface on top of wsync.

The classes take the place of slime's of the same names (slime/backends/megatron_utils/
update_weight): the same constructors, the same methods, the same order of calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core, megatron
from wsync.disk import DiskSync
from wsync.exchange.trainer_group import together
from wsync.handles.base import EngineHandle, handles_of
from wsync.layout import TrainerLayout
from wsync.options import Options, numbers
from wsync.sync import Sync

if TYPE_CHECKING:
    import torch


class Updater:
    """What slime's updaters have in common; see the classes below.

    Args:
        args: slime's arguments; see `wsync.megatron.layout` for the fields that are read.
        model: one module per virtual pipeline stage, or a layout (`wsync.fsdp.layout`).
        weights_getter: returns the parameters' current storage by global name; it may hand out
            other storage each time, which has to stay as it is until the update is done.  None
            takes the model's own.
        model_name: family of the model, for example "qwen3_moe".
        quantization_config: by which weights are quantised; see `Options.quantise`, which may say
            it instead.  Codes and scales are always slime's.  None delivers weights as the trainer
            holds them.
        options: see `Options`; the pause mode and all deadlines.

    Raises:
        UnsupportedError: a family that is not known.
        LayoutError, InvalidArgumentError: a parameter that does not fit, on any rank; the text
            names it.
    """

    def __init__(
        self,
        args: Any,
        model: Sequence[torch.nn.Module] | TrainerLayout,
        weights_getter: Callable[[], Mapping[str, torch.Tensor]] | None,
        *,
        model_name: str,
        quantization_config: Mapping[str, Any] | str | None = None,
        options: Options | None = None,
    ) -> None:
        if getattr(args, "megatron_to_hf_mode", "raw") != "raw":
            raise _core.UnsupportedError(
                f"megatron_to_hf_mode={args.megatron_to_hf_mode!r}: only 'raw' is supported"
            )
        if weights_getter is not None and not callable(weights_getter):
            raise _core.InvalidArgumentError(
                f"weights_getter: a {type(weights_getter).__name__}, where a function is wanted"
            )
        self._args = args
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}
        self._weights_getter = weights_getter
        if options is None:
            most = getattr(args, "update_weight_buffer_size", Options.bucket_nbytes)
            options = Options(bucket_nbytes=most)
        self._options = Options.of(options)
        if self._options.checkpoint is None:
            folder = str(getattr(args, "hf_checkpoint", None) or "")
            self._options = dataclasses.replace(self._options, checkpoint=folder)
        self._options = _quantised(self._options, quantization_config)
        self._read_args()
        self._source = (
            model
            if isinstance(model, TrainerLayout)
            else together(
                lambda: megatron.layout(model, args, model_name=model_name, loaded_by="slime"),
                timeout=self._options.exchange_deadline,
            )
        )
        self._lock: Any = None
        self._sync: Sync | DiskSync | None = None

    def _read_args(self) -> None:
        """Takes on what only one class does with args and options."""
        return

    def _connect(
        self, engines: Callable[[], list[EngineHandle]], gpu_offsets: Sequence[int] | None
    ) -> Sync | DiskSync:
        return Sync(
            self._source,
            engines,
            engine_gpu_offsets=gpu_offsets,
            lock=self._lock,
            options=self._options,
        )

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any = None,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Takes the engines that the next updates go to; may be called again with others.

        Args:
            rollout_engines: Ray actors, URLs, local engines or `EngineHandle`s.
            rollout_engine_lock: held while buckets are broadcast to remote engines, in case
                somebody else does so; wsync's own requests have one order for all engines.
            engine_gpu_counts: tensor-parallel workers of each engine; None asks the engines.
            engine_gpu_offsets: index of the trainer rank whose GPU an engine's first worker
                shares; engines beyond the trainer's ranks are remote.
            engine_parallel_configs: tp_size of each engine, where counts are not given.
        """
        if isinstance(rollout_engines, str) or not isinstance(rollout_engines, Sequence):
            raise _core.InvalidArgumentError(
                f"rollout_engines={rollout_engines!r}: a list is wanted"
            )
        self._lock = rollout_engine_lock
        count = len(rollout_engines)
        workers = _workers(count, engine_gpu_counts, engine_parallel_configs)
        self.disconnect_rollout_engines()
        handles = functools.partial(
            handles_of, rollout_engines, workers=workers, timeout=self._options.deadline
        )
        offsets = engine_gpu_offsets
        self._sync = self._connect(handles, self._offsets(count) if offsets is None else offsets)

    def _offsets(self, count: int) -> list[int] | None:
        """The first GPUs of so many engines, where args say it."""
        return None

    def update_weights(self) -> None:
        """Pauses the engines, replaces every weight, counts the version up and continues.

        Raises:
            StateError: no engines are connected.
            WsyncError: the update failed, with the same error on every rank; see `Sync.update`.
        """
        if self._sync is None:
            raise _core.StateError("update_weights before connect_rollout_engines")
        self._sync.version = self.weight_version
        try:
            report = self._sync.update(self._weights_getter)
        finally:  # one that fails may have told somebody of the version
            self.weight_version = self._sync.version
        self.update_weight_metrics = report.metrics()

    def pop_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the last update, once."""
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics

    def disconnect_rollout_engines(self) -> None:
        """Lets go of the engines; they keep the weights they have."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def _quantised(options: Options, config: Any) -> Options:
    """With what slime's updaters are given, whose arithmetic is slime's."""
    if config is None:
        config = options.quantise
    elif options.quantise is not None:
        raise _core.InvalidArgumentError(
            "quantization_config is given, and so is quantise in options: one is wanted"
        )
    if config == "checkpoint":
        config = {}
    if isinstance(config, Mapping):
        config = {**config, "producer": {"name": "slime"}}
    return dataclasses.replace(options, quantise=config)


def _workers(count: int, gpu_counts: Any, parallel_configs: Any) -> list[int | None]:
    """Tensor-parallel workers of each of so many engines, None where nobody says it."""
    workers: list[int | None] = [None] * count
    name = "engine_gpu_counts"
    if gpu_counts is not None:
        workers = [*numbers(name, gpu_counts)]
    elif parallel_configs is not None:
        name = "engine_parallel_configs"
        try:
            sizes = [config.get("tp_size") for config in parallel_configs]
        except (TypeError, AttributeError):
            raise _core.InvalidArgumentError(
                f"{name}={parallel_configs!r}: a list of one mapping for each engine is wanted"
            ) from None
        workers = [
            size if size is None else numbers(f"{name}: tp_size", [size])[0] for size in sizes
        ]
    if len(workers) != count:
        raise _core.InvalidArgumentError(f"{len(workers)} {name} for {count} engines")
    return workers


class UpdateWeightFromTensor(Updater):
    """Updates colocated rollout engines from a Megatron model, or from any trainer's layout.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments; `args.update_weight_buffer_size` bounds the bytes of a round for engines without
    wsync, unless options are given.  Engines beyond the trainer's GPUs are remote, and get the
    same rounds as `UpdateWeightFromDistributed` sends them: by engine_gpu_offsets, or else where
    `args.rollout_num_gpus_per_engine` GPUs for each are more than the trainer has.
    """

    def _offsets(self, count: int) -> list[int] | None:
        each = getattr(self._args, "rollout_num_gpus_per_engine", None)
        if not each or count * each <= self._source.ranks:
            return None
        return [index * each for index in range(count)]


class UpdateWeightFromDistributed(Updater):
    """Updates remote rollout engines over process groups.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments.  The workers of engines that run wsync's receiver are each sent what they keep,
    from all trainer ranks.  Other engines are told of groups and buckets as SGLang takes them, by
    trainer rank 0, one source per pipeline stage broadcasts, and `args.update_weight_buffer_size`
    bounds the bytes of a broadcast, unless options are given.  `Options.broadcast` says which
    engines are which, and whether they know buckets; actors that do not say what they are take
    broadcasts unless it is "wsync".
    """

    def _read_args(self) -> None:
        self._options = dataclasses.replace(self._options, delivery="distributed")


class UpdateWeightFromDisk(Updater):
    """Updates engines through checkpoints in a folder that they and all trainer ranks see.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments; of `args` it reads in addition `update_weight_disk_dir`, the folder of versions;
    `hf_checkpoint`, the folder whose configuration and tokenizer every version gets; and
    `update_weight_disk_keep_files`: True keeps all versions, else the newest two stay.
    """

    def _read_args(self) -> None:
        args = self._args
        folder = getattr(args, "update_weight_disk_dir", None)
        if not folder:
            raise _core.InvalidArgumentError(
                f"update_weight_disk_dir={folder!r}: the folder of versions is missing"
            )
        self._folder: str = folder
        self._base = getattr(args, "hf_checkpoint", None) or None
        self._keep = None if getattr(args, "update_weight_disk_keep_files", False) else 2

    def _connect(
        self, engines: Callable[[], list[EngineHandle]], gpu_offsets: Sequence[int] | None
    ) -> DiskSync:
        return DiskSync(
            self._source,
            engines,
            folder=self._folder,
            base=self._base,
            keep=self._keep,
            options=self._options,
        )
