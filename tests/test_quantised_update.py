"""Updates of weights that are quantised on the way, against references in plain torch."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import quantised_cases
from support.megatron_cpu import Parallel
from support.procs import RankError, Ranks
from support.quantised_cases import METHODS, blocks, differing, groups, quantised, shapes_of
from support.tiny_qwen3 import dense, sparse
from support.weights_only_engine import ProcessEngine

import wsync
from wsync.disk import newest
from wsync.messages import payload

CASES = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), "auto"),
    "tp2pp2-direct": (dense(), Parallel(tp=2, pp=2), "direct"),
    "moe-tp2pp2ep2-gloo": (sparse(), Parallel(tp=2, pp=2, ep=2, etp=1), "gloo"),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_quantise_what_they_hold(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Tensor-parallel ranks cut blocks and groups, which have one scale all the same."""
    config, parallel, exchange = CASES[name]
    facts = ranks.run(
        quantised_cases.update_twice, config, parallel, exchange, str(tmp_path), timeout=240
    )
    assert [fact["wrong"] for fact in facts] == [[]] * 4


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("merge", "RemoteError: trainer rank 1: ValueError: a planted failure"),
        (
            "memory",
            r"NoMemoryError: trainer rank 1: no memory for \d+ bytes of codes and scales: .*there",
        ),
    ],
)
def test_an_update_that_fails_while_it_quantises_leaves_engines_as_they_were(
    ranks: Ranks, fault: str, text: str
) -> None:
    """They have not been paused, and go on with what they have."""
    found = ranks.run(quantised_cases.fail_once, dense(), Parallel(tp=2, pp=2), fault, timeout=240)
    assert len({facts["error"] for facts in found}) == 1
    assert re.fullmatch(text, found[0]["error"])
    assert found[0]["kept"] == [([], True, "1")]
    for facts in found:
        assert facts["wrong"] == []
        assert not facts["paused"]


@pytest.mark.parametrize("place", ["amaxes", "codes", "rounds"])
def test_a_rank_that_dies_while_it_quantises_is_reported_by_all_others(
    tmp_path: Path, place: str
) -> None:
    """The engine has what it had, and takes the next trainer's weights."""
    case = (dense(), Parallel(tp=2, pp=2), place, str(tmp_path))
    with Ranks(4, path=sys.path) as ranks, pytest.raises(RankError):
        ranks.run(quantised_cases.die_once, *case, timeout=120)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(found) == ["rank0", "rank1", "rank3"]
    (error,) = {facts["error"] for facts in found.values()}
    assert error.startswith("PeerClosedError: trainer rank ")
    assert found["rank0"]["kept"] == [[], True, "1"]
    assert found["rank0"]["after"] == [[], True, "7"]


def test_versions_are_quantised_without_memory_in_between(tmp_path: Path) -> None:
    given, config = weights(1), METHODS["cut blocks"][0]
    options = wsync.Options(quantise=config, park=True, progress=False)
    with wsync.DiskSync(given, folder=tmp_path, options=options) as sync:
        for _ in range(2):
            sync.update()
            assert sync._image is not None
            assert sync._image._memory is None
            (file,) = newest(tmp_path).glob("*.safetensors")
            found = load_file(file)
            assert differing(found, quantised(given, "cut blocks")) == []
    with pytest.raises(wsync.InvalidArgumentError, match="park=True has no effect here"):
        wsync.DiskSync(given, folder=tmp_path, options=wsync.Options(park=True))


DYNAMIC = {"activation_scheme": "dynamic"}  # which engines ask FP8's configurations for
BASES = {"text_config": {"x": 1}, "model_type": "any"}


class Configuration:
    """A transformers configuration."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def to_dict(self) -> dict[str, Any]:
        return self._facts

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self._facts))


def a_base(kind: str, folder: Path, facts: dict[str, Any]) -> Any:
    base = Configuration(facts)
    if kind == "configuration":
        return base
    made = folder / "base"
    made.mkdir(parents=True)
    base.save_pretrained(made)
    return made


def written(folder: Path, base: Any, quantise: Any) -> Any:
    """The config.json of a version."""
    options = wsync.Options(quantise=quantise, progress=False)
    with wsync.DiskSync(weights(1), folder=folder, base=base, options=options) as sync:
        sync.update()
    return json.loads((newest(folder) / "config.json").read_text())


@pytest.mark.parametrize("kind", ["folder", "configuration"])
def test_a_versions_configuration_says_how_it_is_quantised(kind: str, tmp_path: Path) -> None:
    base, config = a_base(kind, tmp_path, BASES), METHODS["cut blocks"][0]
    found = written(tmp_path / "versions", base, config)
    assert found == BASES | {"quantization_config": config | DYNAMIC}
    again = written(tmp_path / "versions", Configuration(found), config)
    assert again == found


PARTS = ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj", "mlp.gate", "input_layernorm")
LAYERS = {f"model.layers.{n}.{part}" for n in (0, 1) for part in PARTS}


def stated(folder: Path, config: Any, facts: Any = None, **options: Any) -> tuple[Any, set[str]]:
    """What the config.json of a version says, and the modules that are plain in it."""
    given = {
        f"{name}.weight": torch.zeros(64) if "norm" in name else torch.ones(64, 64)
        for name in sorted(LAYERS)
    }
    chosen = wsync.Options(quantise=config, progress=False, **options)
    base = Configuration(BASES | ({} if facts is None else {"quantization_config": facts}))
    with wsync.DiskSync(given, folder=folder, base=base, options=chosen) as sync:
        sync.update()
    (file,) = newest(folder).glob("*.safetensors")
    names = {name.partition(".weight")[0] for name in load_file(file) if "_scale" in name}
    found = json.loads((newest(folder) / "config.json").read_text())["quantization_config"]
    return found, {name for name in LAYERS - names if "norm" not in name}


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (blocks(128, 128), "modules_to_not_convert"),
        ({"quant_method": "fp8"}, "modules_to_not_convert"),
        ({"quant_method": "mxfp8"}, "ignored_layers"),
        (groups(32), "ignore"),
        (NVFP4, "ignore"),
    ],
)
def test_a_version_names_in_full_what_is_plain(config: Any, key: str, tmp_path: Path) -> None:
    """Engines of one method read nothing shorter alike."""
    excepted = "model.layers.0.mlp.up_proj"
    for given in (config, config | {key: ["lm_head", excepted]}):
        found, plain = stated(tmp_path, given)
        assert plain <= set(found[key]) | ({"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"})
        assert not set(found[key]) & (LAYERS - plain)
        if given is not config:
            assert (excepted in found[key]) == (excepted in plain)
            assert "lm_head" in found[key]
    if "fp8" in config["quant_method"]:
        assert (found["activation_scheme"], found["fmt"]) == ("dynamic", "e4m3")
        assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= set(found[key])
    again, _ = stated(tmp_path / "again", given, found)
    assert again == found


def test_versions_without_scales_of_inputs_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stated(tmp_path, blocks(128, 128))
    assert caplog.messages == []
    stated(tmp_path, NVFP4)
    (text,) = caplog.messages
    assert text.startswith("NVFP4: versions have no input_scale")


@pytest.mark.parametrize("kind", ["folder", "configuration"])
def test_a_base_of_another_method_is_named(kind: str, tmp_path: Path) -> None:
    facts = BASES | {"quantization_config": METHODS["one block"][0]}
    base = a_base(kind, tmp_path, facts)
    with pytest.raises(wsync.LayoutError) as error:
        written(tmp_path / "versions", base, METHODS["cut blocks"][0])
    assert "fp8_block of 128 x 128, but what is delivered is fp8_block of 24 x 40" in str(
        error.value
    )
    facts["quantization_config"] = {"quant_method": "awq"}
    base = a_base(kind, tmp_path / "versions", facts)
    with pytest.raises(wsync.LayoutError, match=r"quant_method='awq'.* delivered is fp8_block"):
        written(tmp_path / "versions", base, METHODS["cut blocks"][0])


@pytest.mark.parametrize("kind", ["folder", "configuration"])
def test_weights_as_they_are_are_not_written_beside_a_quantised_configuration(
    kind: str, tmp_path: Path
) -> None:
    facts = BASES | {"quantization_config": METHODS["one block"][0]}
    base = a_base(kind, tmp_path, facts)
    text = "base.*: its quantization_config is fp8_block of 128 x 128, but .* is not quantised"
    with pytest.raises(wsync.LayoutError, match=text):
        written(tmp_path / "versions", base, None)
    codes = quantised(weights(1), "one block")
    with wsync.DiskSync(codes, folder=tmp_path / "codes", base=base) as sync:
        sync.update()
    assert json.loads((newest(tmp_path / "codes") / "config.json").read_text()) == facts
    assert written(tmp_path / "plain", Configuration(BASES), None) == BASES


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (96, 64), "b": (50, 80), "c": (1, 32)}
    found = {
        f"model.layers.0.mlp.{name}_proj.weight": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    return found | {"model.norm.weight": torch.randn(64, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["cut blocks", "per tensor", "packed"])
def test_one_process_with_every_dtype(method: str, dtype: torch.dtype) -> None:
    """Weights of the mapping are read anew, be they transposed."""
    given = weights(1, dtype)
    options = wsync.Options(quantise=METHODS[method][0], progress=False)
    engine = ProcessEngine(shapes_of(quantised(given, method)))
    try:
        with wsync.connect(given, [engine], options=options) as sync:
            assert sync.update().phases["quantise"] > 0
            assert differing(engine.weights(), quantised(given, method)) == []
            given |= weights(2, dtype)
            sync.update()
            assert differing(engine.weights(), quantised(given, method)) == []
    finally:
        engine.close()


@pytest.mark.parametrize("first", [True, False])
def test_updates_may_run_in_torchs_inference_mode_or_not(first: bool) -> None:
    """With a table of amaxes."""
    given = weights(1)
    options = wsync.Options(quantise=METHODS["per tensor"][0], progress=False)
    engine = ProcessEngine(shapes_of(quantised(given, "per tensor")))
    try:
        with wsync.connect(given, [engine], options=options) as sync:
            for seed, inference in enumerate((first, not first, first)):
                given |= weights(seed)
                with torch.inference_mode(inference):
                    sync.update()
                assert differing(engine.weights(), quantised(given, "per tensor")) == []
    finally:
        engine.close()


def test_a_report_says_what_was_quantised() -> None:
    given = weights(1)
    nbytes = sum(w.nbytes for name, w in given.items() if name.endswith("_proj.weight"))
    options = wsync.Options(quantise=METHODS["cut blocks"][0], progress=False)
    engine = ProcessEngine(shapes_of(quantised(given, "cut blocks")))
    try:
        with wsync.connect(given, [engine], options=options) as sync:
            report = sync.update()
    finally:
        engine.close()
    assert (report.quantised_nbytes, report.repeated_nbytes) == (nbytes, 0)
    assert nbytes / 2 < report.image_nbytes < nbytes
    assert f"{nbytes:,} bytes of weights quantised (0 of them again" in str(report)
    assert report.metrics()["wsync/quantised_nbytes"] == nbytes
    assert "quantised" not in str(wsync.Report(version="1"))


class Buckets:
    """A stock engine that notes the names in each bucket."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def pause_generation(self) -> None: ...
    def continue_generation(self) -> None: ...
    def flush_cache(self) -> None: ...

    def update_weights_from_tensor(self, serialized_named_tensors: list[str], **_: Any) -> None:
        given = payload.load(base64.b64decode(serialized_named_tensors[0]))
        self.names.append({entry.name for entry in given["metadata"]})


@pytest.mark.parametrize("method", ["cut blocks", "int4"])
def test_a_part_of_a_model_is_sent_in_whole_pairs(method: str) -> None:
    """However small buckets are; and no update brings less than the first."""
    given = {name: weight for name, weight in weights(1).items() if "norm" not in name}
    made = quantised(given, method)
    engine = Buckets()
    options = wsync.Options(quantise=METHODS[method][0], progress=False, bucket_nbytes=1)
    with wsync.connect(given, [engine], options=options) as sync:
        sync.update()
        assert len(engine.names) > 1
        for names in engine.names:
            stems = {name.rpartition(".")[0] for name in names}
            assert names == {name for name in made if name.rpartition(".")[0] in stems}
        lacking = dict(list(given.items())[1:])
        with pytest.raises(wsync.LayoutError, match=f"^{next(iter(given))}: "):
            sync.update(lacking)


def test_a_transposed_weight_is_quantised_as_its_matrix() -> None:
    given = {"x_proj.weight": torch.randn(64, 96, dtype=torch.bfloat16).T}
    options = wsync.Options(quantise=METHODS["cut blocks"][0], progress=False)
    engine = ProcessEngine(shapes_of(quantised(given, "cut blocks")))
    try:
        with wsync.connect(given, [engine], options=options) as sync:
            sync.update()
            assert differing(engine.weights(), quantised(given, "cut blocks")) == []
    finally:
        engine.close()


def connect(given: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    wsync.connect(given, [], options=wsync.Options(quantise=config, progress=False)).close()


def test_what_cannot_be_quantised_is_named_before_anything_moves() -> None:
    given = {"x_proj.weight": torch.zeros(4, 40, dtype=torch.bfloat16)}
    with pytest.raises(wsync.UnsupportedError, match=r"x_proj.weight \(4, 40\): int4_slime"):
        connect(given, quantised_cases.groups(32))
    for dtype in (torch.int32, torch.float8_e4m3fn):
        given = {"x_proj.weight": torch.zeros(4, 32).to(dtype)}
        text = rf"^x_proj\.weight: its dtype is {str(dtype)[6:]}, but only float32, bfloat16 "
        with pytest.raises(wsync.UnsupportedError, match=text):
            connect(given, quantised_cases.PER_TENSOR)
