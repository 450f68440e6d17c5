"""Turns parameters into regions and maps by their modules and by what a converter does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.bridge import bridge_converter
from wsync.families.probed_converter import Convert, Whole, converter_of, is_slimes, learn
from wsync.families.registry import TOGETHER, Model
from wsync.families.rules import ShardPlacement
from wsync.families.shares import share_of
from wsync.megatron.global_names import EMBEDDING, OUTPUT
from wsync.megatron.ranks import Ranks
from wsync.module_tensors import Slots, homes_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from wsync.megatron.rule_reader import Read


class LearntReader:
    """Regions by the modules that hold parameters, and maps that a converter was seen to make."""

    def __init__(
        self,
        convert: Convert,
        holders: Mapping[str, Sequence[Module]],
        slots: Slots,
        spec: Model,
        ranks: Ranks,
        index: Callable[[str], int],
        rows_of_ranks: bool,
    ) -> None:
        self._placements: dict[str, ShardPlacement] = {}
        wholes: dict[str, Whole] = {}
        for name, tensor in zip(slots.names, slots.read(), strict=True):
            cut = ranks.expert_tensor if ".experts." in name else ranks.tensor
            shape, placement = share_of(
                name, tensor, holders[name], cut, rows_of_ranks=rows_of_ranks
            )
            self._placements[name] = placement
            wholes[name] = Whole(shape, tensor.dtype)
        self._pieces = learn(convert, wholes)
        for name, pieces in self._pieces.items():
            if (expert := index(name)) >= 0:
                count = spec.sizes["experts"]
                self._pieces[name] = [piece.stacked(expert, count) for piece in pieces]
        for name in wholes:
            if name.removeprefix("language_model.") in (EMBEDDING, OUTPUT):
                self._strip(name, wholes[name].shape[0], spec.sizes.get("vocab"))

    def read(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Read:
        """As RuleReader does it."""
        del tensor, shape
        placement = self._placements[name]
        maps = [piece.map({}, TOGETHER) for piece in self._pieces[name] if placement.meets(piece)]
        return placement.regions, maps, strides

    def _strip(self, name: str, padded: int, rows: int | None) -> None:
        """Takes the rows that pad the vocabulary out of tensors in which a converter has them."""
        if rows is None or rows >= padded:
            return
        self._pieces[name] = [
            piece
            if piece.shape[:1] != (padded,)
            else replace(
                piece,
                shape=(rows, *piece.shape[1:]),
                extent=(min(piece.extent[0], rows - piece.target_start[0]), *piece.extent[1:]),
            )
            for piece in self._pieces[name]
            if piece.shape[:1] != (padded,) or piece.target_start[0] < rows
        ]


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
        raise _core.InvalidArgumentError("converter and bridge: which of the two is meant?")
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
        # slime gives its converters what it has gathered, one rank after another; its arguments
        # say of how many ranks.
        count = getattr(config, "tensor_model_parallel_size", 1)
        rows_of_ranks = is_slimes(converter) and count == ranks.tensor.ranks
        convert = converter_of(converter, config)
        return LearntReader(convert, holders, slots, spec, ranks, index, rows_of_ranks)
