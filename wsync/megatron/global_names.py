"""A rank's parameters under their names in the unsharded model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wsync import _core
from wsync.families.blocks import EXPERT
from wsync.families.registry import Model
from wsync.layout import global_name
from wsync.megatron.ranks import Ranks
from wsync.module_tensors import Slot, homes_of

if TYPE_CHECKING:
    from torch.nn import Module

OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
LAYER = re.compile(r"((?:language_model\.)?(?:decoder|mtp)\.layers\.)(\d+)(?=\.|$)")


def find_slots(chunks: Sequence[Module], spec: Model, ranks: Ranks) -> Iterator[Slot]:
    """Parameters and expert biases of all chunks under their global names."""
    embedded = False
    last = dict[str, tuple[int, str]]()  # by kind of parameter: the highest expert and its name
    parts: dict[str, int] = {}  # each name has a part, even if names share a tensor
    for number, chunk in enumerate(chunks):
        numbers = _layer_numbers(chunk, number if len(chunks) > 1 else None)
        for path, module in chunk.named_modules():
            shared = getattr(module, "share_embeddings_and_output_weights", None)
            if isinstance(shared, bool) and shared != spec.tied:
                raise _core.LayoutError(
                    f"{path or 'model'}: share_embeddings_and_output_weights is {shared}, "
                    f"but the configuration says tied embeddings: {spec.tied}"
                )
        for module, home, key, full in homes_of(chunk, once=False):
            if home is module._buffers and "expert_bias" not in key:
                continue
            local = global_name(full)
            name = _global(local, numbers, spec, ranks)
            if (match := EXPERT.search(local)) is not None:
                kind = f"{local[: match.start(1)]}.{local[match.end() :]}"
                last[kind] = max(last.get(kind, (-1, "")), (int(match.group(1)), local))
            # A stage with MTP layers has a second embedding, which Megatron keeps equal.
            plain = name.removeprefix("language_model.")
            again, embedded = embedded and plain == EMBEDDING, embedded or plain == EMBEDDING
            if not again and not (spec.tied and plain == OUTPUT):
                yield Slot(name, home, key, full, parts.setdefault(name, len(parts)))
        for _, local in last.values():
            _check_experts(local, spec, ranks, last=True)
        last.clear()


def _layer_numbers(chunk: Module, virtual: int | None) -> dict[str, int]:
    """The global index of each layer in a chunk, by the layer's path.  virtual: the chunk's number
    in this pipeline stage, or None if it is the only chunk."""
    numbers: dict[str, int] = {}
    offset: int | None = None
    for path, module in chunk.named_modules(remove_duplicate=False):
        match = LAYER.fullmatch(global_name(path))
        if match is None:
            continue
        number = getattr(module, "layer_number", None)  # counts from 1, separately for MTP layers
        if isinstance(number, int):
            numbers[match.group()] = number - 1
        elif not match.group(1).endswith("mtp.layers."):  # MTP layers are in one stage
            offset = _layer_offset(chunk, virtual) if offset is None else offset
            numbers[match.group()] = int(match.group(2)) + offset
    return numbers


def _layer_offset(chunk: Module, virtual: int | None) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = next((c for m in chunk.modules() if (c := getattr(m, "config", None))), None)
    if config is None:
        raise _core.LayoutError("layers cannot be counted without a layer_number or a config")
    if "vp_stage" in inspect.signature(get_transformer_layer_offset).parameters:
        virtual = getattr(chunk, "vp_stage", virtual)
        return int(get_transformer_layer_offset(config, vp_stage=virtual))
    return int(get_transformer_layer_offset(config))


def _global(local: str, numbers: dict[str, int], spec: Model, ranks: Ranks) -> str:
    """The global name of a parameter, from its name in one chunk."""
    name = local
    match = LAYER.match(name)
    if match is not None:
        layer = numbers.get(match.group(), int(match.group(2)))
        name = f"{match.group(1)}{layer}{name[match.end() :]}"
    match = EXPERT.search(name)
    if match is not None:
        expert = int(match.group(1)) + ranks.expert.rank * _check_experts(local, spec, ranks)
        name = f"{name[: match.start(1)]}{expert}{name[match.end() :]}"
    return name


def _check_experts(local: str, spec: Model, ranks: Ranks, last: bool = False) -> int:
    """The number of experts on a rank.  Raises LayoutError if the expert in a parameter's local
    name is not one of them, or not the last one if `last` is true."""
    match = EXPERT.search(local)
    expert = int(match.group(1)) if match is not None else 0
    experts = spec.sizes.get("experts", 0)
    share, rest = divmod(experts, ranks.expert.ranks)
    if rest or expert >= share or (last and expert != share - 1):
        raise _core.LayoutError(
            f"{local}: this rank's {'last ' if last else ''}expert is {expert}, but {experts} "
            f"experts over {ranks.expert.ranks} expert-parallel ranks give {share} each"
        )
    return share


def local_experts(names: Sequence[str], spec: Model, ranks: Ranks) -> dict[str, str]:
    """Experts' names in slime's backups, by their global names, if each expert is a module.  In
    these names the layer's number is global, but the expert's number counts on this rank."""
    first = ranks.expert.rank * (spec.sizes.get("experts", 0) // ranks.expert.ranks)
    return {
        name: f"{name[: match.start(1)]}{int(match.group(1)) - first}{name[match.end() :]}"
        for name in names
        if first and (match := EXPERT.search(name)) is not None
    }
