"""FSDP1's units: each flattens its parameters, one after another, into one flat parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.boxes import contiguous_strides
from wsync.fsdp.parts import TIED, Part, Shape, joined, plain_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FlatUnit:
    """One unit that has parameters.

    prefix: the name of its module.  handle: torch's FlatParamHandle.
    """

    prefix: str
    handle: Any

    @property
    def flat(self) -> Any:
        """The flat parameter."""
        return self.handle.flat_param

    def tensors(self) -> Iterator[Tensor]:
        """The flat parameter, and torch's tensors for the parameters that are flattened into it."""
        yield self.flat
        yield from getattr(self.flat, "_params", None) or ()
        yield from getattr(self.flat, "_shared_params", None) or ()

    def names(self) -> Iterator[tuple[str, int]]:
        """(name, place in the flat parameter) of its parameters: first each parameter's own name,
        then the names of shared parameters."""
        flat = self.flat
        places = {key: place for place, key in enumerate(flat._fqns)}
        paths = list(places.items())
        for info in flat._shared_param_infos:
            first = joined(info.prim_module_name, info.prim_param_name)
            paths.append((joined(info.module_name, info.param_name), places[first]))
        yield from dict.fromkeys((plain_name(joined(self.prefix, key)), at) for key, at in paths)

    def parts(self, tied: bool) -> Iterator[Part]:
        """This rank's interval of each parameter, as boxes."""
        flat = self.flat
        self.write_back()
        # The flat parameter is the local shard, unless a pass has gathered it.
        tensor = getattr(flat, "_local_shard", flat) if self._is_whole() else flat
        known = list(self.names())
        others = {place for name, place in known if name != TIED}
        contiguous = getattr(flat, "_contiguities", None) or [True] * len(flat._shapes)
        for name, place in known:
            if flat._param_extensions[place] is not None:  # torch knows only the local shape
                raise _core.UnsupportedError(
                    f"{name}: FSDP1 has flattened a DTensor and knows only this rank's part of "
                    "it: use FSDP2 (fully_shard) for tensor parallelism"
                )
            if not contiguous[place]:
                raise _core.UnsupportedError(
                    f"{name}: FSDP1 has flattened it in the order of its memory: make the "
                    "parameter contiguous before FSDP1 wraps it"
                )
            if tied and name == TIED:
                if place in others:
                    continue
                raise _core.LayoutError(
                    f"{name}: it is a separate parameter, but the configuration says tied "
                    "embeddings: wrap embedding and head in one FSDP unit"
                )
            yield _part(name, tensor, flat, place)

    def write_back(self) -> None:
        """Copies assigned parameters into the flat parameter, as the next forward pass would."""
        if self.handle._use_orig_params:
            self.handle._writeback_orig_params()

    def _is_whole(self) -> bool:
        """Whether the flat parameter holds the elements of all ranks now."""
        flat = self.flat
        sharded = self.handle.uses_sharded_strategy
        return bool(sharded and flat.size() == flat._unpadded_unsharded_size)


def flat_units(module: Any) -> Iterator[FlatUnit]:
    """Every unit of a model that has parameters; a unit at several paths comes once for each."""
    seen: set[tuple[str, int]] = set()  # a wrapper has its module's attributes, too
    for path, owner in module.named_modules(remove_duplicate=False):
        handle = getattr(owner, "_handle", None)
        key = plain_name(path), id(handle)
        if handle is not None and hasattr(handle, "flat_param") and key not in seen:
            seen.add(key)
            yield FlatUnit(key[0], handle)


def saved_dtypes(module: Any) -> Iterator[tuple[str, Any]]:
    """(name, original dtype) of each buffer that FSDP1 casts because of
    MixedPrecision(buffer_dtype=).  State dicts have the original dtype."""
    for path, part in module.named_modules():
        policy = getattr(part, "mixed_precision", None)
        if getattr(policy, "buffer_dtype", None) is not None:
            for name, dtype in getattr(part, "_buffer_name_to_orig_dtype", {}).items():
                yield plain_name(joined(path, name)), dtype


def check_inside(module: Any, units: Sequence[FlatUnit]) -> None:
    """Raises LayoutError if a parameter is flattened into a unit around the module, because the
    flat parameter cannot be reached from the module."""
    known = {id(tensor) for unit in units for tensor in unit.tensors()}
    for path, part in module.named_modules():
        views = {key: getattr(value, "_base", None) for key, value in vars(part).items()}
        for key, tensor in (views | part._parameters).items():
            if getattr(tensor, "_fsdp_flattened", False) and id(tensor) not in known:
                raise _core.LayoutError(
                    f"{plain_name(joined(path, key))}: it is flattened into an FSDP unit around "
                    "the given module: pass the FSDP module itself, not its .module or a part"
                )


def _part(name: str, tensor: Tensor, flat: Any, place: int) -> Part:
    """The interval of one parameter, in boxes."""
    info, shape = flat._shard_param_infos[place], tuple(flat._shapes[place])
    regions: list[tuple[Shape, Shape, Shape]] = []
    if info.in_shard:
        first, last = info.intra_param_start_idx, info.intra_param_end_idx + 1
        for start, extent, at in _boxes(shape, first, last):
            # the boxes' strides end in 1, so the last axis counts from the buffer's start
            local = (0,) * (len(shape) - 1) + (info.offset_in_shard + at - first,)
            regions.append((start, extent, local))
    return Part(name, tensor, shape, tuple(regions), contiguous_strides(shape))


def _boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape, int]]:
    """(start, extent, flat index) of boxes that together are the elements [first, last)."""
    if len(shape) == 1:
        yield (first,), (last - first,), first
        return
    inner = math.prod(shape[1:])
    row = first // inner
    while first < last:
        base = row * inner
        if first == base and last - base >= inner:
            rows = (last - base) // inner
            yield (row,) + (0,) * (len(shape) - 1), (rows, *shape[1:]), first
            row += rows
        else:
            end = min(last, base + inner)
            for start, extent, at in _boxes(shape[1:], first - base, end - base):
                yield (row, *start), (1, *extent), base + at
            row += 1
        first = row * inner
