"""Engines without wsync's receiver may pass over names that they do not know: what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.local_servers import Engine

import wsync

OPTIONS = wsync.Options(progress=False)


@pytest.mark.parametrize(
    "names",
    [
        ("_orig_mod.a", "_orig_mod.b"),
        ("a", "b._checkpoint_wrapped_module.c"),
        ("a.base_layer.weight", "a.lora_A.default.weight"),
        ("a.parametrizations.weight.original",),
        ("_forward_module.a", "_forward_module.b"),
        ("module.a", "module.b"),
        ("pretrained_model.a", "v_head.summary.weight"),
        ("base_model.model.a",),
    ],
)
def test_names_of_wrapped_models_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    """A stock engine may pass over names that it does not know, and say success."""
    weights = {name: torch.ones(1) for name in names}
    text = f"{names[0] if names[0] != 'a' else names[1]}.*: names that a wrapper"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(weights, [Engine()])
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.DiskSync(weights, folder=tmp_path)
    wsync.connect({"module.a": torch.ones(1), "b": torch.ones(1)}, [Engine()]).close()
    save_file(weights, tmp_path / "model.safetensors")  # a checkpoint that has them itself
    options = wsync.Options(checkpoint=str(tmp_path), progress=False)
    wsync.connect(weights, [Engine()], options=options).close()
    wsync.DiskSync(weights, folder=tmp_path / "versions", base=tmp_path).close()
    with pytest.raises(wsync.LayoutError, match=r"^c\._orig_mod\.d: names that a wrapper"):
        more = weights | {"c._orig_mod.d": torch.ones(1)}
        wsync.connect(more, [Engine()], options=options)


def started_from(folder: Path, *names: str) -> Engine:
    save_file({name: torch.ones(2) for name in names}, folder / "model.safetensors")
    return Engine(model_path=str(folder))


NAMES = ("model.layers.0.a.weight", "model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        (tuple(f"model.{name}" for name in NAMES), "model."),
        (tuple(f"actor.net.{name}" for name in NAMES), "actor.net."),
        (("policy.model.norm.weight", "value.weight"), "policy."),
    ],
)
def test_names_of_an_engines_checkpoint_behind_a_prefix(
    given: tuple[str, ...], prefix: str, tmp_path: Path
) -> None:
    engine, weights = started_from(tmp_path, *NAMES), {name: torch.ones(2) for name in given}
    text = f"{given[0]}.* engine e was started from {tmp_path}, .* without '{prefix}'"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(weights, [engine], options=OPTIONS)
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.DiskSync(weights, [engine], folder=tmp_path / "versions")
    wsync.connect(weights, [engine], options=wsync.Options(checkpoint="")).close()


@pytest.mark.parametrize(
    ("there", "given", "warns"),
    [
        (NAMES, NAMES, False),
        (NAMES, ("model.layers.0.qkv.weight", "model.norm.weight"), False),  # fused
        (NAMES, ("model.language_model.norm.weight", "model.visual.a.weight"), True),
        (("layers.0.a.weight", "norm.weight"), tuple(NAMES[:2]), True),
        ((*NAMES, "visual.a.weight"), ("model.visual.a.weight",), True),  # a vision tower alone
        ((), NAMES, False),
    ],
)
def test_names_that_engines_may_know(
    there: tuple[str, ...],
    given: tuple[str, ...],
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Engines put `model.` before the names of a base model's checkpoint."""
    engine = started_from(tmp_path, *there)
    wsync.connect({name: torch.ones(2) for name in given}, [engine], options=OPTIONS).close()
    assert ["has none of these names" in text for text in caplog.messages] == [True] * warns


def test_shapes_of_an_engines_checkpoint(tmp_path: Path) -> None:
    """SGLang's loaders take the part that a parameter has room for."""
    engine, weights = started_from(tmp_path, *NAMES), {name: torch.ones(2) for name in NAMES}
    wider = weights | {"model.norm.weight": torch.ones(3)}
    text = r"which has other shapes: model\.norm\.weight \(3,\) where it has \(2,\)"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(wider, [engine], options=OPTIONS)
    folder, versions = tmp_path, tmp_path / "versions"
    with pytest.raises(wsync.LayoutError, match=rf"{folder}, whose configuration .* {text[10:]}"):
        wsync.DiskSync(wider, folder=versions, base=folder)
    wsync.DiskSync(
        wider, folder=versions, base=folder, options=wsync.Options(checkpoint="")
    ).close()
    wsync.DiskSync(weights, folder=versions, base=folder).close()
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    options = wsync.Options(checkpoint="")
    with pytest.raises(wsync.InvalidArgumentError, match="not quantised"):
        wsync.connect(wider, [engine], options=OPTIONS)
    (tmp_path / "config.json").unlink()
    wsync.connect(wider, [engine], options=options).close()


def test_parameters_without_elements_end_a_server_of_sglang(tmp_path: Path) -> None:
    engine, whole = started_from(tmp_path, *NAMES), {NAMES[1]: torch.ones(2)}
    text = (
        rf"^engine e was started from {tmp_path}, which has other shapes: lm_head\.weight \(0, 4\)"
    )
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(whole | {"lm_head.weight": torch.ones(0, 4)}, [engine], options=OPTIONS)
    partitioned = whole | {"model.other": torch.ones(0)}
    text = r"^model\.other: no elements, as DeepSpeed's ZeRO-3 leaves parameters"
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.connect(partitioned, [engine], options=OPTIONS)
    with pytest.raises(wsync.LayoutError, match=text):
        wsync.DiskSync(partitioned, folder=tmp_path / "versions")
    other = whole | {"model.other": torch.ones(0, 4), "m._extra_state": torch.ones(0).byte()}
    wsync.connect(other, [engine], options=OPTIONS).close()
