"""slime's weight-update interface on top of wsync.

The classes take the place of slime's of the same names (slime/backends/megatron_utils/
update_weight): the same constructors, the same methods, the same order of calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from wsync import _core, megatron
from wsync.disk import DiskSync
from wsync.exchange.trainer_group import TrainerGroup, together
from wsync.layout import TrainerLayout
from wsync.options import Options
from wsync.sync import Sync

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_VARIABLE = "WSYNC_OPTIONS"
_TRANSPORT: Final = (_core.PeerClosedError, _core.DeadlineError)
_MEET_SECONDS: Final = 30.0  # for all ranks to have let go of a failed update


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
        options: see `Options`; the pause mode and all deadlines.  None takes them from the
            environment's WSYNC_OPTIONS, a JSON object ('{"deadline": 300}'), and from
            `args.wsync_options`, such a mapping, which goes before it.

    Raises:
        UnsupportedError: a family that is not known.
        LayoutError, InvalidArgumentError: a parameter that does not fit, on any rank; the text
            names it.
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
        self._calls = 0  # of update_weights

    def _connect(
        self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None
    ) -> Sync | DiskSync:
        return Sync(self._source, engines, engine_gpu_offsets=gpu_offsets, options=self._options)

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
            rollout_engine_lock: slime's, by which its pipeline stages take turns.  It is not
                needed: wsync's requests have one order for all engines.
            engine_gpu_counts, engine_parallel_configs: slime's.  They are not needed: an engine is
                asked how many workers it has.
            engine_gpu_offsets: index of the trainer rank whose GPU an engine's first worker
                shares; engines beyond the trainer's ranks are remote.

        Raises:
            UnsupportedError: an engine with several pipeline stages.
            WsyncError: as `Sync`, the same on every rank.
        """
        self.disconnect_rollout_engines()
        self._sync = self._connect(rollout_engines, engine_gpu_offsets)
        if self._source.rank == 0:
            ways = self._sync.reached or self._nobody
            _log.info("wsync: %s: %s", type(self).__name__, ways)

    def update_weights(self) -> None:
        """Pauses the engines, replaces every weight, counts the version up and continues.  What
        fails for a reason of transport is tried once more; see `Options.retry`.

        Raises:
            StateError: no engines are connected.
            WsyncError: the update failed, with the same error on every rank; see `Sync.update`.
        """
        if self._sync is None:
            raise _core.StateError("update_weights before connect_rollout_engines")
        self._calls += 1
        try:
            self._update(self._sync)
        except _TRANSPORT as error:
            if not self._options.retry:
                raise
            patience = min(_MEET_SECONDS, self._options.exchange_deadline)
            if self._source.rank == 0:
                _log.warning(
                    "wsync: an update failed and is tried once more, when all trainer ranks have "
                    "let go of it: %s",
                    error,
                )
            # one that has seen the update succeed does not come: its next weights would meet those
            # that are sent again
            meeting = f"update {self._calls} again"
            try:
                all_ranks = TrainerGroup(self._source.group, timeout=patience, meeting=meeting)
            except _core.WsyncError:
                all_ranks = None
            if all_ranks is None:
                raise
            try:
                with contextlib.closing(all_ranks):
                    self._update(self._sync)
            except _core.WsyncError as again:
                again.add_note(f"This was the second try.  The first one had failed: {error}")
                raise

    def _update(self, sync: Sync | DiskSync) -> None:
        sync.version = self.weight_version
        try:
            report = sync.update(self._weights_getter)
        finally:  # one that fails may have told somebody of the version
            self.weight_version = sync.version
        self.update_weight_metrics = report.metrics(whole=False)

    def pop_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the last update, once."""
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics

    def disconnect_rollout_engines(self) -> None:
        """Lets go of the engines; they keep the weights they have."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def _slimes(args: Any, config: Mapping[str, Any] | str | None, options: Options | None) -> Options:
    """What is chosen, also where slime makes updaters, whose calls have no room for options; the
    arithmetic of quantising is slime's."""
    if options is None:
        most = getattr(args, "update_weight_buffer_size", Options.bucket_nbytes)
        chosen: dict[str, Any] = {"bucket_nbytes": most}
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


class UpdateWeightFromTensor(Updater):
    """Updates colocated rollout engines from a Megatron model, or from any trainer's layout.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments; `args.update_weight_buffer_size` bounds the bytes of a round for engines without
    wsync, unless options are given.  Engines beyond the trainer's GPUs, by engine_gpu_offsets, are
    remote, and get the same rounds as `UpdateWeightFromDistributed` sends them.
    """


class UpdateWeightFromDistributed(Updater):
    """Updates remote rollout engines over process groups.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments.  The workers of engines that run wsync's receiver are each sent what they keep,
    from all trainer ranks.  Other engines are told of groups and buckets as SGLang takes them, by
    trainer rank 0, which broadcasts, and `args.update_weight_buffer_size` bounds the bytes of a
    broadcast, unless options are given.  `Options.broadcast` says which
    engines are which, and whether they know buckets; actors that do not say what they are take
    broadcasts unless it is "wsync".
    """

    def _connect(self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None) -> Sync:
        options = dataclasses.replace(self._options, delivery="distributed")
        return Sync(self._source, engines, engine_gpu_offsets=gpu_offsets, options=options)


class UpdateWeightFromDisk(Updater):
    """Writes checkpoints into a folder that engines and all trainer ranks see.

    Every trainer rank makes one and all ranks call its methods together.  See `Updater` for the
    arguments; of `args` it reads in addition `update_weight_disk_dir`, the folder of versions;
    `hf_checkpoint`, the folder whose configuration and tokenizer every version gets; and
    `custom_update_weight_post_write_path`, a function that is called on every rank with args, the
    folder and the engines when a version is complete.

    slime's RayTrainGroup has the engines load weight_v<version> when all ranks are done, and
    removes it after that unless `update_weight_disk_keep_files` is given.  So versions are written
    here and nothing else: a folder of that name is replaced.  `wsync.DiskSync` has engines load
    them itself.

    connect_rollout_engines raises UnsupportedError for such a function and a trainer of several
    nodes.  It is for file systems where each host has to publish what it has written, and here
    hosts write one file.
    """

    _nobody = "all engines by the files that slime has them load"

    def _connect(self, engines: Sequence[Any], gpu_offsets: Sequence[int] | None) -> DiskSync:
        del gpu_offsets
        args = self._args
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
    """What calls the function that slime's arguments name, if they name one."""
    path = getattr(args, "custom_update_weight_post_write_path", None)
    if not path:
        return None
    if (nodes := getattr(args, "actor_num_nodes", 1)) > 1:
        raise _core.UnsupportedError(
            f"custom_update_weight_post_write_path with actor_num_nodes={nodes}: hosts write one "
            "file together, which no host can publish"
        )
    hook = pkgutil.resolve_name(path)
    return lambda folder: hook(args, folder, engines)
