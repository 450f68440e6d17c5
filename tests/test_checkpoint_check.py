"""What is delivered against the checkpoint that engines were started from: names and shapes.

Engines without wsync's receiver pass over names that they do not know, and keep what nobody
delivers, without a word.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.local_servers import Engine
from support.server_models import checkpoint as server_model
from support.wrong_names import WRONG, fused_experts

import wsync
from wsync.checkpoints.safetensors_layout import Stored
from wsync.handles.sglang_http import HttpHandle
from wsync.messages.control import LOAD_FORMAT
from wsync.quantise.config import TensorFacts
from wsync.trainer import checkpoint_check
from wsync.trainer.checkpoint_check import compare
from wsync.trainer.first_effect import FirstEffect

Tensors = dict[str, torch.Tensor]
OPTIONS = wsync.Options(progress=False)
NAMES = ("model.layers.0.a.weight", "model.norm.weight", "lm_head.weight")
EMBED = ["model.embed_tokens.weight"]


class Noting(Engine):
    """Notes what it is asked for."""

    def __init__(self, folder: Path | str, **started: Any) -> None:
        super().__init__(model_path=str(folder), **started)
        self.asked: list[str] = []
        self.load_formats: tuple[str, ...] = ()

    def pause_generation(self) -> None:
        self.asked.append("pause")

    def flush_cache(self) -> None: ...

    def update_weights_from_tensor(self, **_: Any) -> None:
        self.asked.append("update")

    def update_weights_from_disk(self, **_: Any) -> None:
        self.asked.append("load")

    def continue_generation(self) -> None:
        self.asked.append("continue")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The folder and the weights of a small Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("experts")
    server_model(folder, 1, experts=True, dtype=torch.bfloat16)
    return folder, load_file(folder / "model.safetensors")


def saved(folder: Path, weights: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def ones(*names: str) -> Tensors:
    return {name: torch.ones(2) for name in names}


def deliver(weights: Tensors, engine: Engine, **options: Any) -> None:
    wsync.connect(weights, [engine], options=wsync.Options(progress=False, **options)).close()


@pytest.mark.parametrize("formats", [(), (LOAD_FORMAT,)])
def test_integers_in_place_of_weights_are_refused(formats: Any, tmp_path: Path) -> None:
    engine = Noting(saved(tmp_path, ones("a", "b")))
    engine.load_formats = formats
    text = r"other dtypes: b \(float32 there, int8 delivered, without scales\)"
    with pytest.raises(wsync.LayoutError, match=text):
        deliver(ones("a") | {"b": torch.ones(2).char()}, engine)
    assert engine.asked == []


@pytest.mark.parametrize("form", WRONG)
def test_names_that_engines_pass_over_are_refused_before_anything_is_paused(
    form: str, experts: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder, weights = experts
    make, text = WRONG[form]
    given, engine = make(weights), Noting(folder)
    with pytest.raises(wsync.LayoutError, match=f"{folder}, which engine e was st.*{text}"):
        deliver(given, engine)
    with pytest.raises(wsync.LayoutError, match=text):
        deliver(given, engine, delivery="distributed", broadcast="bucket")
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.DiskSync(given, [engine], folder=tmp_path, options=OPTIONS)
    with pytest.raises(wsync.LayoutError, match=f"{folder} does not match.*{text}"):
        wsync.DiskSync(given, folder=tmp_path, base=folder, options=OPTIONS)
    receiver = Noting(folder)
    receiver.load_formats = (LOAD_FORMAT,)
    with pytest.raises(wsync.LayoutError, match=f"{folder}, which engine e was st.*{text}"):
        deliver(given, receiver)
    assert engine.asked == receiver.asked == []
    deliver(given, engine, checkpoint="")
    deliver(given, receiver, checkpoint="")


def test_the_names_of_the_checkpoint_are_taken(
    experts: tuple[Path, Tensors], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = experts
    deliver(weights, Noting(folder))
    deliver(weights, Engine(), checkpoint=str(folder))
    wsync.DiskSync(weights, [Noting(folder)], folder=tmp_path, base=folder).close()
    assert caplog.messages == []


@pytest.mark.parametrize(
    "family", [*tiny_models.FAMILIES, "bailing_moe_v2", "gpt_oss", "qwen3_next"]
)
def test_every_family_delivers_what_its_checkpoint_has(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with experts one by one, where the checkpoint has them in one."""
    made = tiny_models.config(family)
    weights = tiny_models.tensors(tiny_models.checkpoint(family, made), 1)
    saved(tmp_path / "model", weights, **json.loads(made.to_json_string()))
    deliver(weights, Noting(tmp_path / "model"))
    if any(".experts.1.up_proj" in name for name in weights):
        saved(tmp_path / "fused", fused_experts(weights))
        deliver(weights, Noting(tmp_path / "fused"))
        one = next(name for name in weights if ".experts.1.up_proj" in name)
        del weights[one]
        with pytest.raises(wsync.LayoutError, match=rf"not delivered: {one}"):
            deliver(weights, Noting(tmp_path / "fused"))
    assert all("are not compared" not in text for text in caplog.messages)


VISION = {**ones(*NAMES), **ones("model.visual.a.weight", "model.visual.b.0.weight")}


def test_what_is_to_stay_is_named(tmp_path: Path) -> None:
    folder, text = saved(tmp_path / "model", VISION), ones(*NAMES)
    names = r"model\.visual\.a\.weight, model\.visual\.b\.0\.weight"
    advice = rf"not delivered: {names} \(.*Options\(keep=\[\.\.\.\]\) names"
    with pytest.raises(wsync.LayoutError, match=advice):
        deliver(text, Noting(folder))
    deliver(text, Noting(folder), keep=["model.visual.*"])
    deliver(VISION, Noting(folder), keep=["model.visual.*"])
    deliver(text, Noting(folder), keep=["model.visual.a.weight", "*.0.weight"])
    with pytest.raises(wsync.LayoutError, match=r"not delivered: model\.visual\.b\.0\.weight \("):
        deliver(text, Noting(folder), keep=["model.visual.a.weight"])
    options = wsync.Options.named("WSYNC_OPTIONS", '{"keep": ["model.visual.*"]}')
    with wsync.DiskSync(text, folder=tmp_path, base=folder, options=wsync.Options(**options)):
        pass
    assert wsync.Options.named("WSYNC_OPTIONS", '{"keep": null}') == {"keep": None}
    assert wsync.Options(keep=None).keep == ()  # type: ignore[arg-type]
    assert wsync.Options(keep="model.visual.*").keep == ("model.visual.*",)
    with pytest.raises(wsync.InvalidArgumentError, match="is not a list of names or patterns"):
        wsync.Options(keep=[3])  # type: ignore[list-item]


MTP = ("model.layers.1.eh_proj.weight", "mtp.fc.weight", "model.mtp_layers.0.a.weight")
MADE = ["model.layers.0.self_attn.rotary_emb.inv_freq", "h.0.attn.bias", "e.position_ids"]
DRAFTS = {"speculative_algorithm": "EAGLE"}


@pytest.mark.parametrize(
    ("there", "config", "given", "started", "refused"),
    [
        # a tied head has a name in neither, in both, or in one
        ([NAMES[2]], {"tie_word_embeddings": True}, [], {}, ""),
        ([], {"tie_word_embeddings": True}, [NAMES[2]], {}, ""),
        ([], {"text_config": {"tie_word_embeddings": True}}, [NAMES[2]], {}, ""),
        (
            EMBED,
            {"tie_word_embeddings": True},
            [*EMBED, NAMES[2]],
            {},
            "lm_head.weight (tied",
        ),
        ([], {"model_type": "gemma2"}, [NAMES[2]], {}, ""),
        (
            [NAMES[2]],
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            *([], {}, ""),
        ),
        ([NAMES[2]], {"tie_word_embeddings": False}, [], {}, "not delivered: lm_head.weight"),
        ([], {"tie_word_embeddings": False}, [NAMES[2]], {}, "not there: lm_head.weight"),
        # layers that only draft
        (MTP, {"num_hidden_layers": 1}, [], {}, ""),
        (MTP, {"text_config": {"num_hidden_layers": 1}}, [], {}, ""),
        (MTP, {"num_hidden_layers": 1}, MTP, DRAFTS, ""),
        (
            MTP,
            {"num_hidden_layers": 1},
            MTP[:2],
            DRAFTS,
            "not delivered: model.mtp_layers.0.a.weight",
        ),
        (MTP, {"num_hidden_layers": 1}, [], DRAFTS | {"speculative_draft_model_path": "/o"}, ""),
        (MTP[:1], {"num_hidden_layers": 2}, [], {}, "not delivered: model.layers.1.eh_proj"),
        (
            [*MTP, "model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight"],
            *({"num_hidden_layers": 1}, MTP, DRAFTS, ""),
        ),
        # what engines make themselves
        (MADE, {}, [], {}, ""),
        ([], {}, MADE, {}, ""),
        (
            ["model.layers.0.mlp.gate.e_score_correction_bias"],
            *({}, [], {}, "state_dict() has buffers, too, which named_parameters() leaves out"),
        ),
    ],
)
def test_what_nobody_has_to_deliver(
    there: list[str],
    config: dict[str, Any],
    given: list[str],
    started: dict[str, Any],
    refused: str,
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path, ones(*NAMES[:2], *there), **{"model_type": "any", **config})
    engine, weights = Noting(folder, **started), ones(*NAMES[:2], *given)
    if not refused:
        deliver(weights, engine)
        return
    with pytest.raises(wsync.LayoutError) as error:
        deliver(weights, engine)
    assert refused in str(error.value)


def test_a_tied_head_may_be_delivered_under_both_names(tmp_path: Path) -> None:
    folder = saved(tmp_path, ones(*NAMES[:2], *EMBED), tie_word_embeddings=True)
    weights = ones(*NAMES[:2], *EMBED)
    deliver(weights | {NAMES[2]: weights[EMBED[0]]}, Noting(folder))
    drafts = ones("model.layers.1.embed_tokens.weight")  # its own embedding
    folder = saved(tmp_path, weights | drafts, tie_word_embeddings=True)
    deliver(weights | drafts | {NAMES[2]: weights[EMBED[0]]}, Noting(folder))
    with pytest.raises(wsync.LayoutError, match=r"lm_head\.weight \(tied"):
        deliver(weights | drafts | ones(NAMES[2]), Noting(folder))
    with pytest.raises(
        wsync.InvalidArgumentError, match="checkpoint='/no/such': expected a folder"
    ):
        deliver(weights, Noting(folder), checkpoint="/no/such")


def test_a_base_models_checkpoint_has_no_prefix(tmp_path: Path) -> None:
    """Engines put `model.` before its names; where the checkpoint has some, they do not.  That is
    looked for once: 12,000 tensors took 18 s."""
    folder = saved(tmp_path, ones("layers.0.a.weight", "norm.weight"))
    deliver(ones(*NAMES), Noting(folder))
    many = [TensorFacts(f"layers.{n}.weight", "float32", (2,)) for n in range(12_000)]
    places = {each.name: Stored("", (2,)) for each in many}
    began = time.process_time()
    with mock.patch.object(checkpoint_check, "places_of", lambda _: places):
        assert compare([each._replace(name=f"model.{each.name}") for each in many], str(folder))
    assert time.process_time() - began < 3
    with pytest.raises(wsync.LayoutError, match=r"not there: model\.visual\.a\.weight"):
        deliver(ones("model.visual.a.weight"), Noting(saved(folder, ones("visual.a", *NAMES))))


def test_shapes_and_parameters_without_elements(tmp_path: Path) -> None:
    """SGLang's loaders take the part that a parameter has room for."""
    folder, weights = saved(tmp_path / "model", ones(*NAMES)), ones(*NAMES)
    wider = weights | {"model.norm.weight": torch.ones(3)}
    text = r"other shapes: model\.norm\.weight \(\(2,\) there, \(3,\) delivered\)"
    with pytest.raises(wsync.LayoutError, match=text):
        deliver(wider, Noting(folder))
    with pytest.raises(wsync.LayoutError, match=f"{folder} does not match.*{text}"):
        wsync.DiskSync(wider, folder=tmp_path, base=folder)
    hollow = weights | {"model.norm.weight": torch.ones(0)}
    for engine in (Noting(folder), Engine()):
        with pytest.raises(wsync.LayoutError, match=r"within deepspeed\.zero"):
            deliver(hollow, engine)


@pytest.mark.parametrize(
    "names",
    [
        ("_orig_mod.a", "_orig_mod.b"),
        ("b._checkpoint_wrapped_module.c", "a"),
        ("a.lora_A.default.weight", "a.base_layer.weight"),
        ("a.parametrizations.weight.original",),
        ("module.a", "module.b"),
        ("pretrained_model.a", "v_head.summary.weight"),
        ("base_model.model.a",),
    ],
)
def test_names_of_wrapped_models_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    """Also where no checkpoint is here."""
    weights, folder = ones(*names), saved(tmp_path / "model", ones("a", "b"))
    text = f"{names[0]}.*: a wrapper of the model or an adapter has made these names"
    for refuse in (
        lambda: deliver(weights, Engine()),
        lambda: wsync.DiskSync(weights, folder=tmp_path),
    ):
        with pytest.raises(wsync.LayoutError, match=text):
            refuse()
    with pytest.raises(wsync.LayoutError, match=r"not there: .*without those of torch's wrappers"):
        deliver(weights, Noting(folder))
    deliver(weights, Noting(saved(folder, weights)))  # a checkpoint that has them itself


def test_where_no_folder_is_seen_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Engine("a"), Engine("b", model_path="/nowhere"), Engine("c", model_path="org/name")]
    wsync.connect(ones(*NAMES), engines, options=OPTIONS).close()
    (text,) = caplog.messages
    assert text.startswith("names, shapes and dtypes are not compared for engines a, b, c, ")
    assert "(Options(checkpoint=DIR) names the folder that they were started from)" in text
    caplog.clear()
    wsync.connect(ones(*NAMES), engines, options=wsync.Options(checkpoint="")).close()
    folder = str(saved(tmp_path / "model", ones(*NAMES)))
    wsync.connect(ones(*NAMES), engines, options=wsync.Options(checkpoint=folder)).close()
    assert caplog.messages == []
    with pytest.raises(wsync.LayoutError, match="other"):
        deliver(ones("model.other"), Engine(), checkpoint=folder)


def test_a_relative_folder_is_looked_up_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", ones(*NAMES))
    with pytest.raises(wsync.LayoutError, match=rf"{tmp_path}/model, .*not there: model\.other"):
        deliver(ones("model.other"), Noting("model"))


def test_a_name_of_the_hub_is_looked_up_in_this_hosts_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    made = tmp_path / "models--Qwen--Any" / "snapshots" / "main"
    made.mkdir(parents=True)
    saved(made, ones(*NAMES), model_type="any")
    for engine, checkpoint in ((Noting("Qwen/Any"), None), (Engine(), "Qwen/Any")):
        text = (
            rf"^{made}, which engine e was started from, does not match .*: not there: model\.other"
        )
        with pytest.raises(wsync.LayoutError, match=text):
            deliver(ones("model.other"), engine, checkpoint=checkpoint)


def test_a_folder_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engines = [Noting(saved(tmp_path, {})) for _ in "ab"]
    engines[1].name = "b"
    (tmp_path / "model.safetensors").write_bytes(b"short")
    wsync.connect(ones(*NAMES), engines, options=OPTIONS).close()
    assert [text.partition(":")[0] for text in caplog.messages] == [
        *["names, shapes and dtypes are not compared with a checkpoint"] * 2,
        "names, shapes and dtypes are not compared for engines e, b, because this host has no "
        "checkpoint of theirs that wsync can read",
    ]


EXPERTS = {f"model.layers.{n}.mlp.experts.w13_weight": "1" for n in range(2)}
REST = {"model.layers.0.mlp.gate.weight": "1", "model.norm.weight": "1"}


def looked(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, Any]) -> FirstEffect:
    """After as many updates as there are two answers for."""
    left = list(answers)

    def request(*_: Any) -> tuple[int, str]:
        status, sums = left.pop(0)
        ranks = [{"checksums": sums}, {"checksums": sums}]
        return status, json.dumps({"success": status == 200, "ranks": ranks})

    monkeypatch.setattr(HttpHandle, "request", request)
    engine, effect = HttpHandle("http://127.0.0.1:1", workers=2), FirstEffect()
    effect.watch(engine.name)
    for _ in range(len(answers) // 2):
        effect.look(engine, 5, after=False)
        effect.look(engine, 5, after=True)
    effect.look(engine, 5, after=True)
    return effect


OLD, NEW = (200, EXPERTS | REST), (200, EXPERTS | REST | {"model.layers.0.mlp.gate.weight": "2"})
ALL_NEW = (200, dict.fromkeys(EXPERTS | REST, "2"))


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ([OLD, ALL_NEW], ""),
        ([OLD, NEW], "model.layers.*.mlp.experts.w13_weight"),  # and not the norm
        ([OLD, OLD, OLD, NEW], "model.layers.*.mlp.experts.w13_weight"),
        ([OLD, OLD], ""),  # weights may be the same
        ([OLD] * 6, "model.layers.*.mlp.experts.w13_weight, model.layers.*.mlp.gate.weight"),
        ([(400, {}), (400, {})], ""),
        ([(200, {}), (200, {})], ""),
    ],
)
def test_what_an_update_has_left_as_it_was_is_named(
    answers: list[tuple[int, Any]],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    looked(monkeypatch, *answers)
    expected = [f"engine http://127.0.0.1:1: the update did not change any of {named}: "]
    assert [text.partition("if the")[0] for text in caplog.messages] == expected * bool(named)
