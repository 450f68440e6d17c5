"""The layout of a Megatron-Core model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.checkpoints.hub_cache import folder_of
from wsync.checkpoints.safetensors_layout import read_config
from wsync.families.registry import LOADERS, Family, Model, read_model
from wsync.layout import TrainerLayout, position
from wsync.megatron.gathering import check_gathered
from wsync.megatron.global_names import find_slots, local_experts
from wsync.megatron.layer_settings import check_layers
from wsync.megatron.learnt_reader import LearntReader, learnt_reader
from wsync.megatron.ranks import Ranks
from wsync.megatron.rule_reader import RuleReader
from wsync.module_tensors import Slot, Slots

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

_Box = tuple[str, Sequence[int]]  # a target's name, and the start of a box in it


def layout(
    model: Module | Sequence[Module],
    config: Any,
    *,
    model_name: str | None = None,
    loaded_by: str = LOADERS[0],
    converter: Callable[..., Any] | None = None,
    bridge: Any = None,
    group: ProcessGroup | None = None,
) -> TrainerLayout:
    """The layout of this rank of a Megatron-Core model.

    `model`: one module, or a list with a module for each virtual pipeline stage.  Every update
    reads the list again, so you may replace modules by others with the same parameters.
    `config`: the Hugging Face configuration, or Megatron's (slime's) arguments together with
    `model_name`.  wsync reads sizes (hidden_size, vocab_size, num_layers, ...) and
    untie_embeddings_and_output_weights.  If the arguments name an `hf_checkpoint`, its config.json
    overrides them.  `loaded_by`: the loader that filled the model.  "megatron" stands for loaders
    that keep weights as Megatron-Core needs them, like Megatron-Bridge and mbridge; "slime" stands
    for slime's loader, which exchanges the halves of Qwen3-Next's eh_proj.  `converter`: a function
    that replaces the family.  It makes (name, tensor) pairs of Hugging Face tensors from one whole
    parameter: convert(name, tensor), or slime's convert(args, name, tensor), which gets `config` as
    args.  The parameter is whole, as a single tensor-parallel rank would hold it.  If `config` has
    tensor_model_parallel_size, slime's converters get delta nets' parameters as slime gathers them:
    each rank's rows, one rank after another.  A converter is called only while the layout is made,
    with made-up CPU tensors.  Rows that pad the vocabulary are left out.  `bridge`: an AutoBridge
    of Megatron-Bridge, whose mappings are used as the converter.  `group`: the ranks that take part
    in updates (default: all).

    Not collective.  With overlap_param_gather, call disable_forward_pre_hook() before an update of
    the model's own tensors, or the update raises StateError.

    Raises UnsupportedError for an unknown family.  Raises LayoutError for a parameter that no rule
    matches, that fills another parameter's target, whose shape differs from the configuration's,
    whose converter wsync cannot learn, or whose cut wsync cannot tell.
    """
    chunks = model if isinstance(model, Sequence) else [model]
    learnt = None if converter is None and bridge is None else Family("of a converter")
    said = _checkpoint_config(config)
    spec = read_model(config, model_name, loaded_by, family=learnt, checkpoint=said)
    ranks = Ranks.of(chunks)
    rank, count = position(group)
    slots = Slots(chunks, lambda: _slots(chunks, spec, ranks))
    names, current = slots.names, slots.read()
    table = _core.describe(current, names, gpu=True)
    reader: RuleReader | LearntReader = RuleReader(spec, ranks)
    if learnt is not None:
        reader = learnt_reader(converter, bridge, config, chunks, slots, spec, ranks)
    built = _build(reader, rank, names, current, table)

    def read() -> list[Tensor]:
        check_gathered(chunks)
        return slots.read()

    return TrainerLayout(
        *(built, names, read, table, rank, count, group),
        other_names=local_experts(names, spec, ranks),
        widened={name for name in names if name.endswith(".expert_bias")},
    )


def _checkpoint_config(args: Any) -> Any:
    """The config.json of slime's `hf_checkpoint`: a folder, or a model of the Hugging Face hub.
    None if this host does not have it."""
    name = getattr(args, "hf_checkpoint", None)
    if not name:
        return None
    folder = folder_of(str(name))
    try:
        return _attributes(read_config(Path(folder) / "config.json")) if folder else None
    except (_core.SystemCallError, _core.LayoutError):
        return None


def _attributes(config: Mapping[str, Any]) -> SimpleNamespace:
    made = {key: _attributes(v) if isinstance(v, dict) else v for key, v in config.items()}
    return SimpleNamespace(**made)


def _build(
    reader: RuleReader | LearntReader,
    rank: int,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    table: _core.TensorTable,
) -> _core.Layout:
    """The layout of the parameters, as a reader reads them."""
    builder = _core.LayoutBuilder(rank)
    claimed: dict[_Box, str] = {}
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        _, dtype, shape, strides, _ = table[index]
        regions, maps, strides = reader.read(name, tensor, shape, strides)
        builder.add_parameter(name, index, dtype, strides, regions, maps)
        _claim(claimed, name, maps)
    return builder.build()


def _claim(claimed: dict[_Box, str], name: str, maps: Sequence[_core.Map]) -> None:
    """Raises LayoutError if two parameters of this rank fill one box of the checkpoint."""
    for target, _, _, start, *_ in maps:
        other = claimed.setdefault((target, start), name)
        if other != name:
            raise _core.LayoutError(f"{other} and {name}: both fill {target}")


def _slots(chunks: Sequence[Module], spec: Model, ranks: Ranks) -> Iterator[Slot]:
    """The slots of all parameters, after a check of the modules against the configuration."""
    _keep_biases_wide(chunks)
    check_layers(chunks, spec)
    return find_slots(chunks, spec, ranks)


def _keep_biases_wide(chunks: Sequence[Module]) -> None:
    """Makes the biases of routers float32 again, because engines need that from the first update
    on.  Float16Module narrows them until the next forward pass."""
    for chunk in chunks:
        for module in chunk.modules():
            keep = getattr(module, "_maintain_float32_expert_bias", None)
            if callable(keep):
                keep()
