"""Finds out whether a trainer quantises in another way than the engine.

A load copies tensors, and a copy converts values to the dtype of its target.  If a copy converts
codes, the results have no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from wsync.engine.learn.load_targets import LoadTargets
from wsync.engine.not_taken import converting, meaningless, refusing, text_of
from wsync.module_tensors.names import QUANTISED
from wsync.probing.learn import LearntLoad, NotLearntError
from wsync.probing.numbering import Made, Source
from wsync.probing.probe import Load, RaisedError

_VALUE: Final = 2  # every numeric dtype can hold this value


def not_taken(module: torch.nn.Module, sources: Sequence[Source], error: RaisedError) -> Exception:
    """Returns the error to raise after a load has failed.  If the module does not have the name, or
    if the tensor is quantised, this is NotTakenError.  Otherwise it is NotLearntError, because the
    made-up values may have made the load fail."""
    known = {source.name: source for source in sources}
    source, why = known.get(error.name), error.error
    if source is None:
        return NotLearntError(f"before load_weights took a tensor, {error}")
    codes = source.dtype.itemsize == 1 or QUANTISED.search(source.name)
    # vLLM's AutoWeightsLoader names the module or parameter that does not exist
    stem = source.name.rpartition(".")[0] or source.name
    named = isinstance(why, ValueError) and stem in str(why)
    if isinstance(why, KeyError | AttributeError) or named or codes:
        return refusing(module, text_of(*source), why)
    return NotLearntError(f"after load_weights took {source.name}, {error}")


def refuse_conversions(
    module: torch.nn.Module,
    load: Load,
    memory: LoadTargets,
    sources: Sequence[Source],
    does: LearntLoad,
) -> None:
    """Raises NotTakenError if all that a load does with a source is to convert it from or to codes.

    To find out, loads sources whose elements all have the same value.  A conversion keeps the
    value.  The module's weights are lost.
    """
    tensors = memory.tensors()
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
