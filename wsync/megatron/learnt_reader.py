"""Turns parameters into regions, by their modules, and into maps, by a learnt converter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.bridge import bridge_converter
from wsync.families.probed_converter import Whole, converter_of, is_slimes, learn
from wsync.families.registry import TOGETHER, Model
from wsync.families.rules import Piece, ShardPlacement
from wsync.families.shares import share_of
from wsync.megatron.global_names import EMBEDDING, OUTPUT
from wsync.megatron.ranks import Ranks
from wsync.module_tensors import Slots, homes_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from wsync.megatron.rule_reader import Read


class LearntReader:
    """Reads regions from the modules of parameters, and maps from a learnt converter."""

    def __init__(
        self, placements: Mapping[str, ShardPlacement], pieces: Mapping[str, Sequence[Piece]]
    ) -> None:
        self._placements, self._pieces = placements, pieces

    def read(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Read:
        """Like RuleReader.read."""
        del tensor, shape
        placement = self._placements[name]
        maps = [piece.map({}, TOGETHER) for piece in self._pieces[name] if placement.meets(piece)]
        return placement.regions, maps, strides


def learnt_reader(
    converter: Callable[..., Any] | None,
    bridge: Any,
    config: Any,
    chunks: Sequence[Module],
    slots: Slots,
    spec: Model,
    ranks: Ranks,
) -> LearntReader:
    if converter is not None and bridge is not None:
        raise _core.InvalidArgumentError("converter and bridge are both given: pass one of them")
    above: dict[int, list[Module]] = {}  # the modules that a tensor is in, innermost first
    for chunk in chunks:
        for _, home, key, path in homes_of(chunk):
            parts = path.split(".")[:-1]
            inside = [chunk.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
            above.setdefault(id(home[key]), inside[::-1])
    holders = {name: above[id(t)] for name, t in zip(slots.names, slots.read(), strict=True)}
    with contextlib.ExitStack() as stack:
        index: Callable[[str], int] = lambda name: -1  # noqa: E731
        if converter is None:
            modules = {name: inside[0] for name, inside in holders.items()}
            converter, index = stack.enter_context(bridge_converter(bridge, modules))
        # slime's converters get the gathered rows, one rank after another; slime's arguments have
        # the number of ranks.
        count = getattr(config, "tensor_model_parallel_size", 1)
        rows_of_ranks = is_slimes(converter) and count == ranks.tensor.ranks
        placements: dict[str, ShardPlacement] = {}
        wholes: dict[str, Whole] = {}
        for name, tensor in zip(slots.names, slots.read(), strict=True):
            cut = ranks.expert_tensor if ".experts." in name else ranks.tensor
            shape, placements[name] = share_of(
                name, tensor, holders[name], cut, rows_of_ranks=rows_of_ranks
            )
            wholes[name] = Whole(shape, tensor.dtype)
        found = learn(converter_of(converter, config), wholes)
        for name, pieces in found.items():
            if (expert := index(name)) >= 0:
                found[name] = [piece.stacked(expert, spec.sizes["experts"]) for piece in pieces]
            elif name.removeprefix("language_model.") in (EMBEDDING, OUTPUT):
                found[name] = list(
                    _stripped(pieces, wholes[name].shape[0], spec.sizes.get("vocab"))
                )
    return LearntReader(placements, found)


def _stripped(pieces: Iterable[Piece], padded: int, rows: int | None) -> Iterator[Piece]:
    """The pieces without rows that pad the vocabulary, if the converter's tensors have them."""
    for piece in pieces:
        if rows is None or rows >= padded or piece.shape[:1] != (padded,):
            yield piece
        elif (left := rows - piece.target_start[0]) > 0:
            extent = (min(piece.extent[0], left), *piece.extent[1:])
            yield replace(piece, shape=(rows, *piece.shape[1:]), extent=extent)
