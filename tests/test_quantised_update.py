"""Updates of weights that are quantised on the way, against references in plain torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support import quantised_cases
from support.procs import RankError, Ranks
from support.quantised_cases import METHODS, differing, quantised, shapes_of
from support.tiny_qwen3 import dense, sparse

import wsync
from wsync.demo.engines.bare_engine import ProcessEngine
from wsync.demo.megatron_cpu import Parallel
from wsync.disk import newest
from wsync.trainer import quantised_image

CASES = {
    "tp2pp2": (dense(), Parallel(tp=2, pp=2), "auto"),
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


def test_an_update_that_fails_while_it_quantises_leaves_engines_as_they_were(ranks: Ranks) -> None:
    """They have not been paused, and go on with what they have."""
    found = ranks.run(quantised_cases.fail_once, dense(), Parallel(tp=2, pp=2), timeout=240)
    errors = {facts["error"] for facts in found}
    assert errors == {"RemoteError: trainer rank 1: ValueError: a planted failure"}
    for facts in found:
        assert facts["kept"] == facts["wrong"] == []
        assert facts["consistent"]
        assert not facts["paused"]


def test_a_rank_that_dies_while_it_quantises_is_reported_by_all_others(tmp_path: Path) -> None:
    with Ranks(4, path=sys.path) as ranks, pytest.raises(RankError):
        ranks.run(
            *(quantised_cases.die_once, dense(), Parallel(tp=2, pp=2), str(tmp_path)), timeout=120
        )
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert sorted(texts) == ["rank0", "rank1", "rank3"]
    assert len(set(texts.values())) == 1
    assert next(iter(texts.values())).startswith("PeerClosedError: trainer rank ")


def test_memory_that_is_not_there_is_named(tmp_path: Path) -> None:
    def none(nbytes: int, *_: object) -> None:
        raise wsync.NoMemoryError(f"Memory: {nbytes} bytes are not there")

    given = weights(1)
    options = wsync.Options(quantise=METHODS["cut blocks"][0], progress=False)
    with wsync.DiskSync(given, folder=tmp_path, options=options) as sync:
        with mock.patch.object(quantised_image._core, "Memory", none):
            text = r"\d+ bytes for codes and scales: Memory: \d+ bytes are not there"
            with pytest.raises(wsync.NoMemoryError, match=text):
                sync.update()
        sync.update()


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
    assert found == BASES | {"quantization_config": config}
    selected = config | {"select": "lists"}
    again = written(tmp_path / "versions", a_base(kind, tmp_path / "x", BASES), selected)
    assert again == found
    again = written(tmp_path / "versions", Configuration(found), config)
    assert again == found


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


def test_other_arithmetic_of_one_method_is_no_other_method(tmp_path: Path) -> None:
    facts = BASES | {"quantization_config": METHODS["int4"][0] | {"producer": "other"}}
    assert written(tmp_path / "versions", Configuration(facts), METHODS["int4"][0]) == facts


def test_versions_without_a_base_have_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        written(tmp_path, None, METHODS["cut blocks"][0])


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (96, 64), "b": (50, 80), "c": (1, 32)}
    found = {
        f"model.layers.0.mlp.{name}_proj.weight": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    return found | {"model.norm.weight": torch.randn(64, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["cut blocks", "per tensor"])
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


def test_a_tensor_without_elements_may_come_last() -> None:
    given = weights(1) | {"model.empty": torch.zeros(0, 4)}
    options = wsync.Options(quantise=METHODS["cut blocks"][0], progress=False)
    expected = quantised(given, "cut blocks")
    engine = ProcessEngine(shapes_of(expected))
    try:
        with wsync.connect(given, [engine], options=options) as sync:
            sync.update()
            assert differing(engine.weights(), expected) == []
    finally:
        engine.close()


def connect(given: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    wsync.connect(given, [], options=wsync.Options(quantise=config, progress=False)).close()


def test_what_cannot_be_quantised_is_named_before_anything_moves() -> None:
    given = {"x_proj.weight": torch.zeros(4, 40, dtype=torch.bfloat16)}
    with pytest.raises(wsync.UnsupportedError, match=r"x_proj.weight \(4, 40\): int4_slime"):
        connect(given, quantised_cases.groups(32))
    given = {"x_proj.weight": torch.zeros(4, 32, dtype=torch.int32)}
    with pytest.raises(wsync.UnsupportedError, match=r"x_proj.weight .*it is int32"):
        connect(given, quantised_cases.PER_TENSOR)
