"""slime's weight-update interface on top of wsync.

The classes replace slime's classes of the same names (slime/backends/megatron_utils/update_weight).
They have the same constructors and the same methods, and are called in the same order.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core, megatron
from wsync.disk import DiskSync
from wsync.exchange.trainer_group import together
from wsync.layout import TrainerLayout
from wsync.options import Options
from wsync.sync import Sync

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_VARIABLE = "WSYNC_OPTIONS"


class Updater:
    """The base of slime's updaters; see the classes below.

    Args:
        args: slime's arguments; see `wsync.megatron.layout` for the fields that are read.
        model: one module per virtual pipeline stage, or a layout (`wsync.fsdp.layout`).
        weights_getter: returns the parameters' current storage by global name.  It may return other
            storage each time, which must not change until the update is done.  None reads the
            model itself.
        model_name: family of the model, for example "qwen3_moe".
        quantization_config: how weights are quantised; see `Options.quantise`, which may say it
            instead.  Codes and scales are always computed as slime does.  None delivers weights as
            the trainer holds them.
        options: the pause mode, all deadlines and more; see `Options`.  None takes them from the
            environment's WSYNC_OPTIONS, a JSON object ('{"deadline": 300}'), and from the mapping
            `args.wsync_options`, which has precedence.

    Raises:
        UnsupportedError: the family is not known.
        LayoutError, InvalidArgumentError: a parameter does not fit, on any rank; the text names
            it.
    """

    _nobody = "no engines"

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
        self._args = args
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}
        self._weights_getter = weights_getter
        self._options = _slimes(args, quantization_config, options)
        self._source = (
            model
            if isinstance(model, TrainerLayout)
            else together(
                lambda: megatron.layout(model, args, model_name=model_name, loaded_by="slime"),
                timeout=self._options.exchange_deadline,
            )
        )
        self._sync: Sync | DiskSync | None = None

    def _connect(
        self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None
    ) -> Sync | DiskSync:
        given, gpu_offsets = _there(self._args, engines, gpu_offsets)
        return Sync(self._source, given, engine_gpu_offsets=gpu_offsets, options=self._options)

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any = None,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Sets the engines of the next updates; may be called again with others.

        Args:
            rollout_engines: Ray actors, URLs, local engines or `EngineHandle`s.
            rollout_engine_lock: slime's lock, with which its pipeline stages take turns.  wsync
                does not use it, because its requests have one order for all engines.
            engine_gpu_counts, engine_parallel_configs: slime's.  wsync does not use them, because
                it asks each engine how many workers the engine has.
            engine_gpu_offsets: index of the trainer rank whose GPU an engine's first worker
                shares.  An engine whose index is beyond the trainer's ranks is remote.

        Raises:
            UnsupportedError: an engine has several pipeline stages and no wsync loader.
            WsyncError: as from `Sync`; the same on every rank.
        """
        self.disconnect_rollout_engines()
        self._sync = self._connect(rollout_engines, engine_gpu_offsets)
        if isinstance(self._sync, Sync):
            self._sync.retries = self._options.retry
        if self._source.rank == 0:
            ways = self._sync.reached or self._nobody
            _log.info("wsync: %s: %s", type(self).__name__, ways)

    def update_weights(self) -> None:
        """Pauses the engines, replaces every weight, increments the version and resumes.  After a
        transport error it tries once more; see `Options.retry`.

        Raises:
            StateError: no engines are connected.
            WsyncError: the update failed, with the same error on every rank; see `Sync.update`.
        """
        if self._sync is None:
            raise _core.StateError("call connect_rollout_engines before update_weights")
        self._sync.version = self.weight_version
        try:
            report = self._sync.update(self._weights_getter)
        finally:  # a failed update may already have told somebody its version
            self.weight_version = self._sync.version
        self.update_weight_metrics = report.metrics(whole=False)

    def pop_metrics(self) -> dict[str, float]:
        """Returns seconds and bytes of the last update, once."""
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics

    def disconnect_rollout_engines(self) -> None:
        """Disconnects from the engines, which keep their weights."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def _slimes(args: Any, config: Mapping[str, Any] | str | None, options: Options | None) -> Options:
    """Returns an updater's options.  slime's own calls have no argument for options, so the options
    may come from the environment or `args`.  Weights are quantised with slime's arithmetic."""
    if options is None:
        most = getattr(args, "update_weight_buffer_size", Options.bucket_nbytes)
        lost = "continue" if getattr(args, "use_fault_tolerance", False) else "raise"
        chosen: dict[str, Any] = {"bucket_nbytes": most, "pause_mode": "abort", "lost": lost}
        chosen |= Options.named(_VARIABLE, os.environ.get(_VARIABLE) or {})
        chosen |= Options.named("args.wsync_options", getattr(args, "wsync_options", None) or {})
        options = Options(**chosen)
    options = Options.of(options)
    folder = str(getattr(args, "hf_checkpoint", None) or "")
    checkpoint = folder if options.checkpoint is None else options.checkpoint
    config = config if options.quantise is None else options.quantise
    if config == "checkpoint":
        config = {}
    if isinstance(config, Mapping):
        config = {**config, "producer": {"name": "slime"}}
    return dataclasses.replace(options, checkpoint=checkpoint, quantise=config)


def _there(
    args: Any, engines: Sequence[Any], offsets: Sequence[int] | None
) -> tuple[Any, Sequence[int] | None]:
    """slime's engines as `Sync` takes them, and their offsets.  With use_fault_tolerance, slime's
    health monitor may end an engine (None) while slime starts others, and another engine may have
    died since the monitor's last look.  A function's engines may be missing at first."""
    if not getattr(args, "use_fault_tolerance", False):
        return engines, offsets
    places = [number for number, engine in enumerate(engines) if engine is not None]
    alive = [engines[number] for number in places]
    return lambda: alive, offsets and [offsets[number] for number in places]


class UpdateWeightFromTensor(Updater):
    """Updates colocated rollout engines from a Megatron model, or from any trainer's layout.

    Every trainer rank makes an updater; all ranks call its methods together.  See `Updater` for the
    arguments.  For engines without wsync, `args.update_weight_buffer_size` limits the bytes of a
    round, unless options are given.  An engine whose entry in engine_gpu_offsets is beyond the
    trainer's GPUs is remote, and gets the same rounds as from `UpdateWeightFromDistributed`.
    """


class UpdateWeightFromDistributed(Updater):
    """Updates remote rollout engines over process groups.

    Every trainer rank makes an updater; all ranks call its methods together.  See `Updater` for the
    arguments.  If an engine runs wsync's receiver, all trainer ranks send each of its workers what
    that worker keeps.  Other engines get groups and buckets as SGLang takes them, from trainer rank
    0, which broadcasts.  `args.update_weight_buffer_size` limits the bytes of a broadcast, unless
    options are given.  `Options.broadcast` says which engines are of which kind, and whether they
    know buckets.  Actors that do not report their kind get broadcasts, unless `Options.broadcast`
    is "wsync".
    """

    def _connect(self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None) -> Sync:
        options = dataclasses.replace(self._options, delivery="distributed")
        given, gpu_offsets = _there(self._args, engines, gpu_offsets)
        return Sync(self._source, given, engine_gpu_offsets=gpu_offsets, options=options)


class UpdateWeightFromDisk(Updater):
    """Writes checkpoints into a folder that engines and all trainer ranks can reach.

    Every trainer rank makes an updater; all ranks call its methods together.  See `Updater` for the
    arguments.  It also reads three fields of `args`: `update_weight_disk_dir`, the folder of
    versions; `hf_checkpoint`, the folder whose configuration and tokenizer every version gets; and
    `custom_update_weight_post_write_path`, a function that every rank calls with args, the folder
    and the engines when a version is complete.

    This class only writes versions, and replaces a folder of the same name.  slime's RayTrainGroup
    then makes the engines load the folder weight_v<version>, and removes the folder unless
    `update_weight_disk_keep_files` is given.  `wsync.DiskSync` makes engines load versions itself.

    connect_rollout_engines raises UnsupportedError if that function is given and the trainer has
    several nodes.  The function serves file systems on which each host publishes its own files, but
    here hosts write one file together.
    """

    _nobody = "slime makes all engines load the files"

    def _connect(self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None) -> DiskSync:
        del gpu_offsets
        args = self._args
        if not args.update_weight_disk_dir:
            raise _core.InvalidArgumentError("update_weight_disk_dir=None: give a folder")
        return DiskSync(
            self._source,
            (),
            folder=args.update_weight_disk_dir,
            base=getattr(args, "hf_checkpoint", None) or None,
            keep=None,
            replace=True,
            published=_published(args, list(engines)),
            options=self._options,
        )


def _published(args: Any, engines: list[Any]) -> Callable[[str], object] | None:
    """Returns a call of the function that slime's arguments name, or None if they name none."""
    path = getattr(args, "custom_update_weight_post_write_path", None)
    if not path:
        return None
    if (nodes := getattr(args, "actor_num_nodes", 1)) > 1:
        raise _core.UnsupportedError(
            f"custom_update_weight_post_write_path with actor_num_nodes={nodes}: all hosts write "
            "one file together, which no single host can publish"
        )
    hook = pkgutil.resolve_name(path)
    return lambda folder: hook(args, folder, engines)
