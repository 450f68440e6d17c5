"""The layout of a Megatron-Core model."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.bridge import bridge_converter
from wsync.families.probed_converter import Convert, Whole, converter_of, is_slimes, learn
from wsync.families.registry import FIELDS, LOADERS, TOGETHER, Family, Model, read_model
from wsync.families.rules import Cut, Expansion, Rule, ShardPlacement, mtp_numbers
from wsync.families.shares import share_of
from wsync.layout import TrainerLayout, contiguous_strides, global_name, position
from wsync.module_tensors import Slot, Slots, homes_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    # of a parameter: regions, maps, element strides in the order of the rule's view
    _Read = tuple[Sequence[_core.Region], list[_core.Map], tuple[int, ...]]

__all__ = ["Ranks", "layout"]

_Box = tuple[str, Sequence[int]]  # a target, and where in it
_Needed = dict[str, tuple[object, str]]  # values of fields, and why they have to be these
OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"((?:language_model\.)?(?:decoder|mtp)\.layers\.)(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)")
_EXPERTS = re.compile(r"\.experts(?=\.|$)")
_LIMITS = (  # of the numbers in names: the number, the size that bounds it, what it counts
    ("layer", "layers", "layer"),
    ("expert", "experts", "expert"),
    ("mtp", "mtp", "MTP layer"),
    ("inner", "block", "layer of an MTP block"),
)
# sizes that shapes show only the product of, and Megatron's names of them
_SAME_SHAPE = {"g": "num_query_groups", "d": "kv_channels"}
# the same of delta nets, of which a configuration has some where a model has none, and of the
# layers of a vision tower
_NET_SIZES = {"gk": "num_key_heads", "gdk": "key_head_dim"}
_TOWER_SIZES = {"vision_heads": "num_attention_heads"}
_TOWER_LAYER = re.compile(r"vision_model\.decoder\.layers\.\d+")
# fields of Ranks, and the groups of a pg_collection that they are of
_GROUPS = {"tensor": "tp", "expert_tensor": "expt_tp", "expert": "ep"}
_GATHERING = "DistributedDataParallel._make_forward_pre_hook."
_ALONE = Cut()


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the groups that cut parameters."""

    tensor: Cut = _ALONE
    expert_tensor: Cut = _ALONE
    expert: Cut = _ALONE
    stage: int = 0

    @staticmethod
    def current() -> Ranks:
        """As Megatron's parallel_state has them; one of one where it is not initialised."""
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            return Ranks()

        def cut(kind: str) -> Cut:
            rank = getattr(state, f"get_{kind}_parallel_rank")()
            return Cut(rank, getattr(state, f"get_{kind}_parallel_world_size")())

        stage = state.get_pipeline_model_parallel_rank()
        return Ranks(cut("tensor_model"), cut("expert_tensor"), cut("expert_model"), stage)

    @staticmethod
    def of(chunks: Sequence[Module]) -> Ranks:
        """As the groups have them that a language model was built with (its pg_collection, by
        Megatron-Core 0.16); those that it does not have are parallel_state's."""
        known = Ranks.current()
        for _, module in _inside_wrappers(chunks):
            if "share_embeddings_and_output_weights" in vars(module):
                groups = vars(module).get("pg_collection")
                stage = _place(groups, "pp")
                own = {field: _place(groups, key) for field, key in _GROUPS.items()}
                return replace(
                    known,
                    **{field: cut for field, cut in own.items() if cut is not None},
                    stage=known.stage if stage is None else stage.rank,
                )
        return known

    def check(self, chunks: Sequence[Module]) -> None:
        """Raises LayoutError where a module says that this rank has another place in its groups."""
        for path, module in _inside_wrappers(chunks):
            kind = "expert_tensor" if _EXPERTS.search(path) else "tensor"
            said: list[tuple[str, object, str]] = [
                (kind, module, key) for key in ("tp_group", "_tp_group")
            ]
            said.append(("expert", module, "ep_group"))
            for home in ("pg_collection", "_pg_collection"):
                if (groups := vars(module).get(home)) is not None:
                    said += [(field, groups, key) for field, key in _GROUPS.items()]
            for field, holder, key in said:
                found, known = _place(holder, key), getattr(self, field)
                if found in (None, known) or _is_whole(path, module, found):
                    continue
                raise _core.LayoutError(
                    f"{path or 'model'}: its {field.replace('_', '-')}-parallel group ({key}) has "
                    f"this rank as (rank, size) {found.rank, found.ranks}, but the language "
                    "model's pg_collection, or else Megatron's parallel_state, as "
                    f"{known.rank, known.ranks}: build all modules with one pg_collection, or "
                    "with parallel_state's groups, and have those as long as layouts are made"
                )


def _place(home: object, key: str) -> Cut | None:
    """This rank's place in a group that an object has; None: it has none, or one that is gone."""
    group: Any = getattr(home, "__dict__", {}).get(key)
    try:
        return Cut(group.rank(), group.size())
    except (AttributeError, RuntimeError):
        return None


def _is_whole(path: str, module: Module, place: Cut) -> bool:
    """Whether a module's parameters are not cut, whatever place it says.  The shape of a linear
    layer of a group of one rank agrees, but for a head's: rows that pad the vocabulary may be as
    many as other ranks have."""
    parameters, sizes = module._parameters.values(), vars(module)
    if any(getattr(each, "parallel_mode", None) == "duplicated" for each in parameters):
        return True
    if place != _ALONE or path.endswith("output_layer"):
        return False
    sides = [(f"{side}_size", f"{side}_size_per_partition") for side in ("output", "input")]
    return any(part in sizes and sizes[part] == sizes.get(whole) for whole, part in sides)


def _inside_wrappers(chunks: Sequence[Module]) -> Iterator[tuple[str, Module]]:
    """(path, module) of all modules of all chunks but those that wrap a model."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if "module" not in module._modules:
                yield global_name(path), module


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
    (hidden_size, vocab_size, num_layers, num_attention_heads, num_query_groups, kv_channels, the
    ffn_hidden_sizes, num_experts) and untie_embeddings_and_output_weights.  `loaded_by`: whose
    loader filled the model.  "megatron": one that has Megatron-Core compute with the weights as
    they are meant, as Megatron-Bridge and mbridge do; "slime": slime's own, which exchanges the
    halves of Qwen3-Next's eh_proj.  `converter`: a function that makes the Hugging Face tensors of
    one whole parameter, in the place of a family: convert(name, tensor), or slime's convert(args,
    name, tensor), which is called with `config`, gives (name, tensor) pairs.  A whole one is what a
    trainer of one tensor-parallel rank would hold; slime's gets delta nets' as the ranks' rows one
    after another, if `config` says tensor_model_parallel_size, as slime gathers them.  It is called
    with made-up CPU tensors while the layout is made, and never again; rows that pad the vocabulary
    are left out.  `bridge`: an AutoBridge of Megatron-Bridge, whose mappings are the converter.
    `group`: the ranks that take part in updates (default: all).  Not collective.  With
    overlap_param_gather, an update of the model's own tensors needs disable_forward_pre_hook()
    before it, or it raises StateError: until the next forward pass they may be old.

    Raises UnsupportedError for an unknown family, LayoutError for a parameter that no rule
    matches, that goes where another one does, that has another shape than the configuration says,
    or whose attributes or groups contradict it, that no converter copies, or whose cut is open.
    """
    chunks = model if isinstance(model, Sequence) else [model]
    learnt = None if converter is None and bridge is None else Family("of a converter")
    spec = read_model(config, model_name, loaded_by, family=learnt)
    ranks = Ranks.of(chunks)
    rank, count = position(group)
    layers = _Layers(spec)
    slots = Slots(chunks, lambda: _slots(chunks, spec, ranks, layers), layers.numbers)
    names, current = slots.names, slots.read()
    table = _core.describe(current, names, gpu=True)
    reader: _Reader | _LearntReader = _Reader(spec, ranks)
    if learnt is not None:
        reader = _learn(converter, bridge, config, chunks, slots, spec, ranks)
    built = _build(reader, rank, names, current, table)

    def read() -> list[Tensor]:
        _check_gathered(chunks)
        tensors = slots.read()
        layers.check()
        return tensors

    return TrainerLayout(
        *(built, names, read, table, rank, count, group),
        stage=ranks.stage,
        other_names=_local_experts(names, spec, ranks),
        widened={name for name in names if name.endswith(".expert_bias")},
    )


def _build(
    reader: _Reader | _LearntReader,
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


def _keep_biases_wide(chunks: Sequence[Module]) -> None:
    """Float16Module narrows the biases of routers, and the next forward pass makes them float32
    again, which engines are to have from the first update on."""
    for chunk in chunks:
        for module in chunk.modules():
            keep = getattr(module, "_maintain_float32_expert_bias", None)
            if callable(keep):
                keep()


class _Layers:
    """The settings and numbers of a model's layers, which another part of a program may change in
    place."""

    def __init__(self, spec: Model) -> None:
        self._spec = spec
        self._found: list[tuple[str, weakref.ref[Module]]] = []
        self._beside: list[tuple[str, weakref.ref[Module], _Needed]] = []
        self._needed: _Needed = {}
        if spec.family.rules:
            family = f"the family {spec.family.name!r} needs"
            for field, value in spec.family.settings.items():
                self._needed[field] = value, f"{family} {value}"
        self._needed |= self._sizes(_SAME_SHAPE)
        self._net, self._tower = self._sizes(_NET_SIZES), self._sizes(_TOWER_SIZES)

    def _sizes(self, names: Mapping[str, str]) -> _Needed:
        """What fields have to be by the configuration, but for sizes that a family reads from
        others of its fields than are usual."""
        family, sizes, needed = self._spec.family, self._spec.sizes, _Needed()
        for size, field in names.items():
            usual = FIELDS.get(size) or family.fields.get(size, ())
            if size in family.sizes and size in sizes and family.fields.get(size, usual) == usual:
                text = f"the configuration says {sizes[size]} ({' or '.join(usual)})"
                needed[field] = sizes[size], text
        return needed

    def find(self, chunks: Sequence[Module]) -> None:
        """Finds the layers there are now, and checks them."""
        modules = [each for chunk in chunks for each in chunk.named_modules()]
        self._found = [
            (path, weakref.ref(module))
            for path, module in modules
            if _LAYER.fullmatch(global_name(path)) is not None
        ]
        self._beside = [
            (path, weakref.ref(module), needed)
            for path, module in modules
            if (needed := self._needed_beside(path, module))
        ]
        self.check()

    def _needed_beside(self, path: str, module: Module) -> _Needed:
        """What is needed of a delta net, or of a layer of a vision tower."""
        if _TOWER_LAYER.fullmatch(global_name(path)) is not None:
            return self._tower
        return self._net if all(hasattr(module, field) for field in self._net) else {}

    def numbers(self) -> list[object]:
        """The numbers that the layers have now."""
        return [getattr(layer(), "layer_number", None) for _, layer in self._found]

    def check(self) -> None:
        """Raises LayoutError where a layer's configuration says that the same bytes mean others
        than the family's rules take them for."""
        family = self._spec.family
        for path, layer in self._found if self._needed else ():
            config = getattr(layer(), "config", None)
            if config is None:
                continue
            for field, (value, text) in self._needed.items():
                # Fields of wsync's own families are of several versions of Megatron.
                if family.added and field in family.settings:
                    _check_field(config, path, field, family.name)
                _check_size(config, path, field, value, text)
        for path, part, needed in self._beside:
            holder = getattr(part(), "config", None) if needed is self._tower else part()
            for field, (value, text) in needed.items():
                _check_size(holder, path, field, value, text)


def _check_size(holder: object, path: str, field: str, value: object, text: str) -> None:
    """Raises LayoutError where a trainer's field has another value."""
    found = getattr(holder, field, value)
    if found != value:
        raise _core.LayoutError(f"{path}: the trainer's {field} is {found}, but {text}")


def _check_field(config: object, path: str, field: str, family: str) -> None:
    """Raises LayoutError for a setting of a user's family that no configuration has."""
    if not hasattr(config, field):
        raise _core.LayoutError(
            f"{path}: {type(config).__name__} has no field {field!r}, which the settings of the "
            f"family {family!r} name"
        )


def _check_gathered(chunks: Sequence[Module]) -> None:
    """Raises StateError where a forward pass gathers what optimizer steps have changed: until then
    a parameter has old values outside of this data-parallel rank's share, and nothing says so."""
    for number, chunk in enumerate(chunks):
        module: Any = chunk
        while module is not None:  # the wrapped model and all of its parts have the hook
            for hook in module._forward_pre_hooks.values():
                if getattr(hook, "__qualname__", "").startswith(_GATHERING):
                    raise _core.StateError(
                        f"model chunk {number}: its parameters may be old until the next forward "
                        "pass gathers them (overlap_param_gather): call disable_forward_pre_hook() "
                        "of Megatron's DistributedDataParallel before an update, and "
                        "enable_forward_pre_hook() after it"
                    )
            module = module._modules.get("module")


def _slots(chunks: Sequence[Module], spec: Model, ranks: Ranks, layers: _Layers) -> Iterator[Slot]:
    """Parameters and expert biases of all chunks under their global names."""
    _keep_biases_wide(chunks)
    layers.find(chunks)
    ranks.check(chunks)
    embedded = False
    last = dict[str, tuple[int, str]]()  # of each parameter that experts have, the last one's
    parts: dict[str, int] = {}  # every name is one of its own, whatever tensor has it
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
            if (match := _EXPERT.search(local)) is not None:
                kind = f"{local[: match.start(2)]}.{local[match.end() :]}"
                last[kind] = max(last.get(kind, (-1, "")), (int(match.group(2)), local))
            # A stage with MTP layers has the embedding a second time, and Megatron keeps it equal.
            plain = name.removeprefix("language_model.")
            again, embedded = embedded and plain == EMBEDDING, embedded or plain == EMBEDDING
            if not again and not (spec.tied and plain == OUTPUT):
                yield Slot(name, home, key, full, parts.setdefault(name, len(parts)))
        for _, local in last.values():
            _check_experts(local, spec, ranks, last=True)
        last.clear()


def _layer_numbers(chunk: Module, virtual: int | None) -> dict[str, int]:
    """Global layer index of every path of a layer in a chunk; virtual: its number among the chunks
    of this pipeline stage, None where it is the only one."""
    numbers: dict[str, int] = {}
    offset: int | None = None
    paths: dict[int, str] = {}
    for path, module in chunk.named_modules(remove_duplicate=False):
        match = _LAYER.fullmatch(global_name(path))
        if match is None:
            continue
        if paths.setdefault(id(module), match.group()) != match.group():
            raise _core.LayoutError(
                f"{paths[id(module)]} and {match.group()}: one module, which has one layer number"
            )
        number = getattr(module, "layer_number", None)  # counts from 1, MTP layers on their own
        if isinstance(number, int):
            numbers[match.group()] = number - 1
        elif not match.group(1).endswith("mtp.layers."):  # those lie in one stage
            offset = _layer_offset(chunk, virtual) if offset is None else offset
            numbers[match.group()] = int(match.group(2)) + offset
    return numbers


def _layer_offset(chunk: Module, virtual: int | None) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = next((c for m in chunk.modules() if (c := getattr(m, "config", None))), None)
    if config is None:
        raise _core.LayoutError("layers have neither a layer_number nor a config to count them by")
    if "vp_stage" in inspect.signature(get_transformer_layer_offset).parameters:
        virtual = getattr(chunk, "vp_stage", virtual)
        return int(get_transformer_layer_offset(config, vp_stage=virtual))
    return int(get_transformer_layer_offset(config))


def _global(local: str, numbers: dict[str, int], spec: Model, ranks: Ranks) -> str:
    """The name in the unsharded model of a name in one chunk."""
    name = local
    match = _LAYER.match(name)
    if match is not None:
        layer = numbers.get(match.group(), int(match.group(2)))
        name = f"{match.group(1)}{layer}{name[match.end() :]}"
    match = _EXPERT.search(name)
    if match is not None:
        expert = int(match.group(2)) + ranks.expert.rank * _check_experts(local, spec, ranks)
        name = f"{name[: match.start(2)]}{expert}{name[match.end() :]}"
    return name


def _check_experts(local: str, spec: Model, ranks: Ranks, last: bool = False) -> int:
    """The number of experts of a rank, of which the local name of a parameter is of one, or of
    the last one."""
    match = _EXPERT.search(local)
    expert = int(match.group(2)) if match is not None else 0
    experts = spec.sizes.get("experts", 0)
    share, rest = divmod(experts, ranks.expert.ranks)
    if rest or expert >= share or (last and expert != share - 1):
        raise _core.LayoutError(
            f"{local}: {'the last ' if last else ''}expert {expert} of a rank, but {experts} "
            f"experts over {ranks.expert.ranks} expert-parallel ranks give {share} each"
        )
    return share


def _local_experts(names: Sequence[str], spec: Model, ranks: Ranks) -> dict[str, str]:
    """Experts' global names to those that slime's backups have where experts are modules of their
    own: the layer's number is global there, and the expert's is this rank's."""
    first = ranks.expert.rank * (spec.sizes.get("experts", 0) // ranks.expert.ranks)
    return {
        name: f"{name[: match.start(2)]}{int(match.group(2)) - first}{name[match.end() :]}"
        for name in names
        if first and (match := _EXPERT.search(name)) is not None
    }


class _Reader:
    """Turns parameters into regions and maps; what repeats from layer to layer is kept."""

    def __init__(self, spec: Model, ranks: Ranks) -> None:
        self.spec = spec
        self.ranks = ranks
        self._plans: dict[tuple[int, tuple[int, ...], bool], _Plan] = {}

    def read(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> _Read:
        """What the layout's builder takes of one parameter."""
        target = self.spec.family.copy_of(name)
        if target is not None and not self._has_sizes(name):
            return *self._whole(name, target, tensor, shape), strides
        rule, numbers = self.spec.family.find(name)
        for kind, size, what in _LIMITS:
            limit = self.spec.sizes.get(size)
            if kind in numbers and limit is not None and numbers[kind] >= limit:
                raise _core.LayoutError(
                    f"{name}: {what} {numbers[kind]}, but the configuration has {limit} {what}s"
                )
        if "mtp" in numbers:
            sizes = self.spec.sizes
            for size in {"layers", "block"} & {"layers", *rule.sizes}:
                if size not in sizes:
                    raise self.spec.family.lacks(name, size)
            numbers = mtp_numbers(numbers, sizes["layers"], sizes.get("block", 0))
        duplicated = getattr(tensor, "tensor_model_parallel", None) is False
        duplicated |= getattr(tensor, "parallel_mode", None) == "duplicated"
        key = (id(rule), shape, duplicated)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(rule, name, shape, duplicated)
        if rule.shaped_dimension < 0:
            _check_attributes(name, tensor, plan)
        if rule.stored is not None:
            if strides != contiguous_strides(shape):
                raise _core.LayoutError(
                    f"{name}: strides {strides} of shape {shape} are not contiguous"
                )
            strides = contiguous_strides(plan.placement.shape)
        together = self.spec.family.together
        maps = [piece.map(numbers, together) for piece in plan.pieces]
        return plan.placement.regions, maps, strides

    def _has_sizes(self, name: str) -> bool:
        """Whether there is a rule for a name, and everything that the rule needs."""
        found = self.spec.family.match(name)
        return found is not None and found[0].sizes <= self.spec.sizes.keys()

    def _whole(
        self, name: str, target: str, tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[Sequence[_core.Region], list[_core.Map]]:
        """Of a parameter that is a tensor of the checkpoint, on every tensor-parallel rank."""
        if self.ranks.tensor.ranks > 1 and getattr(tensor, "tensor_model_parallel", False):
            raise _core.LayoutError(
                f"{name}: tensor_model_parallel is True, but the family "
                f"{self.spec.family.name!r} takes it as whole on every rank"
            )
        start = (0,) * len(shape)
        axes = tuple(range(len(shape)))
        return [(start, shape, start)], [(target, "", shape, start, start, shape, axes, 0)]

    def _cut(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Cut:
        cut = self.ranks.expert_tensor if ".mlp.experts." in rule.name else self.ranks.tensor
        axis = rule.shaped_dimension
        if axis < 0 or len(shape) <= axis or not shape[axis]:
            return cut
        whole = self._expand(rule, name, shape, 1).shape[axis]
        parts, rest = divmod(whole, shape[axis])
        if rest or not parts or cut.ranks % parts:
            return cut
        return Cut(cut.rank * parts // cut.ranks, parts)

    def _plan(self, rule: Rule, name: str, shape: tuple[int, ...], duplicated: bool) -> _Plan:
        cut = self._cut(rule, name, shape)
        expansion = self._expand(rule, name, shape, cut.ranks)
        try:
            whole = expansion.place(_ALONE, self.ranks.expert)
            if duplicated and shape == _stored(rule, whole.shape):
                return _Plan(expansion, whole, cut, duplicated=True)
            share = expansion.place(cut, self.ranks.expert)
            if shape == _stored(rule, share.shape):
                return _Plan(expansion, share, cut, duplicated=False)
        except _core.LayoutError as error:
            raise _core.LayoutError(f"{name}: shape {expansion.shape}: {error}") from None
        kind = "expert-tensor" if ".mlp.experts." in rule.name else "tensor"
        raise _core.LayoutError(
            f"{name}: local shape {shape} != {_stored(rule, share.shape)}, the share of the whole "
            f"{_stored(rule, expansion.shape)} over {cut.ranks} {kind}-parallel ranks"
            f"{self._groups(rule)}"
        )

    def _groups(self, rule: Rule) -> str:
        """What the shape of a rule's parameters goes by that is not in them."""
        if "g" not in rule.parsed.names:
            return ""
        sizes, fields = self.spec.sizes, " or ".join(FIELDS["g"])
        return f", with {sizes['heads']} attention heads in {sizes['g']} query groups ({fields})"

    def _expand(self, rule: Rule, name: str, shape: tuple[int, ...], ranks: int) -> Expansion:
        """The rule with this model's sizes; an inferred axis takes what the known ones leave."""
        found = self.spec.family.expand(rule, name, self.spec.sizes)
        dimension = rule.inferred_dimension
        if dimension < 0 or len(shape) <= dimension:
            return found
        ranks = ranks if rule.inferred_cut else 1
        inferred = rule.inferred(self.spec.sizes, shape[dimension] * ranks)
        if inferred is None:
            raise _core.LayoutError(
                f"{name}: local shape {shape} over {ranks} tensor-parallel ranks has "
                f"{shape[dimension] * ranks} rows, which are fewer than the "
                f"{found.shape[dimension]} of the configuration, or not a multiple"
            )
        return rule.expand(self.spec.sizes, inferred)


class _LearntReader:
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
    ) -> _Read:
        """As _Reader does it."""
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


def _learn(
    converter: Callable[..., Any] | None,
    bridge: Any,
    config: Any,
    chunks: Sequence[Module],
    slots: Slots,
    spec: Model,
    ranks: Ranks,
) -> _LearntReader:
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
        return _LearntReader(convert, holders, slots, spec, ranks, index, rows_of_ranks)


class _Plan:
    """What all parameters of one rule and shape have in common on this rank."""

    def __init__(
        self, expansion: Expansion, placement: ShardPlacement, cut: Cut, duplicated: bool
    ) -> None:
        self.rule = expansion.rule
        self.placement = placement
        self.ranks = cut.ranks
        self.duplicated = duplicated
        self.pieces = [piece for piece in expansion.pieces if placement.meets(piece)]
        whole = _stored(self.rule, expansion.place(_ALONE, _ALONE).shape)
        extents = zip(_stored(self.rule, placement.shape), whole, strict=True)
        self.cut_dimensions = [axis for axis, (a, b) in enumerate(extents) if a != b]


def _stored(rule: Rule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that Megatron gives a parameter whose view has `shape`."""
    if rule.stored is None:
        return shape
    return tuple(math.prod(shape[axis] for axis in axes) for axes in rule.stored)


def _check_attributes(name: str, tensor: Tensor, plan: _Plan) -> None:
    """Compares what Megatron says of a parameter with what its shape says."""
    parallel = getattr(tensor, "tensor_model_parallel", None)
    dimension = getattr(tensor, "partition_dim", None)
    if plan.ranks == 1 or not plan.cut_dimensions or plan.duplicated:
        return
    if parallel is False and dimension == -1:
        return  # what Megatron gives to all that nobody has described
    # Grouped experts' biases have no mark where experts are cut.
    if parallel is False and not (".experts." in name and ".bias" in name):
        raise _core.LayoutError(
            f"{name}: its shape is cut over {plan.ranks} ranks, but tensor_model_parallel is False"
        )
    # Experts' second layer: under TransformerEngine it reports 0 on Megatron-Core 0.16.
    known = ".experts." in name and ".linear_fc2." in name
    if parallel and dimension not in (None, -1, *plan.cut_dimensions) and not known:
        raise _core.LayoutError(
            f"{name}: partition_dim is {dimension}, but its shape is cut along dimension "
            f"{plan.cut_dimensions[0]} over {plan.ranks} ranks"
        )
