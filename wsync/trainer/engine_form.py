"""Compares the form that an engine holds its weights in, as far as it says, with what it is sent.

wsync's receiver compares what it holds itself.  Engines without it convert: their loaders copy
bfloat16 into float8, or the other way, and say nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from wsync import _core
from wsync.checkpoints.hub_cache import folder_of
from wsync.checkpoints.safetensors_layout import Place
from wsync.handles.base import EngineHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.machine.deadline import Deadline
from wsync.module_tensors.names_in_messages import listed
from wsync.module_tensors.quantised_names import without_scales
from wsync.options import Options
from wsync.quantise.config import Method, TensorFacts, facts_of, quantization_config
from wsync.trainer.compare_checkpoint import is_part
from wsync.trainer.engine_names import compare_names, places_in
from wsync.trainer.quantise_option import config_in, config_of, has_codes

_log = logging.getLogger(__name__)

_PLAIN: Final = "not quantised"
_OWN: Final = "codes and scales that the trainer holds"
_PATH: Final = (str, os.PathLike)
_NONE: Final = (None, "", "unquant")  # of SGLang's --quantization
# targets of LoRA: SGLang's names of layers that are several in checkpoints, and those of all
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}
_EXPERTS: Final = {"gate_up_proj", "down_proj"}  # it wraps experts where both are targets
_ALL: Final = {"all", "all-linear"}
# loaders of SGLang that take weights as they are, and quantise them each time
_QUANTISING: Final = ("flash_rl",)


class _Form(NamedTuple):
    """text: how weights are quantised, equal for forms that engines take for each other. source:
    what says so. vague: they are quantised, and nothing says how."""

    text: str
    source: str
    vague: bool = False


def folders(options: Options, base: object = None) -> list[str]:
    """Those that engines may have been started from.  base: one beside Options.checkpoint, or
    anything else."""
    return [
        os.fspath(each) for each in (options.checkpoint, base) if each and isinstance(each, _PATH)
    ]


@dataclass(frozen=True)
class SentForm:
    """In which form weights are sent, to be compared with what engines hold.

    Engines of SGLang say how they were started.  The configuration of the model is read if its
    folder is there under the same path here, or in the cache of the Hugging Face hub.

    text: it, in words.  found: what folders say that engines may have been started from.
    tensors: what is sent.  named: whether their names are compared with what engines were
    started from.  places: the tensors of folders that have been read.
    """

    text: str
    found: Sequence[_Form]
    tensors: Sequence[TensorFacts]
    named: bool
    places: dict[str, Mapping[str, Place]] = field(default_factory=dict)

    @staticmethod
    def of(options: Options, model: _core.Layout, *, base: object = None) -> SentForm:
        """The form that options mean.

        Args:
            model: what all ranks hold.  If they have codes and scales themselves, engines have to
                hold some, too; which is not compared.
            base: a folder that engines may have been started from, beside Options.checkpoint.

        Raises:
            WsyncError: as config_of, and Method.of for what options mean.
        """
        config = config_of(options)
        own = config is None and has_codes(model)
        sent = _OWN if own else _PLAIN if config is None else _text(Method.of(config))
        forms = [form for folder in folders(options, base) if (form := _in_folder(folder))]
        return SentForm(sent, forms, facts_of(model), options.checkpoint != "")

    @property
    def _quantised(self) -> bool:
        return self.text not in (_OWN, _PLAIN)

    def check(self, engine: EngineHandle, timeout: float) -> bool:
        """Whether an engine says what it holds.

        Raises:
            InvalidArgumentError: it holds another form, and no checkpoint says otherwise; the text
                has both.
            LayoutError: as compare_names, of what it was started from.
            UnsupportedError: it passes over experts.
            WsyncError: it does not answer.
        """
        started = _started(engine, timeout)
        if passed_over := self._passed_over(_lora_targets(started)):
            raise _core.UnsupportedError(
                f"engine {engine.name}: was started with LoRA, which gives weights of experts and "
                "scales of the layers that it targets other names: SGLang's own loaders pass over "
                f"{passed_over} without a word (say its --lora-target-modules: experts are "
                "targets where both gate_up_proj and down_proj are)"
            )
        held = _held(started)
        said = held is not None and not (held.vague and self._quantised)
        if said and held is not None and not _takes(held, self.text):
            known = [form for form in self.found if _takes(form, self.text)]
            _differ(engine.name, held, self.text, known)
        if self.named and (folder := _folder(started)):
            if folder not in self.places:  # a large one has a hundred files
                self.places[folder] = places_in(folder)
            compare_names(engine.name, self.tensors, folder, self.places[folder])
        return said

    def _passed_over(self, targets: Collection[str]) -> str:
        """The name of a tensor whose layer adapters wrap in such a way that SGLang does not know
        the name any more (0.5.23: they have `weight` and `bias` of dense layers); or ""."""
        every = not _ALL.isdisjoint(targets)
        for name, _, shape, _ in self.tensors:
            layer, _, leaf = name.rpartition(".")
            last = layer.rpartition(".")[2]
            if ".experts." in name:
                if every or _EXPERTS.issubset(targets):
                    return name
            elif every or _FUSED.get(last, last) in targets:
                scale = self.text == _OWN and leaf not in ("weight", "bias")
                weight = ".layers." in name and leaf == "weight" and len(shape) == 2
                if scale or (self._quantised and weight):
                    return name
        return ""

    def silent(self, engines: Sequence[EngineHandle], timeout: float) -> list[str]:
        """The names of engines that do not say what they hold, for check_plain.  The log says so,
        once for all of them, if weights are quantised and no checkpoint is named.

        Raises what `check` does.
        """
        deadline = Deadline(timeout)
        names = [engine.name for engine in engines if not self.check(engine, deadline.left)]
        if names and self._quantised and not self.found:
            _log.warning(
                "engines do not say how their weights are quantised, and convert without a word "
                "what they are sent in another form than %s: %s (Options(checkpoint=) names the "
                "folder that they were started from, which is compared)",
                self.text,
                ", ".join(names),
            )
        return [] if self.text == _OWN else names


def _takes(held: _Form, sent: str) -> bool:
    """Whether an engine that holds such weights is sent the same form, as far as can be told."""
    return held.text != _PLAIN if sent == _OWN else held.text == sent


def check_plain(model: _core.Layout, folder: str, silent: Sequence[str]) -> None:
    """For weights that are sent as the trainer has them: raises LayoutError if the checkpoint's are
    quantised and some engines (`silent`, by name) do not say what they hold.  These would convert
    weights to codes, and keep the scales of other codes.

    model: what all ranks have.  folder: the checkpoint's, which may be none.
    """
    if not silent or has_codes(model):
        return
    form = _in_folder(folder)
    if form is None or form.text == _PLAIN:
        form = _by_tensors(folder)
    if form is not None:
        raise _core.LayoutError(
            f"the weights of {folder} are {form.text}, by {form.source}, but what is delivered is "
            f"{_PLAIN}, which engines that were started from it convert without a word: "
            f"{listed(silent)} (Options(quantise='checkpoint') delivers what it has; "
            "Options(checkpoint=) names the folder that they were started from, or none by '')"
        )


def _by_tensors(folder: str) -> _Form | None:
    """How a folder's weights are quantised by the tensors in it; None where none is codes or
    scales."""
    parts = [name for name, place in places_in(folder).items() if is_part(name, place.dtype)]
    return _Form("quantised", listed(parts)) if parts else None


def check_scales(model: _core.Layout) -> None:
    """Raises LayoutError, by name, if ranks hold codes and none holds their scales: an engine that
    is sent only codes reads them with other scales, or with none."""
    missing = without_scales((each.name, each.dtype) for each in facts_of(model))
    if missing:
        raise _core.LayoutError(f"{listed(missing)}: codes that the trainer delivers no scales for")


def tell_rearranged(engines: Sequence[EngineHandle], options: Options, model: _core.Layout) -> None:
    """Tells the handles whether their engines are sent weights that engines rearrange after
    loading.  Raises as config_of, and Method.of."""
    config = config_of(options)
    if config is None:
        rearranges = any(map(_rearranged, facts_of(model)))
    else:
        rearranges = not Method.of(config).kind.startswith("fp8")
    for engine in engines:
        if hasattr(type(engine), "rearranges"):  # and not by __getattr__
            own: Any = engine
            own.rearranges(rearranges)


def _rearranged(part: TensorFacts) -> bool:
    """Whether a tensor is codes of INT4, or scales of NVFP4 or MXFP8."""
    exponents = part.dtype in ("uint8", "float8_e8m0fnu") and part.name.endswith("_scale_inv")
    return exponents or part.name.endswith((".weight_packed", ".weight_scale_2"))


def _differ(name: str, held: _Form, sent: str, known: Sequence[_Form]) -> None:
    text = (
        f"engine {name}: its weights are {held.text}, by {held.source}, but what is delivered is "
        f"{sent}, which it would convert without a word"
    )
    if known:  # a path may be another folder on the engine's host
        _log.warning("%s; %s says that it does hold these", text, known[0].source)
        return
    raise _core.InvalidArgumentError(
        f"{text} (Options(quantise=) says how weights are delivered; Options(checkpoint=) names "
        "the folder that the engine was started from, where another is under its path here)"
    )


def _started(engine: EngineHandle, timeout: float) -> Mapping[str, Any]:
    """How an engine says it was started; nothing where it does not."""
    ask = getattr(type(engine), "server_info", None)
    if ask is None:
        return {}
    try:
        found = ask(engine, timeout)
    except _core.RemoteError as error:
        if isinstance(engine, HttpHandle) and not engine.lacks("server_info", error.native):
            raise
        return {}  # not all servers know the path
    return found if isinstance(found, Mapping) else {}


def _lora_targets(started: Mapping[str, Any]) -> Collection[str]:
    """Layers that a server of SGLang puts adapters' around; empty without LoRA."""
    enabled, targets = started.get("enable_lora"), started.get("lora_target_modules")
    if not enabled and (enabled is not None or not started.get("lora_paths")):
        return ()
    if not isinstance(targets, list | set | tuple) or not targets:
        return _ALL  # the adapters that are loaded say it
    last = [str(target).rpartition(".")[2] for target in targets]
    return {_FUSED.get(name, name) for name in last}


def _held(started: Mapping[str, Any]) -> _Form | None:
    """What a server of SGLang holds, None where that cannot be told."""
    own = started.get("quantization")
    if not isinstance(started.get("model_path"), str):
        return None
    if started.get("load_format") in _QUANTISING:
        return _Form(_PLAIN, f"load_format={started['load_format']!r}")
    form = _overridden(started.get("json_model_override_args"))
    if form is None and (folder := _folder(started)):
        form = _in_folder(folder)
    if own not in _NONE and (form is None or form.text == _PLAIN):  # else it is the same method
        return _Form("quantised", f"quantization={own!r}", vague=form is None)
    return form


def _folder(started: Mapping[str, Any]) -> str:
    """That of the model which a server of SGLang was started from; "" where it says none, or a name
    of the hub that is not in this host's cache."""
    path, revision = started.get("model_path"), started.get("revision")
    return folder_of(path, revision) if isinstance(path, str) else ""


def _overridden(text: object) -> _Form | None:
    try:
        config = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return None
    found = quantization_config(config) if isinstance(config, Mapping) else None
    return None if found is None else _Form(_words(found), "its json_model_override_args")


def _in_folder(folder: str) -> _Form | None:
    """What the configuration in a folder says; None where there is none that can be read."""
    try:
        return _Form(_words(config_in(Path(folder))), f"the configuration in {folder}")
    except (_core.SystemCallError, _core.LayoutError):
        return None


def _words(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return _PLAIN
    try:
        return _text(Method.of(config))
    except _core.UnsupportedError as error:
        return f"quantised in a way that is not known ({error})"


def _text(method: Method) -> str:
    if method.kind.startswith("fp8") and method.block_rows:  # powers of two are scales, too
        return f"fp8_block of {method.block_rows} x {method.block_cols}"
    return method.text
