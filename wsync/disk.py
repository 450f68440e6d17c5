"""Updates through the disk: all trainer ranks write one checkpoint, engines read it.

Every rank writes its own bytes from its tensors to their places in the files; nothing is gathered.
wsync.checkpoints.versions says what readers see, and when; wsync.checkpoints.deltas, how a version
holds only what has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from wsync import _core
from wsync.checkpoints.safetensors_layout import (
    INDEX,
    SHARD_NBYTES,
    Arrangement,
    Owned,
    arrange,
    owners,
    system_calls,
)
from wsync.checkpoints.versions import Versions, newest, number_of
from wsync.handles.answers import ignores_pause, other_draft
from wsync.handles.base import EngineHandle, control_only, handles_of, how_started
from wsync.machine.deadline import Deadline
from wsync.module_tensors.names import weight_of
from wsync.options import Options
from wsync.quantise.config import (
    LISTS,
    Method,
    TensorFacts,
    facts_of,
    inner_config,
    module_of,
    quantization_config,
)
from wsync.report import Report
from wsync.trainer.checkpoint_check import (
    EngineCheck,
    check_scales,
    config_in,
    has_codes,
    is_untied,
)
from wsync.trainer.quantise_option import config_of
from wsync.trainer.requests import EngineRequests
from wsync.trainer.updates_base import Updates

if TYPE_CHECKING:
    from wsync.checkpoints.deltas import Deltas
    from wsync.trainer.updates_base import Source, Weights

__all__ = ["DiskSync", "newest"]

_log = logging.getLogger(__name__)
_MOST: Final = 20  # versions with changes after a whole one, unless `delta` is a number
_PACE_SECONDS = 2.0  # even with a call's deadline added, ranks wait longer
_NOT_BY_DISK = dict.fromkeys(
    (
        *("round_nbytes", "ring_nbytes", "delivery", "broadcast", "backend"),
        *("exchange", "directory"),
    ),
    "updates without a disk (wsync.connect)",
)

# the name of the list that SGLang and vLLM read, by quant_method; "ignore" for other methods
_WRITTEN: Final = {"fp8": "modules_to_not_convert", "mxfp8": "ignored_layers"}


class DiskSync(Updates):
    """Keeps engines up to date through a folder of checkpoints.

    SGLang's pipeline stages load a version one after another, and only stage 0 answers.  So a
    successful update means that stage 0 has loaded the version, and that later stages load it
    before they compute anything else.  For these stages, `keep` must be at least 2.  A later stage
    that fails to load a version says so only in the server's log.

    Every trainer rank makes a `DiskSync`, and all ranks call its methods together.  If ranks make
    several, they make them one after another, in the same order on all ranks.  Only rank 0 talks
    to the engines' APIs.  Without engines, versions are only written.

    Args:
        source: this rank's weights: a layout, or whole tensors by Hugging Face name.
        engines: a list of engines, each as `handle` takes it, or a function that returns the list;
            used only on rank 0.
        folder: the folder of the versions, at the same path for all ranks and engines.  Ranks write
            different parts of the same file: across hosts, the file system must keep all parts.
            The names weight_v<version>, also with .2 to .999 added, are reserved for versions.
        base: a folder (or a transformers configuration); every version gets its configuration and
            tokenizer files.  If weights are quantised and the configuration does not say so, wsync
            adds that to the version's config.json.
        dtype: the dtype of floating-point tensors in the files, the same on all ranks; None keeps
            the trainer's.  Codes and scales of quantised weights keep their own.
        shard_nbytes: bytes of tensors in one file, the same on all ranks; a larger tensor has a
            file of its own.
        keep: the number of versions that stay in the folder; None keeps all.
        replace: whether a new version replaces a folder of the same name.  Nobody may read that
            folder meanwhile.  Without `replace`, the new folder's name gets .2 to .999 added.
        published: a function that every rank calls with the folder of each complete version, before
            engines load it.  The other ranks wait for the call up to the deadline.
        delta: writes only what has changed, for engines behind a slow network: slime's format,
            which needs its patched SGLang (/pull_weights).  A version is a whole checkpoint if it
            is the first one, if an update has failed before it, if versions are missing in the
            folder, or after so many versions with changes (True: 20).  Every rank keeps a copy of
            the bytes that it writes in host memory: in all, one model.  Each thread needs as much
            as the rank's largest tensor, or 64 MiB.  It needs `pip install numpy zstandard`.
            Versions' names have numbers of their own, from the clock, because an engine's copy
            never goes back, not even for a new run.
        local_folder: for `delta`: where each engine's host keeps its copy of the checkpoint
            (slime's --update-weight-local-checkpoint-dir).  Hosts have Options.deadline to fetch a
            version, also a whole one.
        options: deadlines, pause mode, threads that write, progress.  No deadline limits the wait
            for a file system.

    Raises:
        LayoutError: the ranks' layouts disagree, no rank holds some of the elements, or the
            delivered weights are not quantised as `base` is.
        InvalidArgumentError: an engine holds weights in another form than the trainer delivers.
        UnsupportedError: the trainer's dtype cannot be converted to `dtype`, or an engine cannot
            load from disk.  With `delta`: a package or an engine's /pull_weights is missing, or
            parts of a tensor on different ranks overlap.
        WsyncError: the engines' handles could not be made; all ranks raise the same error.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[Any] | Callable[[], Sequence[Any]] = (),
        *,
        folder: str | os.PathLike[str],
        base: Any = None,
        dtype: str | None = None,
        shard_nbytes: int = SHARD_NBYTES,
        keep: int | None = 2,
        replace: bool = False,
        published: Callable[[str], object] | None = None,
        delta: bool | int = False,
        local_folder: str | os.PathLike[str] | None = None,
        options: Options | None = None,
    ) -> None:
        dtype = dtype and str(dtype).removeprefix("torch.")
        if isinstance(base, str | os.PathLike):
            base = Path(base).absolute()  # as `folder`: the working directory may change
        self._versions = Versions(folder, base, keep, replace=replace)
        self._base = base
        self._config: Mapping[str, Any] | None = None  # versions' quantisation, on rank 0
        self._published = published
        self._most = _most_deltas(delta, local_folder)
        self._whole = 0  # the number of the last whole version, on rank 0
        self._local = None if local_folder is None else os.fspath(local_folder)
        self._deltas: Deltas | None = None
        chosen = _for_files(Options.of(options))
        parked = {"park": "updates without a disk, or with quantise"}
        chosen.refuse(_NOT_BY_DISK | ({} if chosen.quantise is not None else parked))
        super().__init__(source, chosen)
        with self._one_error():
            self._same_call(
                folder=os.fspath(folder),
                dtype=dtype,
                shard_nbytes=shard_nbytes,
                published=published is not None,
                delta=delta,
            )
            if self._group.rank == 0:
                self._export()
                self._versions.check()
                handles = handles_of(engines, timeout=self.options.deadline)
                deadline = Deadline(self.options.deadline)
                for engine in handles:
                    _check_engine(engine, self.options.pause_mode, deadline.left)
                    if delta:
                        _check_pulls(engine, self._local, deadline.left)
                self._requests = EngineRequests(handles, self.options)
            self._model = self._gather()
            check_scales(self._model)
            self._versions.facts = self._facts()
            self._arrangement = arrange(self._model, dtype=dtype, shard_nbytes=shard_nbytes)
            dealt = owners(self._model, self._group.size)
            self._writer = _Writer(self._layout, dealt[self._group.rank], self._arrangement)
            if delta:
                self._deltas = self._make_deltas(dealt)

    def update(
        self,
        weights: Weights | Callable[[], Weights] | None = None,
        *,
        version: int | str | None = None,
    ) -> Report:
        """Writes a new version and makes every engine load it; all ranks call this together.

        Engines go on generating while the files are written.

        Args:
            weights: the current parameters by global name, or a function that returns them; None
                stands for the tensors that the layout was made from.  The tensors must not change
                until this returns.
            version: the weight version that engines report afterwards: a number from 0 or a short
                text without "/", the same on all ranks.  None counts up; each connection starts
                at 1.

        Returns:
            What happened, as this rank saw it.

        Raises:
            StateError: `close` was called, or another trainer writes into the folder.
            WsyncError: an update has failed; all ranks raise the same error.  If the new version is
                incomplete, the previous one stays the newest, and engines go on.  If an engine
                fails to load it, this engine and those that have loaded it stay paused.
        """
        report = Report()
        with self._running("update"):
            with self._attempt(report, version, weights), contextlib.ExitStack() as stack:
                if self._group.rank == 0:
                    stack.enter_context(self._versions.writing())
                folder = self._write(self._given(weights), report)
                self._deliver(folder, report, stack)
            self._end(report)
        return report

    def _deliver(self, folder: Path, report: Report, last: contextlib.ExitStack) -> None:
        """Publishes a version and makes every engine load it.  last: what to do in the end."""
        self._use_up_version()
        with report.phase("publish"):
            path = self._from_first(lambda: self._versions.publish(folder))
            if self._deltas is not None:
                self._deltas.kept = number_of(path)
            if self._group.rank == 0:
                # also if engines fail to load it: failed versions must not pile up
                last.callback(self._versions.prune)
            if self._published is not None:
                self._published(os.fspath(path))
                self._group.barrier()
        if self._deltas is not None:
            with report.phase("pull"):
                self._pull(number_of(path))
        with report.phase("engines"):
            if self._group.rank == 0:
                self._load(os.fspath(path), report.version)
                self._requests.measure(report)
            self._group.confirm()

    def _check_engines(self, model: _core.Layout) -> None:
        options, base = self.options, self._base
        with system_calls(self._versions.root):
            self._config = _config_to_write(options, base, model)
            known: Any = {"base": base, "untied": is_untied(self._source)}
            check = EngineCheck(options, config_of(options), model, **known)
            check.check_folders()
        for name in check.check_engines(self._requests.handles, options.deadline):
            self._requests.effect.watch(name)
        self._requests.compare = check.check_engine

    def _facts(self) -> dict[str, Any]:
        """What every version's configuration says in addition to that of `base`; on rank 0."""
        if self._config is None:
            return {}
        return {"quantization_config": _exact_config(self._config, self._model)}

    @property
    def ways(self) -> dict[str, list[str]]:
        engines = [engine.name for engine in self._requests.engines]
        return {f"the files of {self._versions.root}": engines} if engines else {}

    def _from_first(self, make: Callable[[], Path]) -> Path:
        """Calls `make` on rank 0; returns the folder on every rank."""
        made = os.fsencode(make()) if self._group.rank == 0 else b""
        return Path(os.fsdecode(self._group.all_gather(made)[0]))

    def _abandon(self, error: _core.WsyncError) -> None:
        """Leaves an incomplete version to the next update, which removes it."""
        if self._deltas is not None:  # an engine's copy may be half changed
            self._deltas.kept = None
        self._requests.abandon(error)

    def _write(self, weights: Weights | None, report: Report) -> Path:
        """Writes all files of a version to the disk; returns their hidden folder."""
        sources = _core.BufferTable.of(self._bind(weights, report))
        self._describe(report)
        with report.phase("begin"):
            base = self._agree_on_base()
            folder = self._from_first(lambda: self._begin(report.version, base))
        if self._deltas is None or base is None:
            self._write_all(sources, folder, report)
        else:
            self._write_changes(self._deltas, sources, folder, report)
        return folder

    def _write_all(self, sources: _core.BufferTable, folder: Path, report: Report) -> None:
        bar = self._progress(report, self._writer.nbytes, unit="B", unit_scale=True)
        pace = _Pace(self._group.gather_json)
        threads = ThreadPoolExecutor(self.options.threads or 1, "wsync-files")
        with bar, self._writer.opened(folder) as files, threads:
            try:
                with report.phase("write"):
                    for nbytes in self._writer.write(sources, files, threads):
                        bar.update(nbytes)
                        pace.step()
                with report.phase("sync"):
                    for _ in threads.map(_sync, files):
                        pace.step()
                    pace.end()
            except BaseException:  # no further write begins
                threads.shutdown(cancel_futures=True)
                raise
        if self._deltas is not None:
            with report.phase("keep"):
                for _ in self._deltas.keep(sources):
                    pace.step()
                pace.end()

    def _write_changes(
        self, deltas: Deltas, sources: _core.BufferTable, folder: Path, report: Report
    ) -> None:
        group, pace = self._group, _Pace(self._group.gather_json)
        with report.phase("compare"):
            bar = self._progress(report, deltas.nbytes, unit="B", unit_scale=True)
            with bar:
                for nbytes in deltas.compare(sources, folder):
                    bar.update(nbytes)
                    pace.step()
                pace.end()
            for _ in deltas.join(group.gather_json(deltas.rows), folder):
                pace.step()
            pace.end()
        with report.phase("save"):
            names = group.gather_json(deltas.names)
            writers = [rank for rank, its in enumerate(names) if its]
            files = {
                rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors"
                for number, rank in enumerate(writers, 1)
            }
            nbytes = deltas.save(folder, files.get(group.rank, ""))
            written = group.gather_json([nbytes, deltas.changed])
            report.delivered_nbytes, report.changed_nbytes = map(sum, zip(*written, strict=True))
            report.rounds = len(writers)
            if group.rank == 0:
                from wsync.checkpoints.deltas import index

                text = index(report.version, number_of(folder), {files[r]: names[r] for r in files})
                with system_calls(folder):
                    (folder / INDEX).write_bytes(text)

    def _make_deltas(self, dealt: Sequence[Sequence[Owned]]) -> Deltas:
        try:
            from wsync.checkpoints.deltas import Deltas
        except ImportError as error:
            raise _core.UnsupportedError(f"delta: {error}: pip install numpy zstandard") from error
        return Deltas(self._layout, dealt, self._group.rank, self._arrangement, self._all_threads)

    def _agree_on_base(self) -> int | None:
        """The number of the version before, if the next one holds only changes; None if the next
        one is whole.  The same on all ranks."""
        deltas = self._deltas
        if deltas is None:
            return None
        if self._group.rank == 0 and deltas.kept is not None:
            numbers = range(self._whole, deltas.kept + 1)
            if len(numbers) > self._most or not self._versions.follow(numbers):
                deltas.kept = None
        said: list[int | None] = self._group.gather_json(deltas.kept)
        deltas.kept = None  # until this version is complete
        return said[0] if len(set(said)) == 1 else None

    def _begin(self, version: str, base: int | None) -> Path:
        """Makes a folder; if the version is whole, with files of full size, their headers and the
        index."""
        if base is not None:
            return self._versions.begin(str(base + 1), changes=True)
        number = None
        if self._deltas is not None:
            number = self._whole = max(int(time.time()), self._versions.last + 1)
        folder, files = self._versions.begin(str(number or version)), self._arrangement
        for name, size, header in zip(files.names, files.sizes, files.headers, strict=True):
            with system_calls(folder / name), open(folder / name, "wb") as file:
                _core.reserve_file(str(folder / name), file.fileno(), size)
                file.write(header)
        with system_calls(folder / INDEX):
            (folder / INDEX).write_bytes(files.index(version, number))
        return folder

    def _pull(self, number: int) -> None:
        """Makes the hosts of all engines fetch a version; engines go on generating."""
        deadline, folders = Deadline(self.options.deadline), [self._local, self._versions.root]
        folder, source = map(str, folders)

        def pull(_: int, engine: Any) -> None:
            told = {"folder": folder, "source": source, "number": number}
            engine.handle.pull_weights(**told, timeout=deadline.left)

        if self._group.rank == 0:
            self._requests.call_all(pull, deadline, self._group.check)
        self._group.confirm()

    def _load(self, path: str, version: str) -> None:
        """Makes all engines load a version; none continues before all have loaded it."""
        deadline = Deadline(self.options.deadline)
        path = path if self._deltas is None or self._local is None else self._local

        def load(_: int, engine: Any) -> None:
            self._requests.stop(engine, deadline)
            engine.update_weights_from_disk(path, weight_version=version, timeout=deadline.left)

        self._requests.hand_over(load, deadline, self._group.check)
        self._requests.resume(deadline, self._group.check)

    def _describe(self, report: Report) -> None:
        report.tensors = self._model.tensor_count
        report.model_nbytes = self._model.nbytes
        report.delivered_nbytes = report.needed_nbytes = self._arrangement.nbytes
        report.rounds = len(self._arrangement.names)
        report.workers = sum(engine.workers for engine in self._requests.engines)
        report.exchange = "disk"
        report.paths = {engine.name: "disk" for engine in self._requests.engines}


def _most_deltas(delta: int, local: object) -> int:
    """The number of versions with changes that may follow a whole one."""
    if delta < 0 or (local is not None and not delta):
        raise _core.InvalidArgumentError(
            f"delta={delta!r}, local_folder={local!r}: expected True, or a number of versions, if "
            "there is a local_folder, and otherwise False"
        )
    return _MOST if delta is True else int(delta)


def _check_engine(engine: EngineHandle, pause_mode: str, timeout: float) -> None:
    """Raises UnsupportedError if an engine cannot load a version, or would load it into a draft or
    while it generates."""
    if control_only(engine) or not hasattr(engine, "update_weights_from_disk"):
        raise _core.UnsupportedError(
            f"engine {engine.name}: its handle has no update_weights_from_disk"
        )
    started = how_started(engine, timeout)
    if why := ignores_pause(started, pause_mode):
        raise _core.UnsupportedError(f"engine {engine.name}: {why}")
    if draft := other_draft(started):
        raise _core.UnsupportedError(
            f"engine {engine.name}: drafts tokens with another model, {draft}, and SGLang would "
            "load the files into both: use wsync.connect, which does not update the draft"
        )


def _check_pulls(engine: Any, local: str | None, timeout: float) -> None:
    """Raises an error if an engine cannot fetch versions with changes."""
    if not (hasattr(engine, "pulls") and engine.pulls(timeout)):
        raise _core.UnsupportedError(
            f"engine {engine.name}: it has no /pull_weights (slime's SGLang has): use DiskSync "
            "without delta"
        )
    if local is None:
        raise _core.InvalidArgumentError(
            "delta: give local_folder=, where each engine's host keeps its copy of the checkpoint"
        )


class _Writer:
    """One rank's part of every version: the bytes it owns and where they go."""

    def __init__(
        self,
        layout: _core.Layout,
        boxes: Sequence[Owned],
        arrangement: Arrangement,
    ) -> None:
        self._arrangement = arrangement
        self._files = sorted({arrangement.places[name].file for name, *_ in boxes})
        self._route = _core.Route(layout, arrangement.layout(boxes))
        self._buffers = range(self._route.buffer_count)
        self.nbytes = sum(map(self._route.nbytes, self._buffers))

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[list[tuple[str, int, int]]]:
        """Opens the files that this rank writes to; yields (path, descriptor, nbytes) of each, and
        ("", -1, 0) for every other file."""
        files: list[tuple[str, int, int]] = [("", -1, 0)] * len(self._arrangement.names)
        with contextlib.ExitStack() as stack:
            for number in self._files:
                path = os.fspath(folder / self._arrangement.names[number])
                with system_calls(path):
                    descriptor = os.open(path, os.O_WRONLY)
                stack.callback(os.close, descriptor)
                files[number] = path, descriptor, self._arrangement.sizes[number]
            yield files

    def write(
        self,
        sources: _core.BufferTable,
        files: list[tuple[str, int, int]],
        threads: ThreadPoolExecutor,
    ) -> Iterator[int]:
        """Writes this rank's buffers in threads; yields the bytes of each buffer."""

        def write(buffer: int) -> int:
            return _core.write_files(self._route, buffer, buffer + 1, sources, files)

        return threads.map(write, self._buffers)


def _sync(file: tuple[str, int, int]) -> None:
    path, descriptor, _ = file
    if descriptor >= 0:
        with system_calls(path):
            os.fsync(descriptor)


class _Pace:
    """Lets ranks write for as long as they need.  Ranks that still write report to the others, so
    that no rank waits until its deadline.

    gather: returns all ranks' values, by rank.
    """

    def __init__(self, gather: Callable[[object], list[Any]]) -> None:
        self._gather = gather
        self._next = Deadline(_PACE_SECONDS)

    def step(self, *_: object) -> None:
        """Tells the other ranks every two seconds that this rank still writes; called after each
        write."""
        if not self._next.left:
            self._gather(False)
            self._next = Deadline(_PACE_SECONDS)

    def end(self) -> None:
        """Returns when every rank has called it."""
        while not all(self._gather(True)):
            pass


def _for_files(options: Options) -> Options:
    """The options for writing checkpoints, whose scales are not packed for an engine."""
    if not isinstance(options.quantise, Mapping):
        return options
    kept = {key: value for key, value in options.quantise.items() if key != "transform_ue8m0"}
    return dataclasses.replace(options, quantise=kept)


def _config_to_write(options: Options, base: Any, model: _core.Layout) -> Mapping[str, Any] | None:
    """The quantization_config to write in a checkpoint that has the configuration of `base` (a
    folder or a transformers configuration): base's own, or the one that options choose.  None if
    weights stay as they are.  `_exact_config` completes its lists.

    model: what all ranks hold, perhaps already codes and scales.

    Raises:
        LayoutError: base is not quantised as the delivered weights are; the text names both.
        WsyncError: the errors of config_of and Method.of.
    """
    config = config_of(options)
    if config is None and has_codes(model):
        return None
    delivered = "not quantised" if config is None else Method.of(config).text
    said = _said_by(base)
    if said is None:
        return None if config is None else _named(config)
    try:
        held = Method.of(said).text
    except _core.UnsupportedError as error:
        held = str(error)
    if held != delivered:
        raise _core.LayoutError(
            f"base={base!s:.200}: its quantization_config is {held}, but what is delivered is "
            f"{delivered} (Options(quantise=) chooses how weights are delivered)"
        )
    return _named(inner_config(said))


def _named(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the method's name, which only hf_quant_config.json leaves out."""
    return {"quant_method": "modelopt", **config}


def _exact_config(config: Mapping[str, Any], model: _core.Layout) -> Mapping[str, Any]:
    """A quantization_config of `_config_to_write`, with a list of all modules that stay plain.

    Engines read short names differently, so the list has full names.  An FP8 configuration gets the
    entries that engines require.
    """
    method = Method.of(config)
    if method.kind == "nvfp4":
        _log.warning(
            "NVFP4: versions have no input_scale, because no trainer has one.  Engines that start "
            "from a version must use NVFP4 for weights only (w4a16); otherwise their input_scale "
            "is whatever was in memory"
        )
    found = {key: value for key, value in config.items() if key not in LISTS}
    name = str(found.get("quant_method"))
    if name in ("fp8", "mxfp8"):
        found = {"activation_scheme": "dynamic", "fmt": "e4m3", **found}
    plain = [module_of(each.name) for each in facts_of(model) if _is_plain(each)]
    if listed := list(dict.fromkeys([*method.kept, *plain])):
        found[_WRITTEN.get(name, "ignore")] = listed
    return found


def _is_plain(each: TensorFacts) -> bool:
    """Whether a tensor of a quantised model is a plain weight, of a module or of experts."""
    experts = len(each.shape) == 3 and "experts" in each.name.split(".")
    weight = experts or (len(each.shape) > 1 and each.name.endswith(".weight"))
    return weight and not weight_of(each.name, each.dtype)


def _said_by(base: Any) -> Mapping[str, Any] | None:
    """The quantization_config of a folder, or of a transformers configuration."""
    if isinstance(base, str | os.PathLike):
        return config_in(Path(base)) if Path(base, "config.json").exists() else None
    return quantization_config(base.to_dict()) if hasattr(base, "to_dict") else None
