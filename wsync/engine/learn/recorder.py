"""Learns where an engine keeps the tensors of a model, from its own load_weights.

`record` runs the loader twice under a Tracer and makes a Recording of what it did.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch

from wsync.engine.learn.analysis import Analysis
from wsync.engine.learn.bounded_call import NotEndedError, bounded
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import ModuleMemory
from wsync.engine.learn.module_state import Bindings
from wsync.engine.learn.quantisation_mismatch import refuse_other_forms, refuse_unloadable
from wsync.engine.learn.recording import Recording, RecordingError
from wsync.engine.learn.regions import UnexpressedError, common_nbytes
from wsync.engine.learn.time_limit import check
from wsync.engine.learn.tracer import ReadsValuesError, Tracer, tracing
from wsync.engine.learn.writes import COMPUTED, Write
from wsync.engine.ring_loaders import LoadWeights
from wsync.machine.error_text import error_text

_TRIALS: Final = 4
_TASKS_WAIT: Final = (
    "tasks that it gives to thread pools wait for others, or for what comes after them"
)
_NUMBER: Final = re.compile(r"\d+")


class RebindsError(RecordingError):
    """The loader made tensors of its own: a second run may find them there."""


def record(module: torch.nn.Module, load: LoadWeights, model: MadeUpModel) -> Recording:
    """What `load` does with the tensors of a model.

    The module's weights are left as they are by every loader whose work can be seen.

    Raises:
        RecordingError: it cannot be replaced; the text says why.
        RebindsError: perhaps it can be when it has run once.
    """
    first = _record(module, load, model)
    second = _record(module, load, model)
    difference = first.same(second)
    if difference:
        raise RecordingError(f"two recordings differ in their {difference}")
    return first


def _record(module: torch.nn.Module, load: LoadWeights, model: MadeUpModel) -> Recording:
    """One recording; tensors that are more than moved are left to the loader."""
    everything = frozenset(name for name, *_ in model.tensors)
    aside: dict[str, str] = {}
    for trial in range(_TRIALS):
        held = ModuleMemory(module)
        tracer = Tracer(held, model)
        _trace(module, load, model, held, tracer, everything - aside.keys(), aside)
        found = dict.fromkeys(_kept_outside(model, tracer), "it is kept outside the module")
        looked = tracer.refused | _scalars_like(model, tracer.refused, kinds=trial == 0)
        found |= dict.fromkeys(looked, "its values are looked at")
        if not found:
            break
        if "?" in found:
            raise RecordingError("it looks at values of the module that depend on the load")
        aside |= found
    else:
        raise RecordingError(
            f"values of {len(aside)} tensors and more are looked at or kept outside the module"
        )
    if aside:
        other = Tracer(held, model, opaque=frozenset(aside))
        _trace(module, load, model, held, other, frozenset(aside))
        if other.refused:
            raise RecordingError(f"it looks at what it makes of {', '.join(sorted(aside)[:5])}")
        for area, writes in enumerate(other.writes):
            tracer.writes[area] += [_made_again(write, tracer.writes[area]) for write in writes]
    refuse_other_forms(held, model, tracer)
    outside = [*tracer.outside.values(), *(other.outside.values() if aside else ())]
    try:
        recording = Analysis(held, model, tracer, aside).recording
        recording.outside = [(o, sum) for o in outside if (sum := o.sum()) is not None]
        if recording.fallback.keys() != aside.keys():
            _try_alone(module, load, model, held, recording)
    except UnexpressedError as error:
        raise RecordingError(str(error)) from None
    return recording


def _made_again(write: Write, others: Sequence[Write]) -> Write:
    """What a loader writes where it is given what was set aside, alone.  Where it computes what it
    has computed of others, too, that is of all of them: they are loaded together."""
    same = [
        other.names
        for other in others
        if write.kind == other.kind == COMPUTED and common_nbytes(write.move, other.move)
    ]
    return replace(write, time=0, names=write.names.union(*same))


def _scalars_like(
    model: MadeUpModel, looked: frozenset[str], *, kinds: bool = False
) -> frozenset[str]:
    """All tensors of one element if one of these is; kinds: those alone that are called as it, but
    for numbers.  A loader that takes one by item() does so in each layer, and a trial ends at the
    first."""
    scalars = {name for name, _, shape, _, _ in model.tensors if math.prod(shape) == 1}
    called = {_NUMBER.sub("", name) for name in looked & scalars}
    if not called:
        return frozenset()
    return frozenset(n for n in scalars if not kinds or _NUMBER.sub("", n) in called)


def looks_anew(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    recording: Recording,
) -> str:
    """Watches the loader of a recording once more: with other attributes it may look at values that
    it did not look at before, which nobody would compare.  What it looks at, or ""."""
    everything, aside = frozenset(name for name, *_ in model.tensors), frozenset[str]()

    def watched(names: frozenset[str], opaque: frozenset[str]) -> Tracer:
        tracer = Tracer(held, model, opaque=opaque)
        with contextlib.suppress(RebindsError):  # caches: what it then does is tried
            _trace(module, load, model, held, tracer, names, recording.fallback)
        return tracer

    while (tracers := [watched(everything - aside, frozenset())])[0].refused:
        refused = tracers[0].refused
        if not refused <= recording.fallback.keys() - aside:
            return f"it looks at values of {', '.join(sorted(refused)[:5])}"
        aside |= refused | (_scalars_like(model, refused) & recording.fallback.keys())
    tracers += [watched(aside, aside)] if aside else []
    known = [(outside.start(), outside) for outside, _ in recording.outside]
    for tracer in tracers:
        for area in tracer.looked.keys() - recording.looked.keys():
            return f"it looks at values of {held.areas[area].path}"
        for found in tracer.outside.values():
            place = found.start()  # 0 where it is gone again
            if place and not any(place == start and each.holds(found) for start, each in known):
                return "it looks at values outside the module"
    return ""


def _try_alone(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    recording: Recording,
) -> None:
    """Given only the fallback tensors, a loader must not write what it does not write otherwise."""
    names = frozenset(recording.fallback)
    tracer = Tracer(held, model, opaque=names)
    before = held.sums_of(recording.gaps)
    _trace(module, load, model, held, tracer, names, recording.fallback)
    after = held.sums_of(recording.gaps)
    for area, gaps in recording.gaps.items():
        if after.get(area) != before.get(area):
            raise RecordingError(f"{held.areas[area].path}: written by means that cannot be seen")
        start = held.areas[area].start
        for gap in gaps:
            place = replace(gap, destination=gap.destination + start)
            if any(common_nbytes(place, write.move) for write in tracer.writes[area]):
                path = held.name(area, gap.destination)
                raise RecordingError(f"{path} is written when it is given {min(names)} alone")


def _kept_outside(model: MadeUpModel, tracer: Tracer) -> frozenset[str]:
    """Tensors that are still referred to when the loader has returned, or what was made of them.
    RecordingError where others than the module's were written to that are still there."""
    if model.referenced() or tracer.escaped() or tracer.changes_outside():
        gc.collect()
    found = model.referenced() | tracer.escaped()
    if not found and tracer.changes_outside():
        raise RecordingError("it writes to tensors that the module has in a container or an object")
    return found


def _trace(
    module: torch.nn.Module,
    load: LoadWeights,
    model: MadeUpModel,
    held: ModuleMemory,
    tracer: Tracer,
    names: frozenset[str],
    aside: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs the loader under a tracer; in vain if that refuses something."""
    kept = Bindings(module)
    given = [model.pairs(names)]  # the loader's alone once it has them
    try:
        with torch.no_grad(), tracing(tracer):
            bounded(lambda: load(given.pop()))
    except ReadsValuesError:
        return
    except NotEndedError:
        raise
    except Exception as error:
        check()
        _check_threads(tracer)
        refuse_other_forms(held, model, tracer)
        if len(names) == len(model.tensors):  # it may have raised for want of the others
            refuse_unloadable(error, held, model, tracer)
        text = f"it raised {error_text(error)}"
        for name, why in list(aside.items())[:1]:
            text += f", when it is not given {name}: {why}"
        raise RecordingError(text) from error
    except BaseExceptionGroup:  # an asyncio.TaskGroup makes one of what ends the load
        if not tracer.refused:
            raise
    finally:
        changed = kept.restore()
    check()  # whatever the loader makes of the error
    _check_threads(tracer)
    if changed and not tracer.refused:
        raise RebindsError(f"it binds other tensors to {', '.join(changed[:5])}")


def _check_threads(tracer: Tracer) -> None:
    if tracer.late:
        raise RecordingError(_TASKS_WAIT)
    if tracer.elsewhere:
        raise RecordingError("threads that it starts work on the tensors")
