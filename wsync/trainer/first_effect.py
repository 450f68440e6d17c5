"""Checks that updates change an engine whose checkpoint is not here to compare names with.

An SGLang server reports sums of its tensors (/weights_checker: 0.5.12 and newer, on CPUs 0.5.23).
wsync asks for the sums before and after the first updates of a connection, until any sum changes.
If a tensor keeps its sum, either the engine has ignored it or the trainer has not changed it.  Sums
cannot tell which, so this only warns.  It does not warn of norms and biases, because bfloat16 may
round them back to their old values after a small step.
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

_UPDATES: Final = 3  # without any effect before the warning
_PART: Final = 1 / 3  # of the remaining time, for one request for sums
_NUMBER: Final = re.compile(r"\.\d+(?=\.)")


class FirstEffect:
    """Watches the engines of a connection, by name.  Each thread looks at one engine."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # updates still to watch, by engine
        self._before: dict[str, Mapping[str, str]] = {}

    def watch(self, name: str) -> None:
        """Starts to watch an engine."""
        self._left[name] = _UPDATES

    def look(self, engine: EngineHandle, timeout: float, *, after: bool) -> None:
        """Reads the sums of a paused engine.  after: whether this is after the update."""
        name = engine.name
        if name not in self._left or (after and name not in self._before):
            return
        sums = _sums(engine, timeout * _PART)
        if not sums:
            del self._left[name]  # it reports none
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
                "engine %s: the update did not change any of %s: if the trainer has changed these "
                "tensors, the engine's own loading ignores their names (to compare names, give "
                "the folder that the engine was started from as Options(checkpoint=DIR))",
                name,
                listed(weights),
            )


def _sums(engine: EngineHandle, timeout: float) -> dict[str, str]:
    """The sums of an engine's tensors on all workers, by name; empty if it does not report them."""
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
