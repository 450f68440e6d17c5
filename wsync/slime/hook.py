"""`--custom-megatron-init-path wsync.slime.install` makes slime's train actors use wsync.

An actor calls the function once Megatron is initialised.  Later it chooses one of three classes by
name in its own module.  Made against slime 624b824 (slime/backends/megatron_utils/actor.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from typing import Any

from wsync import _core
from wsync.slime.updaters import (
    Updater,
    UpdateWeightFromDisk,
    UpdateWeightFromDistributed,
    UpdateWeightFromTensor,
)

_log = logging.getLogger(__name__)
_ACTOR = "slime.backends.megatron_utils.actor"
_CLASSES = (UpdateWeightFromDisk, UpdateWeightFromDistributed, UpdateWeightFromTensor)
_CANNOT = (_core.UnsupportedError, _core.LayoutError)


def install(args: Any) -> None:
    """Makes the train actor of this process use wsync's updaters instead of slime's.

    If wsync cannot deliver a model, or cannot update an engine, slime's own class runs, and a
    warning says why.  The log says which way each engine takes.  Options: see `Updater`.

        python train.py --custom-megatron-init-path wsync.slime.install \\
            --sglang-custom-weight-loader wsync.sglang.load_weights \\
            --train-env-vars '{"WSYNC_OPTIONS": "{\\"deadline\\": 300}"}'

    Args:
        args: slime's arguments.

    Raises:
        UnsupportedError: this slime differs from the known one; nothing is replaced.
    """
    try:
        actor = importlib.import_module(_ACTOR)
    except ImportError as error:
        raise _unknown(str(error)) from error
    names = [ours.__name__ for ours in _CLASSES]
    if any(getattr(getattr(actor, name, None), "func", None) is WsyncOrSlime for name in names):
        return
    found = [(ours, _replaceable(actor, ours)) for ours in _CLASSES]
    for ours, own in found:
        setattr(actor, ours.__name__, functools.partial(WsyncOrSlime, ours, own))
    mode = getattr(args, "update_weight_mode", "full")
    if mode != "full":
        _give_way(args, f"updater for update_weight_mode {mode!r}", "wsync has no such updater")


class WsyncOrSlime:
    """One of slime's updaters: wsync's, or slime's own once wsync has refused.

    All ranks make one and call its methods together.  wsync refuses with the same error on all
    ranks, so they change over together.
    """

    def __init__(self, ours: type[Updater], own: type, args: Any, *rest: Any, **named: Any) -> None:
        self._args = args
        self._name = own.__name__
        self._make_own = functools.partial(own, args, *rest, **named)
        self._updater: Any = None
        try:
            self._updater = ours(args, *rest, **named)
        except _CANNOT as error:
            self._change_over(error)

    @property
    def weight_version(self) -> int:
        """The version of the last update."""
        return int(self._updater.weight_version)

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._updater.weight_version = version

    def connect_rollout_engines(self, *engines: Any, **named: Any) -> None:
        """See `Updater`."""
        try:
            self._updater.connect_rollout_engines(*engines, **named)
        except _CANNOT as error:
            if not isinstance(self._updater, Updater):
                raise
            self._change_over(error)
            self._updater.connect_rollout_engines(*engines, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._updater, name)

    def _change_over(self, error: Exception) -> None:
        _give_way(self._args, self._name, error)
        before, self._updater = self._updater, self._make_own()
        if before is not None:
            self._updater.weight_version = before.weight_version
            before.disconnect_rollout_engines()


def _give_way(args: Any, what: str, reason: object) -> None:
    """Logs on one rank that slime's own way is taken."""
    if getattr(args, "rank", 0) == 0:
        _log.warning("wsync: slime's own %s runs instead of wsync's: %s", what, reason)


def _replaceable(actor: Any, ours: type[Updater]) -> type:
    """Returns slime's class for one of wsync's.  Raises UnsupportedError if wsync's cannot take its
    place, because its methods differ."""
    name = ours.__name__
    own = getattr(actor, name, None)
    if not isinstance(own, type):
        raise _unknown(f"it has no class {name}")
    for method, function in inspect.getmembers(own, inspect.isfunction):
        if method.startswith("_") and method != "__init__":
            continue
        found = list(inspect.signature(function).parameters)
        mine = getattr(ours, method, None)
        if mine is None:
            raise _unknown(f"{name} has an unknown method {method}")
        known = list(inspect.signature(mine).parameters)
        if found != [each for each in known if each != "options"]:
            raise _unknown(f"{name}.{method} takes ({', '.join(found)}), not ({', '.join(known)})")
    return own


def _unknown(text: str) -> _core.UnsupportedError:
    return _core.UnsupportedError(
        f"{_ACTOR}: {text}: wsync.slime.install was made for slime 624b824 (2026-08)"
    )
