"""Is what a trainer delivers what engines hold: the same names, shapes and quantisation as the
checkpoint that they were started from?

wsync's receiver refuses by itself what it has no place for, and what it would lack.  The loaders of
SGLang and vLLM pass over names that they do not know, keep what nobody delivers, and convert what
they are sent into the form that they hold.  They say nothing of all this.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from wsync import _core
from wsync.checkpoints.hub_cache import folder_of
from wsync.checkpoints.safetensors_layout import (
    INDEX,
    SINGLE,
    Checkpoint,
    Stored,
    read_config,
    system_calls,
)
from wsync.families.rules import key_of
from wsync.handles.answers import drafts_itself
from wsync.handles.base import EngineHandle, how_started
from wsync.layout import ADAPTERS, WRAPPERS
from wsync.machine.deadline import Deadline
from wsync.module_tensors.names import FUSED, is_note, listed, weight_of, without_scales
from wsync.options import Options
from wsync.quantise.config import Method, TensorFacts, facts_of, quantization_config
from wsync.trainer.fused_experts import fused_of

_log = logging.getLogger(__name__)

_PLAIN: Final = "not quantised"
_OWN: Final = "codes and scales that the trainer holds"
_FLOATS: Final = ("float32", "bfloat16", "float16")
_NO_METHOD: Final = (None, "", "unquant")  # of SGLang's --quantization
# a loader of SGLang that takes weights as they are, and quantises them each time
_QUANTISING: Final = "flash_rl"
# targets of LoRA with which SGLang wraps experts, too, besides down_proj
_GATED: Final = {"gate_up_proj", "gate_proj", "up_proj"}
_ALL: Final = {"all", "all-linear"}

# parts of names that no engine knows: wrappers', adapters' and torch.nn.utils.parametrize's
_NOT_A_MODELS: Final = WRAPPERS | ADAPTERS | {"parametrizations"}
# what DistributedDataParallel, peft and TRL's value heads put before all names of a model
_PREFIXES: Final = ("module.", "base_model.model.", "pretrained_model.")
_DEPTH: Final = 3  # components of another prefix, at most
_SHOWN: Final = 3  # patterns for Options.keep, at most
# what engines put themselves before all names of a base model's checkpoint
_BASES: Final = ("model.", "transformer.")
_HEAD: Final = "lm_head.weight"
_BUFFER: Final = "e_score_correction_bias"
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
_UNWRAP: Final = (
    "wsync.fsdp.layout(model) takes the names of torch's wrappers off, and peft's "
    "merge_and_unload() gives a model without its own"
)
_GATHER: Final = "within deepspeed.zero.GatheredParameters ZeRO-3's parameters have elements"
# names that transformers gives parameters while it runs
_AT_RUN_TIME: Final = ("model.language_model.", "model.visual.", "model.multi_modal_projector.")
_RENAME: Final = (
    "wsync.fsdp.layout(model) gives parameters of transformers the names that checkpoints have"
)
_OTHERWISE: Final = (
    "Options(checkpoint=DIR) names the folder to compare with, and checkpoint='' switches this off"
)


class _Form(NamedTuple):
    """text: how weights are quantised, equal for forms that engines take for each other. source:
    what says so. vague: they are quantised, and nothing says how."""

    text: str
    source: str
    vague: bool = False

    def takes(self, sent: str) -> bool:
        """Whether an engine that holds such weights is sent the same form, as far as can be
        told."""
        coded = _PLAIN not in (self.text, sent)
        return self.text == sent or (coded and (sent == _OWN or self.vague))


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
        self._folder = self._base if options.checkpoint is None else _found(options.checkpoint)
        self._form = _form_of(self._folder) if self._folder else None
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
        deadline = Deadline(timeout)
        receives = any(engine is each for each in self._receivers)
        if receives and self._options.quantise is not None:
            return True
        started = how_started(engine, deadline.left)
        seen = _folder_of(engine, started, deadline)
        if not receives:
            self._check_form(engine, started, seen)
        folder = seen if self._folder is None else self._folder
        drafts = drafts_itself(started) and not receives
        return self._compare(folder, engine.name, drafts, whole=not receives) or receives

    def check_folders(self) -> None:
        """Compares what versions on a disk will have with Options.checkpoint and `base`.

        Raises LayoutError as `compare`, and without them as `check_names`."""
        wanted = {} if self._folder == "" else dict.fromkeys((self._base, self._folder))
        if not any([self._compare(folder) for folder in wanted if folder]):
            check_names(self._tensors)

    def _check_form(self, engine: EngineHandle, started: Mapping[str, Any], folder: str) -> None:
        """Of the weights of an engine without wsync's receiver, which was started from a folder."""
        if passed_over := _behind_adapters(self._tensors, started, self._sent != _PLAIN):
            raise _core.UnsupportedError(
                f"engine {engine.name}: was started with LoRA, which gives weights of experts and "
                "scales of other layers new names: SGLang's own loaders pass over those of "
                f"{passed_over} without a word (say its --lora-target-modules: experts are "
                "targets where both gate_up_proj and down_proj are)"
            )
        known = [form for form in (_held(started, folder), self._form) if form is not None]
        if known and not any(form.takes(self._sent) for form in known):
            raise _core.InvalidArgumentError(
                f"engine {engine.name}: its weights are {known[0].text}, by {known[0].source}, but "
                f"what is delivered is {self._sent}, which it would convert without a word "
                "(Options(quantise=) says how weights are delivered, as 'checkpoint' has them; "
                "Options(checkpoint=DIR) names the folder that the engine was started from, where "
                "another is under its path here)"
            )

    def _compare(
        self, folder: str, engine: str = "", drafts: bool = False, whole: bool = True
    ) -> bool:
        """As `compare`, of a folder, once for all engines that it fits."""
        known = folder, drafts, whole
        if folder and known not in self._fitting:
            title = f"the checkpoint {folder}"
            if folder == self._base:
                title = f"{folder}, whose configuration every version gets,"
            elif self._folder is None:
                title = f"{folder}, which engine {engine} was started from,"
            keep = self._options.keep
            if compare(self._tensors, folder, title, keep=keep, drafts=drafts, whole=whole):
                self._fitting.add(known)
        return known in self._fitting


def _found(folder: str | os.PathLike[str]) -> str:
    """A folder; what is none may be a name on the hub, and stands for that of this host's cache."""
    path = os.fspath(folder)
    return path if not path or os.path.isdir(path) else folder_of(path) or path


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
            that nobody delivers; for codes and scales of other dtypes, or without each other.
    """
    facts = [each for each in facts_of(model) if not is_note(each.name)]
    source = _Source.of(folder, coded=any(map(_is_part, facts)))
    if source is None:
        return False
    places = source.places
    claimed = dict[str, list[TensorFacts]]()
    for each in facts:
        claimed.setdefault(source.home(each.name), []).append(each)
    unknown = [each.name for each in claimed.pop("", ())]
    lacking = [
        name
        for name in places
        if name not in claimed and not source.stays(name, drafts=drafts)
        if not any(fnmatchcase(name, pattern) for pattern in keep)
    ]
    asked = lacking if whole or unknown else _in_part(facts, claimed, lacking, places)
    wrong = {
        "it has no": unknown,
        "nobody delivers its": asked,
        "other shapes": list(_other_shapes(claimed, places)),
        "other dtypes": list(_other_dtypes(facts, places)),
    }
    if texts := [f"{text}: {listed(names)}" for text, names in wrong.items() if names]:
        stays = [] if unknown else asked
        help = [*_reasons(facts, unknown, places), *_to_keep(facts, stays), _OTHERWISE]
        raise _core.LayoutError(
            f"{title or f'the checkpoint {folder}'} has other tensors than those delivered: "
            f"{'; '.join(texts)} ({'; '.join(help)})"
        )
    if lacking:
        _log.warning("only %s has %s", folder, listed(lacking))
    return True


def _in_part(
    facts: Iterable[TensorFacts],
    claimed: Collection[str],
    lacking: Sequence[str],
    places: Mapping[str, Stored],
) -> list[str]:
    """What lacks beside codes or scales that are delivered, or that other layers have."""
    given = {weight_of(each.name, each.dtype) for each in facts} - {""}
    kinds = {key_of(name) for name in claimed}
    return [
        name
        for name in lacking
        if key_of(name) in kinds or weight_of(name, places[name].dtype) in given
    ]


class _Source(NamedTuple):
    """A checkpoint: its tensors, and what its configuration says."""

    places: Mapping[str, Stored]
    config: Mapping[str, Any]
    bases: Collection[str] = ()  # of _BASES: those that begin one of its names

    @staticmethod
    def of(folder: str, *, coded: bool) -> _Source | None:
        """None, and the log says why, where nothing can be compared.  coded: with codes and scales
        as they are; else with the weights that these are of, whose shapes are not known."""
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
            weights = (
                (weight_of(name, place.dtype), name, place) for name, place in places.items()
            )
            places = {w or name: _UNKNOWN if w else place for w, name, place in weights}
        bases = [base for base in _BASES if any(name.startswith(base) for name in places)]
        return _Source(places, config, bases)

    def _said(self, field: str) -> list[Any]:
        """What the configuration, and its part for text, say in a field."""
        parts = self.config, self.config.get("text_config")
        return [part[field] for part in parts if isinstance(part, Mapping) and field in part]

    def _is_tied_head(self, name: str) -> bool:
        """Whether a tensor is a head that may be the embedding.  Classes differ in what they mean
        by a configuration without a word, and in which part they go by."""
        said = self._said("tie_word_embeddings")
        return name.endswith(_HEAD) and (True in said or False not in said)

    def home(self, name: str) -> str:
        """The name under which the checkpoint has a delivered tensor, "" where it has not.  A tied
        head, and what engines make themselves, need to be in neither."""
        if name in self.places:
            return name
        for base in _BASES:
            rest = name.removeprefix(base)
            if rest != name and rest in self.places:
                return "" if base in self.bases else rest
        if fused := fused_of(name):  # as slime sends Qwen3.5-MoE's
            return fused if fused in self.places else ""
        return name if self._is_tied_head(name) or _MADE.search(name) else ""

    def stays(self, name: str, *, drafts: bool) -> bool:
        """Whether nobody has to deliver a tensor of the checkpoint."""
        layer, layers = _LAYER.match(name), self._said("num_hidden_layers")
        if (layer and layers and int(layer[1]) >= layers[0]) or _DRAFTING.search(name):
            return not drafts or name.endswith(_SHARED)
        return self._is_tied_head(name) or is_note(name) or bool(_MADE.search(name))


def _other_shapes(
    claimed: Mapping[str, Sequence[TensorFacts]], places: Mapping[str, Stored]
) -> Iterator[str]:
    """Tensors that a checkpoint has in other shapes, in words.  Scales of whole tensors are () in
    some and (1,) in others."""
    for name, (each, *others) in claimed.items():
        place, shape = places.get(name, _UNKNOWN), tuple(each.shape)
        if place is _UNKNOWN or shape == place.shape or {shape, place.shape} == {(), (1,)}:
            continue
        if each.name != name and name.endswith(FUSED):
            count = sum(math.prod(expert.shape) for expert in (each, *others))
            if count != math.prod(place.shape):
                yield f"{name}: {count} elements one by one, where it has {place.shape}"
        else:
            yield f"{each.name} {shape} where it has {place.shape}"


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


def _reasons(
    facts: Sequence[TensorFacts], unknown: Sequence[str], places: Collection[str]
) -> Iterator[str]:
    """What may have made names and shapes that a checkpoint does not have, and what helps."""
    yield from [_UNWRAP] * any(map(_is_wrapped, unknown))
    yield from [_GATHER] * any(map(_is_hollow, facts))
    yield from [_RENAME] * any(n.startswith(_AT_RUN_TIME) or n.endswith(FUSED) for n in unknown)
    for name in unknown[:1]:
        parts = name.split(".")
        for start in range(min(_DEPTH + 1, len(parts) - 1)):
            end = f".{'.'.join(parts[start:])}"
            if near := next((own for own in places if f".{own}".endswith(end)), ""):
                yield f"it has {near}, which may be {name}"
                break


def _to_keep(facts: Iterable[TensorFacts], lacking: Sequence[str]) -> Iterator[str]:
    """What names tensors that nobody delivers, for Options.keep."""
    if not lacking:
        return
    known = {beginning for name, *_ in facts for beginning in _beginnings(name)}
    found = dict.fromkeys(
        next((f"{each}*" for each in _beginnings(name) if each not in known), name)
        for name in lacking
    )
    if len(found) > _SHOWN:
        found = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", pattern) for pattern in found)
    if any(name.endswith(_BUFFER) for name in lacking):
        yield "named_parameters() leaves out buffers, which state_dict() has"
    shown = [*map(repr, [*found][:_SHOWN]), *["..."] * (len(found) > _SHOWN)]
    yield f"Options(keep=[{', '.join(shown)}]) leaves these as engines have them"


def _beginnings(name: str) -> list[str]:
    return [name[: dot.end()] for dot in re.finditer(r"\.", name)]


def check_names(facts: Sequence[TensorFacts]) -> None:
    """Without a checkpoint to compare with: raises LayoutError, by name, for tensors under the
    names of a wrapped model, and for parameters without elements, which end a server of SGLang."""
    if names := [each.name for each in facts if _is_wrapped(each.name)]:
        raise _core.LayoutError(
            f"{listed(names)}: names that a wrapper of the model or an adapter has made: {_UNWRAP} "
            "(if they are the model's, Options(checkpoint=DIR) names a folder that has them)"
        )
    if names := [each.name for each in facts if _is_hollow(each)]:
        raise _core.LayoutError(f"{listed(names)}: no elements: {_GATHER}")


def _is_wrapped(name: str) -> bool:
    return name.startswith(_PREFIXES) or not _NOT_A_MODELS.isdisjoint(name.split("."))


def _is_hollow(each: TensorFacts) -> bool:
    """Whether a parameter is as DeepSpeed's ZeRO-3 leaves it between passes."""
    return tuple(each.shape) == (0,) and "float" in each.dtype


def check_room(tensors: Iterable[TensorFacts], folder: str) -> None:
    """Raises LayoutError for tensors that are larger than those of the checkpoint that an engine
    was started from: its loaders may take the part of them that there is room for."""
    source = _Source.of(folder, coded=True) if folder else None
    places = source.places if source else {}
    larger = {
        each.name: [each]
        for each in tensors
        if any(map(operator.gt, each.shape, places.get(each.name, _UNKNOWN).shape))
    }
    if texts := list(_other_shapes(larger, places)):
        raise _core.LayoutError(
            f"{listed(texts)}: {folder}, which the engine was started from, has less, and its own "
            "loading may cut off the rest"
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


# --- what a folder says -----------------------------------------------------------------------


def places_of(folder: str | os.PathLike[str]) -> Mapping[str, Stored] | None:
    """The tensors of a checkpoint; None, and the log says so, for a folder without safetensors
    files (a name on the Hugging Face hub, say).

    Raises SystemCallError or LayoutError for one that cannot be read.
    """
    path = Path(folder)
    with system_calls(path):
        known = (path / INDEX).exists() or (path / SINGLE).exists()
    if known:
        return Checkpoint(folder).places
    _log.info("%s has no safetensors files: the trainer's names are not compared", folder)
    return None


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of quantised weights; None where it says nothing.

    Raises SystemCallError, LayoutError: it has no configuration that can be read.
    """
    found = quantization_config(read_config(folder / "config.json"))
    if found is None:
        try:
            found = read_config(folder / "hf_quant_config.json")  # of modelopt
        except _core.SystemCallError as error:
            if error.native != errno.ENOENT:
                raise
    return found


def _form_of(folder: str) -> _Form | None:
    """How a folder's weights are quantised; None where it does not say."""
    try:
        return _form(config_in(Path(folder)), f"the configuration in {folder}")
    except (_core.SystemCallError, _core.LayoutError):
        return None


def _form(config: Mapping[str, Any] | None, source: str) -> _Form:
    try:
        return _Form(_PLAIN if config is None else _text(Method.of(config)), source)
    except _core.UnsupportedError as error:
        return _Form(f"quantised in a way that is not known ({error})", source)


def _text(method: Method) -> str:
    if method.kind.startswith("fp8") and method.block_rows:  # powers of two are scales, too
        return f"fp8_block of {method.block_rows} x {method.block_cols}"
    return method.text


# --- what an engine says ----------------------------------------------------------------------


def _folder_of(engine: EngineHandle, started: Mapping[str, Any], deadline: Deadline) -> str:
    """The folder of the model that a server of SGLang was started from; "" where it is not here.
    A relative path means another folder to a server in another directory: it counts where the
    folder here is one of the architecture that the server says it runs."""
    path, revision = started.get("model_path"), started.get("revision")
    if not isinstance(path, str):
        return ""
    with contextlib.suppress(_core.WsyncError):
        if path and not os.path.isabs(path) and os.path.isdir(path):
            own = read_config(Path(path, "config.json")).get("architectures")
            if own and engine.model_info(deadline.left).get("architectures") == own:
                return os.path.abspath(path)
    return folder_of(path, revision)


def _held(started: Mapping[str, Any], folder: str) -> _Form | None:
    """In which form a server of SGLang holds weights, None where that cannot be told."""
    method, load_format = started.get("quantization"), started.get("load_format")
    if not isinstance(started.get("model_path"), str):
        return None
    if load_format == _QUANTISING:
        return _Form(_PLAIN, f"{load_format=}")
    form = _form_of(folder) if folder else None
    with contextlib.suppress(TypeError, ValueError):
        overriding = json.loads(started.get("json_model_override_args"))  # type: ignore[arg-type]
        if (said := quantization_config(overriding)) is not None:
            form = _form(said, "its json_model_override_args")
    if method not in _NO_METHOD and (form is None or form.text == _PLAIN):
        return _Form("quantised", f"quantization={method!r}", vague=form is None)
    return form


def _behind_adapters(
    tensors: Iterable[TensorFacts], started: Mapping[str, Any], coded: bool
) -> str:
    """The name of a weight which a server of SGLang with LoRA has under another name, or ""
    (0.5.23: layers that it wraps have `weight` and `bias` of dense ones)."""
    enabled, targets = started.get("enable_lora"), started.get("lora_target_modules")
    if not enabled and (enabled is not None or not started.get("lora_paths")):
        return ""
    given = targets if isinstance(targets, list | set | tuple) else ()
    last = {str(target).rpartition(".")[2] for target in given}
    every = not last or not _ALL.isdisjoint(last)  # the adapters that are loaded say it
    experts = every or ("down_proj" in last and not _GATED.isdisjoint(last))
    for name, _, shape, _ in tensors:
        if experts if ".experts." in name else coded and ".layers." in name and len(shape) == 2:
            return name
    return ""
