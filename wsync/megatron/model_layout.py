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

_Box = tuple[str, Sequence[int]]  # a target, and where in it


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

    `model`: one module, or one per virtual pipeline stage, in a list that is read again at every
    update: others of the same parameters may take their places.  `config`: the Hugging Face
    configuration, or Megatron's (slime's) arguments together with `model_name`: the sizes are read
    (hidden_size, vocab_size, num_layers, ...) and untie_embeddings_and_output_weights; config.json
    of their `hf_checkpoint` goes before them.  `loaded_by`: whose loader filled the model.
    "megatron": one that has Megatron-Core compute with the weights as they are meant, as
    Megatron-Bridge and mbridge do; "slime": slime's own, which exchanges the halves of Qwen3-Next's
    eh_proj.  `converter`: a function that makes the Hugging Face tensors of one whole parameter, in
    the place of a family: convert(name, tensor), or slime's convert(args, name, tensor), which is
    called with `config`, gives (name, tensor) pairs.  A whole one is what one tensor-parallel rank
    would hold; slime's gets delta nets' as the ranks' rows one after another, if `config` says
    tensor_model_parallel_size, as slime gathers them.  It is called with made-up CPU tensors, only
    while the layout is made; rows that pad the vocabulary are left out.  `bridge`: an AutoBridge of
    Megatron-Bridge, whose mappings are the converter.  `group`: the ranks that take part in updates
    (default: all).  Not collective.  With overlap_param_gather, an update of the model's own
    tensors needs disable_forward_pre_hook() before it, or it raises StateError.

    Raises UnsupportedError for an unknown family, LayoutError for a parameter that no rule
    matches, that goes where another one does, that has another shape than the configuration says,
    that no converter copies, or whose cut is open.
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
    """config.json of the folder, or of the model of the Hugging Face hub, that slime's arguments
    name; None where it is not here."""
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
    """The layout of parameters that a reader knows."""
    builder = _core.LayoutBuilder(rank)
    claimed: dict[_Box, str] = {}
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        _, dtype, shape, strides, _ = table[index]
        regions, maps, strides = reader.read(name, tensor, shape, strides)
        builder.add_parameter(name, index, dtype, strides, regions, maps)
        _claim(claimed, name, maps)
    return builder.build()


def _claim(claimed: dict[_Box, str], name: str, maps: Sequence[_core.Map]) -> None:
    """Raises LayoutError where two parameters of this rank are one tensor of the checkpoint."""
    for target, _, _, start, *_ in maps:
        other = claimed.setdefault((target, start), name)
        if other != name:
            raise _core.LayoutError(f"{other} and {name}: both are {target}")


def _slots(chunks: Sequence[Module], spec: Model, ranks: Ranks) -> Iterator[Slot]:
    """Where parameters are, of modules that are found to agree with the configuration."""
    _keep_biases_wide(chunks)
    check_layers(chunks, spec)
    return find_slots(chunks, spec, ranks)


def _keep_biases_wide(chunks: Sequence[Module]) -> None:
    """Float16Module narrows the biases of routers, and the next forward pass makes them float32
    again, which engines are to have from the first update on."""
    for chunk in chunks:
        for module in chunk.modules():
            keep = getattr(module, "_maintain_float32_expert_bias", None)
            if callable(keep):
                keep()
