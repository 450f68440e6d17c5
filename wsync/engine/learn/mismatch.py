"""Finds that a trainer quantises in another way than the engine that is to keep its tensors.

Loaders copy, copies convert, and codes that were converted are numbers without a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from wsync._core import LayoutError
from wsync.engine.learn.memory import ModuleMemory
from wsync.machine.error_text import error_text
from wsync.module_tensors import name_of
from wsync.module_tensors.names import QUANTISED, listed, unfused
from wsync.probing.learn import LearntLoad, NotLearntError
from wsync.probing.numbering import Made, Source
from wsync.probing.probe import Load, RaisedError

_REMEDY: Final = "Options(quantise=) of the trainer says how weights are delivered"
_VALUE: Final = 2  # every format of numbers has it


class NotTakenError(LayoutError):
    """load_weights does not take what the trainer delivers: it is quantised in another way than
    what the engine keeps, or has names that the module has not."""


def converting(module: torch.nn.Module, what: Iterable[str]) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} and the trainer do not quantise alike: its load_weights converts "
        f"{listed(what)} ({_REMEDY})"
    )


def refusing(module: torch.nn.Module, what: str, error: Exception) -> NotTakenError:
    return NotTakenError(
        f"{type(module).__name__} does not take what the trainer delivers: loading {what}: "
        f"{error_text(error)}{unfused([what.partition(' ')[0]])}"
    )


def meaningless(first: torch.dtype, last: torch.dtype) -> bool:
    """Whether a conversion of values makes no weights of weights: formats of one byte are codes,
    or scales without a sign, and integers are no rounded weights."""
    if first == last or torch.bool in (first, last):
        return False
    return 1 in (first.itemsize, last.itemsize) or (
        first.is_floating_point and not last.is_floating_point
    )


def not_taken(module: torch.nn.Module, sources: Sequence[Source], error: RaisedError) -> Exception:
    """What to raise where a load has failed: NotTakenError for a name that the module does not
    have, and for a quantised tensor, else NotLearntError: values may have been the reason."""
    known = {source.name: source for source in sources}
    source, why = known.get(error.name), error.error
    if source is None:
        return NotLearntError(str(error))
    codes = source.dtype.itemsize == 1 or QUANTISED.search(source.name)
    # vLLM's AutoWeightsLoader says which module or parameter there is not
    stem = source.name.rpartition(".")[0] or source.name
    named = isinstance(why, ValueError) and stem in str(why)
    if isinstance(why, KeyError | AttributeError) or named or codes:
        return refusing(module, text_of(*source), why)
    return NotLearntError(f"loading {source.name}, {error}")


def refuse_conversions(
    module: torch.nn.Module,
    load: Load,
    memory: ModuleMemory,
    sources: Sequence[Source],
    does: LearntLoad,
) -> None:
    """Raises NotTakenError where a load only converts codes, or to codes.  If all elements have one
    value, they have it afterwards, too.  The weights are lost."""
    tensors = memory.tensors() or []
    known = {source.name: source for source in sources}
    doubtful = {
        name: piece
        for name, piece in does.computed.items()
        if meaningless(known[name].dtype, tensors[piece.target].dtype)
    }
    if not doubtful:
        return

    def made(source: Source) -> torch.Tensor:
        return torch.full(source.shape, _VALUE, dtype=torch.uint8, device="cpu").to(source.dtype)

    with torch.no_grad():
        load(Made(sources, made, whole=True))
    found = {}
    for name, piece in doubtful.items():
        if bool((piece.view(tensors).to(torch.float32) == _VALUE).all()):
            target = tensors[piece.target]
            path = text_of(memory.targets[piece.target].path, target.dtype, tuple(target.shape))
            found[name] = f"{text_of(*known[name])} to {path}"
    if found:
        raise converting(module, found.values())


def text_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{name} ({name_of(dtype)} {tuple(shape)})"
