"""A folder of checkpoint versions, in which readers see only complete versions.

    ROOT/weight_v000007     a complete checkpoint, never written again; a later one of the same
                            version is weight_v000007.2, or replaces it
    ROOT/latest             a link to the newest version that is a whole checkpoint
    ROOT/.wsync-work        versions that are being written or removed; nobody reads them

A version is written in .wsync-work, synchronised to the disk, and renamed; then the link follows.
So `latest` leads to a complete version at any time, except while a version replaces another.  This
holds even if the writer is killed, and after a power failure if the file system keeps data that
fsync has written.  A version that `publish` has returned survives both.  Other files and folders
are left alone.

If versions may hold only changes (wsync.checkpoints.deltas), their names have numbers of their own,
which the index repeats as "version".
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wsync import _core
from wsync.checkpoints.safetensors_layout import INDEX, read_config, system_calls

LATEST = "latest"
_LOCK = ".lock"
_WORK = ".wsync-work"
_PREFIX = "weight_v"
_TEMPLATES = "additional_chat_templates"  # of a tokenizer, as transformers saves them
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def newest(root: str | os.PathLike[str]) -> Path:
    """The newest complete version under `root`, for an engine that starts late.  Versions that hold
    only changes do not count.

    Its files can be opened until `keep` newer versions are complete; an open file can be read to
    the end.  Raises StateError if there is no complete version yet.
    """
    found = Path(root, LATEST).resolve()
    if (found / INDEX).exists():
        return found
    raise _core.StateError(f"{os.fspath(root)}: there is no complete version in it yet")


class Versions:
    """Writes versions.  Only one trainer at a time writes versions to a folder, on its rank 0.

    Args:
        root: the folder, which is made if it is missing; trainers and engines see it under this
            path.
        base: a folder whose configuration and tokenizer files every version gets, or a transformers
            configuration.  None: versions get neither.
        keep: the number of complete versions that stay, including the newest; None keeps all.
            Versions with changes stay as long as the checkpoint before them, and do not count.
        replace: whether a version replaces an earlier one with its name.

    Attributes:
        facts: the entries that a version's config.json has in addition to those of `base`.
    """

    def __init__(
        self, root: str | os.PathLike[str], base: Any, keep: int | None, *, replace: bool = False
    ) -> None:
        self.root = Path(root).absolute()
        self._work = self.root / _WORK
        self._base = base
        self._keep = keep
        self._replace = replace
        self.facts: Mapping[str, Any] = {}

    def check(self) -> None:
        """Raises InvalidArgumentError if `base` is not there or `keep` is less than 1."""
        keep = self._keep
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise _core.InvalidArgumentError(
                f"keep={keep!r}: give 1 or more, because the newest version stays, or None for all"
            )
        base = self._base
        is_folder = isinstance(base, str | os.PathLike) and Path(base).is_dir()
        if base is not None and not is_folder and not hasattr(base, "save_pretrained"):
            raise _core.InvalidArgumentError(
                f"base={base!s:.200}: expected the folder of a checkpoint, or a configuration of "
                "transformers"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other trainers out.  Removes the leftovers of a trainer that died.  If the block
        fails, removes its leftovers, too."""
        with system_calls(self.root):
            missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
            self.root.mkdir(parents=True, exist_ok=True)
            for path in missing:
                _sync(path.parent)
            (self.root / _LOCK).touch()
        with open(self.root / _LOCK, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _core.StateError(
                    f"{self.root}: another trainer is writing versions into it"
                ) from None
            try:
                self._sweep()
                yield
            finally:
                self._sweep()  # after a failure, the disk must not stay full
                # closing is not enough: a process forked meanwhile has the descriptor, too
                fcntl.flock(lock, fcntl.LOCK_UN)

    @property
    def last(self) -> int:
        """The highest number in the versions' names; 0 if there is none."""
        found = (
            re.match(r"\d+", path.name[len(_PREFIX) :]) for path in self.root.glob(f"{_PREFIX}*")
        )
        return max((int(number[0]) for number in found if number), default=0)

    def follow(self, numbers: Sequence[int]) -> bool:
        """Whether all versions of these numbers are there, and none with a higher number."""
        there = [(self.root / _name(str(number)) / INDEX).exists() for number in numbers]
        return all(there) and self.last == max(numbers)

    def begin(self, version: str, *, changes: bool = False) -> Path:
        """A new hidden folder with everything but the weights and their index; changes: without
        anything."""
        if "/" in version or "\0" in version or not version.isprintable():
            raise _core.InvalidArgumentError(f"version {version!r} cannot be a folder's name")
        folder = self._hidden(_name(version))
        with system_calls(folder):
            folder.mkdir()
            if changes:
                return folder
            if isinstance(self._base, str | os.PathLike):
                base = Path(self._base).resolve()  # a link may move meanwhile
                for path in (*base.iterdir(), *(base / _TEMPLATES).glob("*")):
                    hidden = path.name.startswith(".")
                    if path.is_file() and not hidden and not path.name.endswith(_WEIGHTS):
                        copy = folder / path.relative_to(base)
                        copy.parent.mkdir(exist_ok=True)
                        shutil.copyfile(path, copy)
            elif self._base is not None:
                self._base.save_pretrained(folder)
            config = folder / "config.json"
            if self.facts and config.exists():
                found = {**read_config(config), **self.facts}
                config.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return folder

    def publish(self, folder: Path) -> Path:
        """Renames a hidden folder to its final name, and lets `latest` lead to it.  Returns the new
        path."""
        name = folder.name.rpartition(".")[0]
        final, count = self.root / name, 1
        # of an earlier run or try; engines may be reading it
        while os.path.lexists(final) and not self._replace:
            count += 1
            final = self.root / f"{name}.{count}"
        with system_calls(final):
            for path in folder.rglob("*"):
                _sync(path)
            _sync(folder)
            if os.path.lexists(final):  # readers must not find old weights, or a mix
                final.rename(self._hidden(name))
            folder.rename(final)
            _sync(self.root)
            _sync(self._work)
            if not _is_delta(_metadata(final)):
                link = self._hidden(LATEST)
                link.symlink_to(final.name)
                link.replace(self.root / LATEST)
                _sync(self.root)
        return final

    def prune(self) -> None:
        """Moves the oldest versions aside; they are removed at the end of `writing`.  Nothing is
        raised: if a version cannot be moved, it stays until the next time."""
        if self._keep is None:
            return
        with contextlib.suppress(OSError, _core.WsyncError):
            latest = newest(self.root)
            found = {path: _metadata(path) for path in self.root.glob(f"{_PREFIX}*")}
            others = [p for p in found if p.resolve() != latest and _is_version(p, found[p])]
            others.sort(key=_written, reverse=True)
            whole = [path for path in others if not _is_delta(found[path])]
            kept = [latest, *whole[: self._keep - 1]]
            first = min(map(_written, kept))
            for old in reversed(others):
                if old not in kept and (old in whole or _written(old) < first):
                    with contextlib.suppress(OSError):  # the others are moved all the same
                        old.rename(self._hidden(old.name))  # at once: nobody may find half of it

    def _sweep(self) -> None:
        """Removes the work folder with everything in it."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _hidden(self, name: str) -> Path:
        """A new path in the work folder, which nobody reads and `_sweep` removes."""
        with system_calls(self._work):
            self._work.mkdir(exist_ok=True)
        return self._work / f"{name}.{secrets.token_hex(4)}"


def number_of(folder: Path) -> int:
    """The number in the name of a version, which may still be hidden."""
    return int(folder.name.removeprefix(_PREFIX).partition(".")[0])


def _name(version: str) -> str:
    return _PREFIX + (f"{int(version):06d}" if version.isdecimal() else version)


def _metadata(folder: Path) -> Mapping[str, Any]:
    """The metadata in a version's index; empty if there is none."""
    with contextlib.suppress(_core.WsyncError):
        found = read_config(folder / INDEX).get("metadata")
        return found if isinstance(found, dict) else {}
    return {}


def _is_version(folder: Path, found: Mapping[str, Any]) -> bool:
    """Whether `publish` has named a folder: the version in its index's metadata fits the name."""
    if "weight_version" not in found:
        return False
    version = str(found.get("version", found["weight_version"]))
    return re.fullmatch(re.escape(_name(version)) + r"(\.[0-9]{1,3})?", folder.name) is not None


def _is_delta(found: Mapping[str, Any]) -> bool:
    """Whether a version with this metadata holds only changes; see wsync.checkpoints.deltas."""
    return "delta_encoding" in found


def _written(version: Path) -> tuple[int, str]:
    """A key that sorts versions by the time when their index was written."""
    return (version / INDEX).stat().st_mtime_ns, version.name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
