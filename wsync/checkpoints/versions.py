"""A folder of checkpoint versions, of which a reader sees only complete ones.

    ROOT/weight_v000007     a complete checkpoint, never written again; a later one of the same
                            version is weight_v000007.2, or takes its place
    ROOT/latest             link to the newest
    ROOT/.wsync-work        what is being written or removed; nobody reads it

A version is written there, brought to the disk, and renamed; the link follows when the disk has the
new name.  So `latest` leads to a complete version at any time: whenever a writer is killed, and
after a power failure as far as the file system keeps what fsync has brought to it; but not while a
version takes the place of another.  What `publish` has returned is there afterwards.  Other files
and folders are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
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
    """The newest complete version under `root`, for an engine that starts late.

    It can be read until `keep` - 1 more have become complete; what is open by then, to the end.
    Raises StateError where there is none yet.
    """
    found = Path(root, LATEST).resolve()
    if (found / INDEX).exists():
        return found
    raise _core.StateError(f"{os.fspath(root)}: holds no complete version yet")


class Versions:
    """The writing side; one trainer at a time, on its rank 0.

    Args:
        root: made where it is missing; all writers and engines see it under this path.
        base: folder whose configuration and tokenizer files every version gets, or a transformers
            configuration, or None.
        keep: complete versions that stay, the newest included; None keeps all.
        replace: whether a version takes the place of what has its name.

    Attributes:
        facts: what the config.json of a version says beside what that of `base` does.
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
                f"keep={keep!r}: a number from 1, for the newest version stays, or None for all"
            )
        base = self._base
        is_folder = isinstance(base, str | os.PathLike) and Path(base).is_dir()
        if base is not None and not is_folder and not hasattr(base, "save_pretrained"):
            raise _core.InvalidArgumentError(
                f"base={base!s:.200}: neither a folder with a checkpoint's configuration nor a "
                "transformers configuration"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other trainers out, and removes what is left behind: by one that died, and by the
        block when it fails."""
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
                self._sweep()  # a disk that has become full is not to stay so
                # a process that was forked meanwhile has the descriptor, too
                fcntl.flock(lock, fcntl.LOCK_UN)

    def begin(self, version: str) -> Path:
        """A new hidden folder with everything but the weights and their index."""
        if "/" in version or "\0" in version or not version.isprintable():
            raise _core.InvalidArgumentError(f"version {version!r} cannot name a folder")
        folder = self._hidden(_name(version))
        with system_calls(folder):
            folder.mkdir()
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
        """Gives a hidden folder whose files are on the disk its name, and readers the link to it;
        returns its path."""
        name = folder.name.rpartition(".")[0]
        final, count = self.root / name, 1
        # an earlier run's or try's, perhaps being read
        while os.path.lexists(final) and not self._replace:
            count += 1
            final = self.root / f"{name}.{count}"
        with system_calls(final):
            for path in folder.rglob("*"):
                _sync(path)
            _sync(folder)
            if os.path.lexists(final):  # nobody is to find old weights, or a part of both
                final.rename(self._hidden(name))
            folder.rename(final)
            _sync(self.root)
            _sync(self._work)
            link = self._hidden(LATEST)
            link.symlink_to(final.name)
            link.replace(self.root / LATEST)
            _sync(self.root)
        return final

    def prune(self) -> None:
        """Has the oldest versions removed at the end of `writing`; what cannot be stays until the
        next time: the new one is there, and nothing is raised."""
        if self._keep is None:
            return
        with contextlib.suppress(OSError, _core.WsyncError):
            latest = newest(self.root)
            found = self.root.glob(f"{_PREFIX}*")
            others = [p for p in found if p.resolve() != latest and _is_version(p)]
            others.sort(key=_written, reverse=True)
            for old in reversed(others[self._keep - 1 :]):
                old.rename(self._hidden(old.name))  # at once: nobody is to find half of it

    def _sweep(self) -> None:
        """Removes what writers before this one have left."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _hidden(self, name: str) -> Path:
        """A new name where nobody reads and `_sweep` looks."""
        with system_calls(self._work):
            self._work.mkdir(exist_ok=True)
        return self._work / f"{name}.{secrets.token_hex(4)}"


def _name(version: str) -> str:
    return _PREFIX + (f"{int(version):06d}" if version.isdecimal() else version)


def _is_version(folder: Path) -> bool:
    """Whether `publish` has given a folder its name: its index says of which version it is."""
    try:
        version = read_config(folder / INDEX)["metadata"]["weight_version"]
    except (_core.WsyncError, KeyError, TypeError):
        return False
    known = re.escape(_name(str(version))) + r"(\.[0-9]{1,3})?"
    return re.fullmatch(known, folder.name) is not None


def _written(version: Path) -> tuple[int, str]:
    """Sorts complete versions by when their index was written."""
    return (version / INDEX).stat().st_mtime_ns, version.name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
