"""Is what a trainer delivers what engines hold: the same names, shapes and quantisation as the
checkpoint that they were started from?

wsync's receiver refuses by itself what it has no place for, and what it would lack.  The loaders of
SGLang and vLLM pass over names that they do not know, keep what nobody delivers, and convert what
they are sent into the form that they hold.  They say nothing of all this.
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
from wsync.families.rules import key_of
from wsync.handles.answers import drafts_itself
from wsync.handles.base import EngineHandle, how_started
from wsync.layout import ADAPTERS, WRAPPERS
from wsync.machine.deadline import Deadline
from wsync.module_tensors.names import FUSED, is_note, listed, weight_of, without_scales
from wsync.options import Options
from wsync.quantise.config import Method, TensorFacts, facts_of, quantization_config
from wsync.trainer.fused_experts import single_shapes

_log = logging.getLogger(__name__)

_PLAIN: Final = "not quantised"
_OWN: Final = "codes and scales that the trainer holds"
_SOME: Final = "quantised"  # and nothing says how
_FLOATS: Final = ("float32", "bfloat16", "float16")
_NO_METHOD: Final = (None, "", "unquant")  # of SGLang's --quantization
# a loader of SGLang that takes weights as they are, and quantises them each time
_QUANTISING: Final = "flash_rl"

# parts of names that no engine knows: wrappers', adapters' and torch.nn.utils.parametrize's
_NOT_A_MODELS: Final = WRAPPERS | ADAPTERS | {"parametrizations"}
# what DistributedDataParallel, peft and TRL's value heads put before all names of a model
_PREFIXES: Final = ("module.", "base_model.model.", "pretrained_model.")
# what engines put themselves before all names of a base model's checkpoint
_BASES: Final = ("model.", "transformer.")
_HEAD: Final = "lm_head.weight"
# tensors of checkpoints that no trainer has, and no engine reads or needs: tables of positions and
# masks, and scales of activations
_MADE: Final = re.compile(
    r"rotary\w*\.(inv_freqs?|freqs|cos_cached|sin_cached)$|\.position_ids$"
    r"|\.(attn|attention)\.(masked_)?bias$"
    r"|\.(input|activation|output|[qkv])(_global)?_scale(_inv)?$"
)
_LAYER: Final = re.compile(r"(?:(?:model|language_model|backbone)\.)*layers\.(\d+)\.")
_DRAFTING: Final = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
_SHARED: Final = (".embed_tokens.weight", ".shared_head.head.weight")  # by drafting layers
_UNKNOWN: Final = Stored("", ())  # of a weight whose codes and scales are there
_RENAME: Final = (
    "wsync.fsdp.layout(model) gives parameters the names that checkpoints have, without those of "
    "torch's wrappers, and peft's merge_and_unload() gives a model without its own"
)
_KEEP: Final = (
    "state_dict() has buffers, too, which named_parameters() leaves out; Options(keep=[...]) names "
    "what is to stay as engines have it"
)
_OTHERWISE: Final = (
    "Options(checkpoint=DIR) names the folder to compare with, and checkpoint='' switches this off"
)


class EngineCheck:
    """What is delivered to engines, to be compared with what they hold.

    A server of SGLang says how it was started.  Its folder is looked up on this host, or in the
    host's cache of the Hugging Face hub.  Options.checkpoint, if given, goes before what is found.
    """

    def __init__(
        self,
        options: Options,
        config: Mapping[str, Any] | None,
        model: _core.Layout,
        *,
        base: object = None,
        receivers: Sequence[EngineHandle] = (),
    ) -> None:
        """
        Args:
            options: `checkpoint`, `keep` and `quantise` are read.
            config: by which weights are quantised; None where they are sent as ranks hold them.
            model: what all ranks hold.
            base: of DiskSync; a folder, from which engines were started if options name none.
            receivers: engines that run wsync's receiver, which compares all but names and shapes
                in its first update.

        Raises what Method.of does of config.
        """
        self._tensors = facts_of(model)
        own = config is None and any(map(_is_part, self._tensors))
        self._sent = _OWN if own else _PLAIN if config is None else _text(Method.of(config))
        self._options, self._receivers = options, receivers
        self._base = _found(base) if isinstance(base, str | os.PathLike) else None
        self._chosen = None if options.checkpoint is None else _found(options.checkpoint)
        self._folder = self._base if self._chosen is None else self._chosen
        self._fitting = set[tuple[str, bool, bool]]()  # folders that fit, as `_compare` asks

    def check_engines(self, engines: Sequence[EngineHandle], timeout: float) -> list[str]:
        """As `check_engine`, for all of them within a timeout.  The names of those of which nothing
        was compared though it was wanted; the log says so."""
        deadline = Deadline(timeout)
        unseen = [each.name for each in engines if not self.check_engine(each, deadline.left)]
        if unseen:
            check_names(self._tensors)
        if unseen and self._folder != "":
            _log.warning(
                "no checkpoint is here to compare with: engines pass over names that they do not "
                "know, keep what is not delivered, and convert into the form that they hold, all "
                "without a word: %s (Options(checkpoint=DIR) names the folder that they were "
                "started from)",
                ", ".join(unseen),
            )
        return [] if self._folder == "" else unseen

    def check_engine(self, engine: EngineHandle, timeout: float) -> bool:
        """Compares what one engine holds; whether nothing is left that could be passed over.

        Raises:
            InvalidArgumentError: it holds another form; the text has both.
            LayoutError: as `compare`.
            UnsupportedError: it passes over names of layers that adapters wrap.
            WsyncError: it does not answer.
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
        drafts = drafts_itself(started) and not receives
        return self._compare(folder, engine.name, drafts, whole=not receives) or receives

    def check_folders(self) -> None:
        """Compares what versions on a disk will have with Options.checkpoint and `base`.

        Raises LayoutError as `compare`, and without them as `check_names`."""
        check_elements(self._tensors)
        wanted = {} if self._folder == "" else dict.fromkeys((self._base, self._folder))
        if not any([self._compare(folder) for folder in wanted if folder]):
            check_names(self._tensors)

    def _check_form(self, name: str, started: Mapping[str, Any], folder: str) -> None:
        """Of the weights of an engine without wsync's receiver."""
        check_elements(self._tensors)
        coded = self._sent != _PLAIN
        renamed = coded or any(".experts." in each.name for each in self._tensors)
        if started.get("enable_lora") and renamed:
            raise _core.UnsupportedError(
                f"engine {name}: was started with LoRA (enable_lora), which gives weights of "
                "experts and scales of other layers new names: SGLang's own loaders pass over them "
                "without a word"
            )
        held, source = _held(started, folder)
        taken = coded and held != _PLAIN and (self._sent == _OWN or held == _SOME)
        if held not in ("", self._sent) and not taken:
            raise _core.InvalidArgumentError(
                f"engine {name}: its weights are {held}, by {source}, but what is delivered is "
                f"{self._sent}, which it would convert without a word (Options(quantise=) says how "
                "weights are delivered, as 'checkpoint' has them; Options(checkpoint=DIR) names "
                "the folder that the engine was started from, where another is under its path "
                "here)"
            )

    def _compare(
        self, folder: str, engine: str = "", drafts: bool = False, whole: bool = True
    ) -> bool:
        """As `compare`, of a folder, once for all engines that it fits."""
        known = folder, drafts, whole
        if folder and known not in self._fitting:
            title = f"{folder}, which engine {engine} was started from," if engine else folder
            keep = self._options.keep
            if compare(self._tensors, folder, title, keep=keep, drafts=drafts, whole=whole):
                self._fitting.add(known)
        return known in self._fitting


def _found(folder: str | os.PathLike[str]) -> str:
    """A folder; what is none may be a name on the hub, and stands for that of this host's cache."""
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
) -> bool:
    """Compares what is delivered with a checkpoint.

    Args:
        model: a layout, or the facts of its tensors.  Where these have no codes and the checkpoint
            has some, what those are codes of is compared.
        title: what the folder is, for an error.  keep: as Options.keep.
        drafts: whether an engine drafts tokens with layers of the checkpoint.
        whole: whether everything in it has to be delivered; else what other layers have delivered,
            and the log names the rest.

    Returns:
        Whether there was something to compare with: False, and the log says why, for a folder that
        cannot be read, has no safetensors files, or is quantised by a method that is not known
        where the trainer's tensors are not.

    Raises:
        LayoutError: by name, for tensors that the checkpoint does not have, has in other shapes, or
            that nobody delivers; for codes and scales of other dtypes.
    """
    given = {each.name: each for each in facts_of(model) if not is_note(each.name)}
    source = _Source.of(folder, given)
    if source is None:
        return False
    places = source.places
    unknown = [name for name in given if name not in places and not source.makes(name)]
    lacking = [
        name
        for name in places
        if name not in given and not source.stays(name, drafts=drafts)
        if not any(fnmatchcase(name, pattern) for pattern in keep)
    ]
    kinds = set() if whole else {key_of(name) for name in given}
    asked = [name for name in lacking if whole or unknown or key_of(name) in kinds]
    wrong = {
        "it has no": (unknown, _RENAME),
        "nobody delivers its": (asked, _KEEP),
        "other shapes": (list(_other_shapes(given.values(), places)), ""),
        "other dtypes": (list(_other_dtypes(given.values(), places)), ""),
    }
    if texts := [f"{text}: {listed(names)}" for text, (names, _) in wrong.items() if names]:
        help = [text for names, text in wrong.values() if names and text]
        raise _core.LayoutError(
            f"{title or folder} has other tensors than those delivered: "
            f"{'; '.join(texts)} ({'; '.join([*help, _OTHERWISE])})"
        )
    if lacking:
        _log.warning("only %s has %s", folder, listed(lacking))
    return True


class _Source(NamedTuple):
    """A checkpoint: its tensors, under the names that engines give them, and what its configuration
    says."""

    places: Mapping[str, Stored]
    config: Mapping[str, Any]

    @staticmethod
    def of(folder: str, given: Mapping[str, TensorFacts]) -> _Source | None:
        """None, and the log says why, where nothing can be compared.  given: what is delivered.
        Without codes among these, codes and scales stand for the weights that they are of, whose
        shapes are not known."""
        coded = any(map(_is_part, given.values()))
        config: Mapping[str, Any] = {}
        try:
            places = places_of(folder)
            with contextlib.suppress(_core.SystemCallError, _core.LayoutError):
                config = read_config(Path(folder, "config.json"))
                if not coded and (said := config_in(Path(folder))) is not None:
                    Method.of(said)
        except _core.WsyncError as error:
            _log.warning("the trainer's names are not compared with a checkpoint: %s", error)
            return None
        if not places:
            return None
        if not coded:
            weights = ((weight_of(name, place.dtype), name) for name, place in places.items())
            places = {w or name: _UNKNOWN if w else places[name] for w, name in weights}
        return _Source(_as_given(places, given), config)

    def _said(self, field: str) -> list[Any]:
        """What the configuration, and its part for text, say in a field."""
        parts = self.config, self.config.get("text_config")
        return [part[field] for part in parts if isinstance(part, Mapping) and field in part]

    def makes(self, name: str) -> bool:
        """Whether engines make a tensor themselves: tables, and a head that may be the embedding.
        Classes differ in what they mean by a configuration without a word, and in which part they
        go by."""
        said = self._said("tie_word_embeddings")
        tied = name.endswith(_HEAD) and (True in said or False not in said)
        return tied or bool(_MADE.search(name))

    def stays(self, name: str, *, drafts: bool) -> bool:
        """Whether nobody has to deliver a tensor of the checkpoint."""
        layer, layers = _LAYER.match(name), self._said("num_hidden_layers")
        if (layer and layers and int(layer[1]) >= layers[0]) or _DRAFTING.search(name):
            return not drafts or name.endswith(_SHARED)
        return self.makes(name) or is_note(name)


def _as_given(
    places: Mapping[str, Stored], given: Mapping[str, TensorFacts]
) -> Mapping[str, Stored]:
    """A checkpoint's tensors by the names that engines give a base model's, and with experts one by
    one where they are delivered so, as slime does Qwen3.5-MoE's."""
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
    """Tensors that a checkpoint has in other shapes, in words.  Scales of whole tensors are () in
    some and (1,) in others."""
    for name, _, given, _ in facts:
        place, shape = places.get(name, _UNKNOWN), tuple(given)
        if place is not _UNKNOWN and shape != place.shape and {shape, place.shape} != {(), (1,)}:
            yield f"{name} {shape} where it has {place.shape}"


def _other_dtypes(facts: Iterable[TensorFacts], places: Mapping[str, Stored]) -> Iterator[str]:
    """Codes and scales that a checkpoint has in another dtype, in words.  Engines read scales of
    any floating-point dtype into float32: Qwen3's FP8 checkpoints have bfloat16.  INT4's are of the
    weights' dtype."""
    for name, dtype, *_ in facts:
        here = places.get(name, _UNKNOWN).dtype
        if here in ("", dtype):
            continue
        scale = name.endswith(("_scale", "_scale_inv")) and dtype == "float32"
        packed = f"{name.removesuffix('_scale')}_packed" in places
        readable = scale and here in _FLOATS and not packed
        if (weight_of(name, dtype) or weight_of(name, here)) and not readable:
            yield f"{name} ({here}, here {dtype})"
        elif here in _FLOATS and "float" not in dtype:
            yield f"{name} ({here}, here {dtype}, which has no scales)"


def check_names(facts: Sequence[TensorFacts]) -> None:
    """Without a checkpoint to compare with: raises LayoutError, by name, for tensors under the
    names of a wrapped model, and as `check_elements` does."""
    if names := [
        each.name
        for each in facts
        if each.name.startswith(_PREFIXES) or not _NOT_A_MODELS.isdisjoint(each.name.split("."))
    ]:
        raise _core.LayoutError(
            f"{listed(names)}: names that a wrapper of the model or an adapter has made: {_RENAME} "
            "(if they are the model's, Options(checkpoint=DIR) names a folder that has them)"
        )
    check_elements(facts)


def check_elements(facts: Iterable[TensorFacts]) -> None:
    """Raises LayoutError, by name, for parameters as DeepSpeed's ZeRO-3 leaves them between passes:
    they end a server of SGLang."""
    if names := [
        each.name for each in facts if tuple(each.shape) == (0,) and "float" in each.dtype
    ]:
        raise _core.LayoutError(
            f"{listed(names)}: no elements: within deepspeed.zero.GatheredParameters ZeRO-3's "
            "parameters have elements"
        )


def check_room(tensors: Iterable[TensorFacts], folder: str) -> None:
    """Raises LayoutError for tensors that are larger than those of the checkpoint that an engine
    was started from: its loaders may take the part of them that there is room for."""
    places: Mapping[str, Stored] = {}
    with contextlib.suppress(_core.WsyncError):
        places = places_of(folder) or {}
    for each in tensors:
        room = places.get(each.name, _UNKNOWN).shape
        if any(map(operator.gt, each.shape, room)):
            raise _core.LayoutError(
                f"{each.name} {tuple(each.shape)} where it has {room}: {folder}, which the engine "
                "was started from, has less, and its own loading may cut off the rest"
            )


def check_scales(model: _core.Layout) -> None:
    """Raises LayoutError, by name, if ranks hold codes and none holds their scales: an engine that
    is sent only codes reads them with other scales, or with none."""
    missing = without_scales((each.name, each.dtype) for each in facts_of(model))
    if missing:
        raise _core.LayoutError(f"{listed(missing)}: codes that the trainer delivers no scales for")


def has_codes(model: _core.Layout) -> bool:
    """Whether a trainer holds codes or scales."""
    return any(map(_is_part, facts_of(model)))


def _is_part(each: TensorFacts) -> bool:
    return weight_of(each.name, each.dtype) != "" and not is_note(each.name)


# --- what folders and engines say -------------------------------------------------------------


def places_of(folder: str | os.PathLike[str]) -> Mapping[str, Stored] | None:
    """The tensors of a checkpoint; None for a folder without safetensors files.

    Raises SystemCallError or LayoutError for one that cannot be read.
    """
    here = any(os.path.exists(os.path.join(folder, name)) for name in (INDEX, SINGLE))
    return Checkpoint(folder).places if here else None


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of quantised weights; None where it says nothing.

    Raises SystemCallError, LayoutError: it has no configuration that can be read.
    """
    found = quantization_config(read_config(folder / "config.json"))
    beside = folder / "hf_quant_config.json"  # of modelopt
    return read_config(beside) if found is None and beside.exists() else found


def _text(method: Method) -> str:
    if method.kind.startswith("fp8") and method.block_rows:  # powers of two are scales, too
        return f"fp8_block of {method.block_rows} x {method.block_cols}"
    return method.text


def _held(started: Mapping[str, Any], folder: str) -> tuple[str, str]:
    """In which form an engine holds weights that was started from a folder, and what says so; forms
    that engines take for each other have one text.  "" where it cannot be told."""
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
        return f"quantised in a way that is not known ({error})"
