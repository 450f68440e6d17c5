"""SGLang's own WeightUpdater hands wsync's loader what a trainer sends, in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines import NEWEST
from support.sglang_processes import SglangProcesses

import wsync
from wsync import inspection

VERSIONS = [pytest.param("0.5.17", marks=pytest.mark.slow), NEWEST]
OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=1 << 15, ring_nbytes=1 << 16)


@pytest.fixture(scope="module", params=VERSIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[SglangProcesses]:
    made = SglangProcesses(request.param)
    yield made
    made.close()


def test_every_worker_holds_what_its_own_loading_gives(engine: SglangProcesses) -> None:
    """Other families: test_learnt_models."""
    engine.prepare("qwen3_moe", ep=2)
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            report = sync.update(engine.weights(seed), version=seed)
            assert sync.verify(engine.weights(seed))
            assert engine.is_loaded(seed)
        assert len(sync.verify(engine.weights(1)).workers[1]["different"]) > 20
    assert engine.ask("reason") == ["", ""]
    assert report.redundancy == 1.0
    assert report.delivered_nbytes < 1.2 * report.model_nbytes
    assert (engine.version, engine.paused) == ("2", False)


def test_a_loader_fault_leaves_the_server_alive(engine: SglangProcesses) -> None:
    engine.prepare("qwen3")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        engine.ask("set_fault", 3)
        with pytest.raises(wsync.RemoteError, match=r"worker [01] .*KeyError: 'half way'"):
            sync.update(engine.weights(1), version=1)
        assert [process.poll() for process in engine.processes] == [None, None]
        assert (engine.version, engine.paused) == (None, True)
        engine.ask("set_fault", 0)
        for seed in (2, 3):
            assert sync.update(engine.weights(seed), version=seed).redundancy == 1.0
            assert engine.is_loaded(seed)
    assert (engine.version, engine.paused) == ("3", False)


def started(drafts: int) -> dict[str, object]:
    steps = {"enable_multi_layer_eagle": drafts > 1, "speculative_num_steps": drafts}
    return {"speculative_algorithm": "EAGLE", **steps}


@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_with_the_models_layers_are_updated_with_it(
    engine: SglangProcesses, drafts: int
) -> None:
    engine.prepare("glm4_moe", drafts=drafts)
    engine.started = started(drafts)
    without = {name: t for name, t in engine.weights(4).items() if ".layers.2." not in name}
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2, 3):
            report = sync.update(engine.weights(seed), version=seed)
            assert engine.is_loaded(seed)
            assert (report.redundancy, report.unused) == (1.0, ())
    with wsync.connect(without, engines=[engine], options=OPTIONS) as sync:
        sync.update()
    assert not any(path.startswith("0.") for path in engine.differing(4)[0])
    assert not any(path.startswith("1.model.eh_proj") for path in engine.differing(3)[0])
    engine.started = started(3)
    with wsync.connect(engine.weights(5), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=f"3 by the engine.* gives weights to {drafts}"):
            sync.update()


def test_a_draft_that_nobody_tells_of_stays_as_it_is(engine: SglangProcesses) -> None:
    engine.prepare("glm4_moe", drafts=1)
    before = engine.ask("found")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(engine.weights(5))
    for found, old in zip(engine.ask("found"), before, strict=True):
        kept = {path for path in found if path.endswith("weight") and found[path] == old[path]}
        own = {path for path in found if path.startswith("1.") and path.endswith("weight")}
        assert kept == own - {"1.lm_head.weight", "1.model.embed_tokens.weight"}


def test_weights_that_sglang_has_rewritten_are_refused(engine: SglangProcesses) -> None:
    """test_rewritten has all kinds."""
    engine.prepare("qwen3")
    engine.ask("transpose", "model.layers.0.mlp.down_proj")
    before = engine.ask("found")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match="UnquantizedLinearMethod has replaced it"):
            sync.update(engine.weights(1))
    assert engine.ask("found") == before
    said = [(each["worker"], each["consistent"]) for each in inspection.look(engine).workers]
    assert said == [(0, True), (1, True)]
    assert [process.poll() for process in engine.processes] == [None, None]
