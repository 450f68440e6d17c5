"""Compares names, shapes and quantisation of what a trainer delivers with the checkpoint that the
engines were started from.

wsync's receiver itself refuses unknown and missing tensors.  The loaders of SGLang and vLLM ignore
names that they do not know, keep tensors that nobody delivers, and convert weights to the form that
they hold, all without a message.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from wsync import _core
from wsync.checkpoints.hub_cache import folder_of
from wsync.checkpoints.safetensors_layout import INDEX, SINGLE, Checkpoint, Stored, read_config
from wsync.handles.answers import drafts_of
from wsync.handles.base import EngineHandle, how_started
from wsync.layout import ADAPTERS, WRAPPERS, TrainerLayout
from wsync.machine.deadline import Deadline
from wsync.module_tensors.names import FUSED, is_note, key_of, listed, weight_of, without_scales
from wsync.options import Options
from wsync.quantise.config import Method, TensorFacts, facts_of, quantization_config
from wsync.trainer.fused_experts import single_shapes

_log = logging.getLogger(__name__)

_PLAIN: Final = "not quantised"
_OWN: Final = "codes and scales that the trainer holds"
_SOME: Final = "quantised"  # by an unknown method
_FLOATS: Final = ("float32", "bfloat16", "float16")
_NO_METHOD: Final = (None, "", "unquant")  # values of SGLang's --quantization
# a load_format of SGLang whose loader takes plain weights and quantises them in each update
_QUANTISING: Final = "flash_rl"

# parts of names that no engine knows: wrappers', adapters' and torch.nn.utils.parametrize's
_NOT_A_MODELS: Final = WRAPPERS | ADAPTERS | {"parametrizations"}
# prefixes that DistributedDataParallel, peft and TRL's value heads add to all names of a model
_PREFIXES: Final = ("module.", "base_model.model.", "pretrained_model.")
# prefixes that engines add to all names of a base model's checkpoint
_BASES: Final = ("model.", "transformer.")
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "embed_tokens.weight"
# tensors of checkpoints that trainers lack and engines do not need: tables of positions, masks, and
# scales of activations
_MADE: Final = re.compile(
    r"rotary\w*\.(inv_freqs?|freqs|cos_cached|sin_cached)$|\.position_ids$"
    r"|\.(attn|attention)\.(masked_)?bias$"
    r"|\.(input|activation|output|[qkv])(_global)?_scale(_inv)?$"
)
_LAYER: Final = re.compile(r"(?:(?:model|language_model|backbone)\.)*layers\.(\d+)\.")
_DRAFTING: Final = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
_SHARED: Final = (".embed_tokens.weight", ".shared_head.head.weight")  # with drafting layers
_UNKNOWN: Final = Stored("", ())  # for a weight that is stored as codes and scales
_RENAME: Final = (
    "wsync.fsdp.layout(model) gives parameters the names that checkpoints have, without those of "
    "torch's wrappers; peft's merge_and_unload() removes peft's names"
)
_KEEP: Final = (
    "state_dict() has buffers, too, which named_parameters() leaves out; Options(keep=[...]) names "
    "tensors that are to stay as engines have them"
)
_OTHERWISE: Final = (
    "Options(checkpoint=DIR) names the folder to compare with; checkpoint='' switches this check "
    "off"
)


class EngineCheck:
    """Compares what a trainer delivers with what engines hold.

    An SGLang server reports the folder that it was started from.  wsync looks for this folder on
    this host, and in the host's cache of the Hugging Face hub.  Options.checkpoint, if given, is
    used instead.
    """

    def __init__(
        self,
        options: Options,
        config: Mapping[str, Any] | None,
        model: _core.Layout,
        *,
        base: object = None,
        receivers: Sequence[EngineHandle] = (),
        untied: bool = False,
    ) -> None:
        """
        Args:
            options: `checkpoint`, `keep` and `quantise` are read.
            config: the quantization_config of the delivered weights; None if they are sent as ranks
                hold them.
            model: what all ranks hold.
            base: the `base` of a DiskSync.  If it is a folder and options name none, it stands for
                the folder that engines were started from.
            receivers: engines that run wsync's receiver.  In its first update, the receiver itself
                checks everything except names and shapes.
            untied: as `is_untied`.

        Raises the errors of Method.of(config), and InvalidArgumentError if Options.checkpoint is
        not a folder of this host.
        """
        self._tensors = facts_of(model)
        own = config is None and any(map(_is_part, self._tensors))
        self._sent = _OWN if own else _PLAIN if config is None else _text(Method.of(config))
        self._options, self._receivers = options, receivers
        self._base = _found(base) if isinstance(base, str | os.PathLike) else None
        self._chosen = None if options.checkpoint is None else _found(options.checkpoint)
        if self._chosen and not os.path.isdir(self._chosen):
            raise _core.InvalidArgumentError(
                f"checkpoint={options.checkpoint!r}: expected a folder of this host, or the name "
                "of a model in this host's cache of the Hugging Face hub"
            )
        self._folder = self._base if self._chosen is None else self._chosen
        self._untied = untied
        self._fitting = set[tuple[str, bool, bool]]()  # that passed in `_compare`

    def check_engines(self, engines: Sequence[EngineHandle], timeout: float) -> list[str]:
        """Calls `check_engine` for all engines, within one timeout.  Returns and logs the names of
        the engines that could not be compared, unless options switch the comparison off."""
        deadline = Deadline(timeout)
        unseen = [each.name for each in engines if not self.check_engine(each, deadline.left)]
        if unseen:
            check_names(self._tensors)
        if unseen and self._folder != "":
            _log.warning(
                "names, shapes and dtypes are not compared for engines %s, because this host has "
                "no checkpoint of theirs that wsync can read: without a message, these engines "
                "ignore names that they do not know, keep tensors that are not delivered, and "
                "convert weights to the form that they hold (Options(checkpoint=DIR) names the "
                "folder that they were started from)",
                ", ".join(unseen),
            )
        return [] if self._folder == "" else unseen

    def check_engine(self, engine: EngineHandle, timeout: float) -> bool:
        """Compares what is delivered with what one engine holds.  Returns False if the engine may
        still ignore tensors without a message.

        Raises:
            InvalidArgumentError: the engine holds weights in another form; the text names both.
            LayoutError: as `compare`.
            UnsupportedError: the engine ignores the names of layers that adapters wrap.
            WsyncError: the engine does not answer.
        """
        receives = any(engine is each for each in self._receivers)
        if receives and self._options.quantise is not None:
            return True
        started = how_started(engine, timeout)
        path = started.get("model_path")
        seen = folder_of(path, started.get("revision")) if isinstance(path, str) else ""
        if not receives:
            self._check_form(engine.name, started, self._chosen or seen or self._base or "")
        folder = seen if self._folder is None else self._folder
        drafts = drafts_of(started) > 0
        return self._compare(folder, engine.name, drafts, whole=not receives) or receives

    def check_folders(self) -> None:
        """Compares what versions on a disk will contain with Options.checkpoint and `base`.

        Raises LayoutError as `compare` does, or, without a folder to compare with, as `check_names`
        does."""
        check_elements(self._tensors)
        wanted = {} if self._folder == "" else dict.fromkeys((self._base, self._folder))
        if not any([self._compare(folder) for folder in wanted if folder]):
            check_names(self._tensors)

    def _check_form(self, name: str, started: Mapping[str, Any], folder: str) -> None:
        """Checks the form of the weights of an engine without wsync's receiver."""
        check_elements(self._tensors)
        coded = self._sent != _PLAIN
        renamed = coded or any(".experts." in each.name for each in self._tensors)
        if started.get("enable_lora") and renamed:
            raise _core.UnsupportedError(
                f"engine {name}: was started with LoRA (enable_lora), which renames weights of "
                "experts and scales of other layers: SGLang's own loaders would ignore these "
                "tensors without a message"
            )
        held, source = _held(started, folder)
        taken = coded and held != _PLAIN and (self._sent == _OWN or held == _SOME)
        if held not in ("", self._sent) and not taken:
            raise _core.InvalidArgumentError(
                f"engine {name}: its weights are {held}, by {source}, but what is delivered is "
                f"{self._sent}: the engine would convert that without a message "
                "(Options(quantise='checkpoint') delivers weights as the checkpoint has them; "
                "Options(checkpoint=DIR) names the folder that the engine was started from, if "
                "another folder has its path here)"
            )

    def _compare(
        self, folder: str, engine: str = "", drafts: bool = False, whole: bool = True
    ) -> bool:
        """Calls `compare` for a folder, unless the folder has passed before."""
        known = folder, drafts, whole
        if folder and known not in self._fitting:
            title = f"{folder}, which engine {engine} was started from," if engine else folder
            how: Any = {"keep": self._options.keep, "drafts": drafts, "untied": self._untied}
            if compare(self._tensors, folder, title, whole=whole, **how):
                self._fitting.add(known)
        return known in self._fitting


def _found(folder: str | os.PathLike[str]) -> str:
    """The path of a folder.  A name on the hub stands for its folder in this host's cache."""
    path = os.fspath(folder)
    return folder_of(path) or path


def compare(
    model: _core.Layout | Iterable[TensorFacts],
    folder: str,
    title: str = "",
    *,
    keep: Sequence[str] = (),
    drafts: bool = False,
    whole: bool = False,
    untied: bool = False,
) -> bool:
    """Compares what is delivered with a checkpoint.

    Args:
        model: a layout, or the facts of its tensors.  If only the checkpoint has codes, the weights
            that they stand for are compared.
        title: a description of the folder, for errors.  keep: as Options.keep.
        drafts: whether an engine drafts tokens with layers of the checkpoint.
        whole: whether every tensor of the checkpoint must be delivered.  Otherwise a tensor may be
            missing unless other layers deliver theirs, and the log names the missing ones.
        untied: as `is_untied`; then a checkpoint without a head is refused.

    Returns:
        Whether there was something to compare with.  This is False if the folder cannot be read,
        has no safetensors files, or is quantised by an unknown method although the trainer's
        tensors are not quantised.  Unless the folder simply has no safetensors files, the log says
        why.

    Raises:
        LayoutError: the checkpoint lacks delivered tensors, or has other shapes, or other dtypes of
            codes and scales; or some of its tensors are not delivered.  The text names them.
    """
    given = {each.name: each for each in facts_of(model) if not is_note(each.name)}
    source = _Source.of(folder, given)
    if source is None:
        return False
    places = source.places
    unknown = list(source.lacking(given, untied))
    lacking = [
        name
        for name in places
        if name not in given and not source.stays(name, drafts=drafts)
        if not any(fnmatchcase(name, pattern) for pattern in keep)
    ]
    kinds = set() if whole else {key_of(name) for name in given}
    asked = [name for name in lacking if whole or unknown or key_of(name) in kinds]
    wrong = {
        "not there": (unknown, _RENAME),
        "not delivered": (asked, _KEEP),
        "other shapes": (list(_other_shapes(given.values(), places)), ""),
        "other dtypes": (list(_other_dtypes(given.values(), places)), ""),
    }
    if texts := [f"{text}: {listed(names)}" for text, (names, _) in wrong.items() if names]:
        help = [text for names, text in wrong.values() if names and text]
        raise _core.LayoutError(
            f"{title or folder} does not match the trainer's tensors: "
            f"{'; '.join(texts)} ({'; '.join([*help, _OTHERWISE])})"
        )
    if lacking:
        _log.warning("%s has %s, but the trainer does not", folder, listed(lacking))
    return True


def is_untied(source: TrainerLayout) -> bool:
    """Whether this rank holds a head and embeddings, and the head has memory of its own."""
    layout = source.layout
    heads, embeddings = (
        [layout.shards(index) for index, name in enumerate(layout.names()) if name.endswith(end)]
        for end in (_HEAD, _EMBEDDING)
    )
    if not (any(heads) and any(embeddings)):
        return False  # does not read the tensors: a mapping may make them when it is read
    tensors = source.tensors()

    def places(held: Iterable[Sequence[_core.Shard]]) -> list[set[int]]:
        return [{tensors[s.buffer].data_ptr() + s.offset for s in each} for each in held]

    others = set[int]().union(*places(embeddings))
    return any(head and head.isdisjoint(others) for head in places(heads))


class _Source(NamedTuple):
    """A checkpoint: its tensors, under the names that engines give them, and its configuration."""

    places: Mapping[str, Stored]
    config: Mapping[str, Any]

    @staticmethod
    def of(folder: str, given: Mapping[str, TensorFacts]) -> _Source | None:
        """Reads a checkpoint; returns None if nothing can be compared.  given: the delivered
        tensors.  If there are no codes among the delivered tensors, a weight of unknown shape
        replaces its codes and scales in the checkpoint."""
        coded = any(map(_is_part, given.values()))
        config: Mapping[str, Any] = {}
        try:
            places = places_of(folder)
            with contextlib.suppress(_core.SystemCallError, _core.LayoutError):
                config = read_config(Path(folder, "config.json"))
                if not coded and (said := config_in(Path(folder))) is not None:
                    Method.of(said)
        except _core.WsyncError as error:
            _log.warning("names, shapes and dtypes are not compared with a checkpoint: %s", error)
            return None
        if not places:
            return None
        if not coded:
            weights = ((weight_of(name, place.dtype), name) for name, place in places.items())
            places = {w or name: _UNKNOWN if w else places[name] for w, name in weights}
        return _Source(_as_given(places, given), config)

    def _said(self, field: str) -> list[Any]:
        """The values of a field in the configuration and in its text_config."""
        parts = self.config, self.config.get("text_config")
        return [part[field] for part in parts if isinstance(part, Mapping) and field in part]

    def makes(self, name: str) -> bool:
        """Whether engines make a tensor themselves: a table, or a head that may be the embedding.
        Model classes differ in the default of tie_word_embeddings, and in the part of the
        configuration that they read it from."""
        said = self._said("tie_word_embeddings")
        tied = name.endswith(_HEAD) and (True in said or False not in said)
        return tied or bool(_MADE.search(name))

    def lacking(self, given: Iterable[str], untied: bool) -> Iterator[str]:
        """The given names that it lacks and that engines do not make themselves."""
        for name in given:
            if name not in self.places and untied and name.endswith(_HEAD):
                yield f"{name} (tied to the embedding there, but not in the trainer)"
            elif name not in self.places and not self.makes(name):
                yield name

    def stays(self, name: str, *, drafts: bool) -> bool:
        """Whether the trainer may leave out a tensor of the checkpoint."""
        layer, layers = _LAYER.match(name), self._said("num_hidden_layers")
        if (layer and layers and int(layer[1]) >= layers[0]) or _DRAFTING.search(name):
            return not drafts or name.endswith(_SHARED)
        return self.makes(name) or is_note(name)


def _as_given(
    places: Mapping[str, Stored], given: Mapping[str, TensorFacts]
) -> Mapping[str, Stored]:
    """A checkpoint's tensors under the delivered names.  Names of a base model get the prefix that
    engines add.  Fused experts become single experts if they are delivered one by one."""
    found = dict[str, Stored]()
    bases = [base for base in _BASES if not any(name.startswith(base) for name in places)]
    for name, place in places.items():
        name = next((base + name for base in bases if base + name in given), name)
        single = {}
        if name.endswith(FUSED) and name not in given and len(place.shape) == 3:
            single = single_shapes(name, place.shape)
        if any(one in given for one in single):
            found |= {one: Stored(place.dtype, shape) for one, shape in single.items()}
        else:
            found[name] = place
    return found


def _other_shapes(facts: Iterable[TensorFacts], places: Mapping[str, Stored]) -> Iterator[str]:
    """Describes tensors that a checkpoint has in other shapes.  The scale of a whole tensor may
    have the shape () or (1,)."""
    for name, _, given, _ in facts:
        place, shape = places.get(name, _UNKNOWN), tuple(given)
        if place is not _UNKNOWN and shape != place.shape and {shape, place.shape} != {(), (1,)}:
            yield f"{name} ({place.shape} there, {shape} delivered)"


def _other_dtypes(facts: Iterable[TensorFacts], places: Mapping[str, Stored]) -> Iterator[str]:
    """Describes codes and scales that a checkpoint has in another dtype.  Engines read scales of
    any floating-point dtype into float32 (Qwen3's FP8 checkpoints have bfloat16), but INT4's scales
    must have the weights' dtype."""
    for name, dtype, *_ in facts:
        here = places.get(name, _UNKNOWN).dtype
        if here in ("", dtype):
            continue
        scale = name.endswith(("_scale", "_scale_inv")) and dtype == "float32"
        packed = f"{name.removesuffix('_scale')}_packed" in places
        readable = scale and here in _FLOATS and not packed
        if (weight_of(name, dtype) or weight_of(name, here)) and not readable:
            yield f"{name} ({here} there, {dtype} delivered)"
        elif here in _FLOATS and "float" not in dtype:
            yield f"{name} ({here} there, {dtype} delivered, without scales)"


def check_names(facts: Sequence[TensorFacts]) -> None:
    """Raises LayoutError if tensors have the names of a wrapped model, and as `check_elements`
    does.  This is used if there is no checkpoint to compare with."""
    if names := [
        each.name
        for each in facts
        if each.name.startswith(_PREFIXES) or not _NOT_A_MODELS.isdisjoint(each.name.split("."))
    ]:
        raise _core.LayoutError(
            f"{listed(names)}: a wrapper of the model or an adapter has made these names: "
            f"{_RENAME} (if the model itself has these names, give a folder that has them, too: "
            "Options(checkpoint=DIR))"
        )
    check_elements(facts)


def check_elements(facts: Iterable[TensorFacts]) -> None:
    """Raises LayoutError if parameters have no elements, as DeepSpeed's ZeRO-3 leaves them between
    passes.  Such tensors would end an SGLang server."""
    if names := [
        each.name for each in facts if tuple(each.shape) == (0,) and "float" in each.dtype
    ]:
        raise _core.LayoutError(
            f"{listed(names)}: there are no elements here; with ZeRO-3, make this call within "
            "deepspeed.zero.GatheredParameters"
        )


def check_room(tensors: Iterable[TensorFacts], folder: str) -> None:
    """Raises LayoutError if tensors are larger than in the checkpoint that an engine was started
    from, because the engine's loaders may cut off the rest."""
    places: Mapping[str, Stored] = {}
    with contextlib.suppress(_core.WsyncError):
        places = places_of(folder) or {}
    for each in tensors:
        room = places.get(each.name, _UNKNOWN).shape
        if any(map(operator.gt, each.shape, room)):
            raise _core.LayoutError(
                f"{each.name} {tuple(each.shape)} is larger than {room} in {folder}, which the "
                "engine was started from: the engine's own loading may cut off the rest"
            )


def check_scales(model: _core.Layout) -> None:
    """Raises LayoutError if ranks hold codes and no rank holds their scales, because an engine
    would read these codes with other scales, or with none."""
    missing = without_scales((each.name, each.dtype) for each in facts_of(model))
    if missing:
        raise _core.LayoutError(f"{listed(missing)}: the trainer delivers codes, but no scales")


def has_codes(model: _core.Layout) -> bool:
    """Whether a trainer holds codes or scales."""
    return any(map(_is_part, facts_of(model)))


def _is_part(each: TensorFacts) -> bool:
    return weight_of(each.name, each.dtype) != "" and not is_note(each.name)


# --- what folders and engines say -------------------------------------------------------------


def places_of(folder: str | os.PathLike[str]) -> Mapping[str, Stored] | None:
    """The tensors of a checkpoint.  This is None if the folder has no safetensors files.

    Raises SystemCallError or LayoutError if the checkpoint cannot be read.
    """
    here = any(os.path.exists(os.path.join(folder, name)) for name in (INDEX, SINGLE))
    return Checkpoint(folder).places if here else None


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """A checkpoint's quantization_config; None if it has none.

    Raises SystemCallError or LayoutError if the checkpoint's configuration cannot be read.
    """
    found = quantization_config(read_config(folder / "config.json"))
    beside = folder / "hf_quant_config.json"  # of modelopt
    return read_config(beside) if found is None and beside.exists() else found


def _text(method: Method) -> str:
    if method.kind.startswith("fp8") and method.block_rows:  # also with powers of two as scales
        return f"fp8_block of {method.block_rows} x {method.block_cols}"
    return method.text


def _held(started: Mapping[str, Any], folder: str) -> tuple[str, str]:
    """The form in which an engine holds its weights, and where the form is written.  Forms that
    engines accept for each other have the same text; "" means that the form is unknown."""
    method, load_format = started.get("quantization"), started.get("load_format")
    if load_format == _QUANTISING:
        return _PLAIN, f"{load_format=}"
    form = source = ""
    with contextlib.suppress(_core.SystemCallError, _core.LayoutError):
        if folder:
            form, source = _form(config_in(Path(folder))), f"the configuration in {folder}"
    with contextlib.suppress(TypeError, ValueError):
        overriding = json.loads(started.get("json_model_override_args"))  # type: ignore[arg-type]
        if (said := quantization_config(overriding)) is not None:
            form, source = _form(said), "its json_model_override_args"
    if method not in _NO_METHOD and form in ("", _PLAIN):
        return f"{_SOME}, when it loads them" if form else _SOME, f"quantization={method!r}"
    return form, source


def _form(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return _PLAIN
    try:
        return _text(Method.of(config))
    except _core.UnsupportedError as error:
        return f"quantised in an unknown way ({error})"
