"""What an update changes of an engine whose checkpoint is not here to compare names with.

A server of SGLang tells sums of its tensors (/weights_checker: 0.5.12 and newer, on CPUs 0.5.23).
They are asked for around the first updates of a connection, until one changes something.  A tensor
that has kept its sum was passed over, or the trainer has not changed it: sums do not tell these two
apart.  So there is a warning and no error, and none of norms and biases, which bfloat16 rounds back
to what they were after a small step.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Final

from wsync import _core
from wsync.handles.base import EngineHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.module_tensors.names import listed

_log = logging.getLogger(__name__)

_UPDATES: Final = 3  # without any effect, until that is said
_PART: Final = 1 / 3  # of the time that is left, for sums
_NUMBER: Final = re.compile(r"\.\d+(?=\.)")


class FirstEffect:
    """Of the engines of a connection, by their names; threads look at one engine each."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # updates, by engine
        self._before: dict[str, Mapping[str, str]] = {}

    def watch(self, name: str) -> None:
        """Looks at an engine from now on."""
        self._left[name] = _UPDATES

    def look(self, engine: EngineHandle, timeout: float, *, after: bool) -> None:
        """At an engine that is paused.  after: the update, else before it."""
        name = engine.name
        if name not in self._left or (after and name not in self._before):
            return
        sums = _sums(engine, timeout * _PART)
        if not sums:
            del self._left[name]  # it tells none
        elif not after:
            self._before[name] = sums
        else:
            self._compare(name, self._before.pop(name), sums)

    def _compare(self, name: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        changed, kept = set[str](), set[str]()
        for tensor, checksum in now.items():
            (kept if before.get(tensor) == checksum else changed).add(_NUMBER.sub(".*", tensor))
        self._left[name] -= 1
        if not changed and self._left[name]:
            return
        del self._left[name]
        weights = {
            each for each in kept - changed if each.endswith("weight") and "norm" not in each
        }
        if weights:
            _log.warning(
                "engine %s: the update left all of %s as they were: if the trainer has changed "
                "them, the engine's own loading passes over the names that they are delivered "
                "under (Options(checkpoint=DIR), the folder that it was started from, compares "
                "these)",
                name,
                listed(weights),
            )


def _sums(engine: EngineHandle, timeout: float) -> dict[str, str]:
    """Of an engine's tensors: those of all workers, by name; none where it does not tell."""
    body = {"action": "checksum", "selector": "target"}
    if not isinstance(engine, HttpHandle):
        return {}
    try:
        status, text = engine.request("POST", "/weights_checker", body, timeout)
        ranks: Any = json.loads(text)["ranks"] if status == 200 else []
        found = dict[str, str]()
        for rank in ranks:
            for name, checksum in rank["checksums"].items():
                found[name] = found.get(name, "") + str(checksum)
        return found
    except (_core.WsyncError, ValueError, LookupError, TypeError, AttributeError):
        return {}
