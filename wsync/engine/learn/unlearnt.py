"""A loader for a load_weights that cannot be learnt, which is called with whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from wsync.engine.learn.made_up import MadeUpTensors
from wsync.engine.learn.memory import ModuleMemory, wrapped_parameters
from wsync.engine.ring_loaders import CallingLoader, LoadWeights
from wsync.module_tensors import checksum_of
from wsync.probing.numbering import Made, Source
from wsync.probing.probe import Overwriting, RaisedError


class UnlearntLoader(CallingLoader):
    """Calls load_weights once a round, if made-up tensors that came in parts gave the same bytes as
    in one call, or else once an update, with copies of all tensors in host memory.

    together: tensors that no rounds bring apart.  given: values that some have to have.

    Attributes:
        lacking: parameters that nothing was loaded to, and their bytes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: LoadWeights,
        sources: Sequence[Source],
        together: Iterable[Sequence[Source]],
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self._load, self._given, self._sources = load, given, sources
        # other values than learning has left
        self._values, self._former = (MadeUpTensors(sources, seed) for seed in (2, 3))
        memory = ModuleMemory(module)
        self._tensors = memory.tensors() or []
        self.lacking = self._lacking(memory)
        calls = list(together)
        wanted = self._made([sources])
        # rounds may bring any tensor first; of wrappers nothing is seen
        at_once = bool(wrapped_parameters(module)) or any(
            self._made(each) != wanted for each in (calls, calls[::-1])
        )
        names = [source.name for source in sources]
        super().__init__(module, load, at_once=names if at_once else ())

    def _lacking(self, memory: ModuleMemory) -> dict[str, int]:
        loads = Overwriting(self._load, self._tensors)
        loads.invert()
        before = [checksum_of(tensor) for tensor in self._tensors]
        try:
            loads.load(Made(self._sources, self._value))
            after = [checksum_of(tensor) for tensor in self._tensors]
        except RaisedError:
            return {}  # it may do with other values
        finally:
            loads.put_back()
        rows = zip(memory.targets, self._tensors, before, after, strict=True)
        return {
            target.path: tensor.nbytes
            for target, tensor, one, other in rows
            if target.parameter and one == other
        }

    def _made(self, calls: Iterable[Sequence[Source]]) -> list[int]:
        """Checksums of what calls make of made-up tensors, where others had been loaded; none where
        one fails.  The weights are lost."""
        loads = Overwriting(self._load, self._tensors)
        try:
            loads.load(Made(self._sources, self._former.of))
            for call in calls:
                loads.load(Made(call, self._value))
                self._values.restore()
        except RaisedError:  # perhaps for want of the others
            return []
        return [checksum_of(tensor) for tensor in self._tensors]

    def _value(self, source: Source) -> torch.Tensor:
        return self._given[source.name] if source.name in self._given else self._values.of(source)
