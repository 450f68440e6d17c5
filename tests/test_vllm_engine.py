"""vLLM's own workers and model classes, in processes of their own, updated by a trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.metadata
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.fronts import served
from support.vllm_engine import VllmEngine
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import inspection
from wsync.disk import DiskSync
from wsync.handles.vllm import VllmHandle
from wsync.module_tensors import same_bytes
from wsync.vllm import WorkerExtension, register

OPTIONS = wsync.Options(deadline=30, progress=False, round_nbytes=1 << 15, ring_nbytes=1 << 16)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    made = VllmEngine()
    yield made
    made.close()


def test_every_worker_holds_what_its_own_loading_gives(engine: VllmEngine) -> None:
    """Other families: test_learnt_models; FP8: test_quantised_engines."""
    engine.prepare("qwen3_moe", ep=2)
    check_two_updates(engine)
    experts = [
        {tensor["name"] for tensor in worker["tensors"] if ".mlp.experts." in tensor["name"]}
        for worker in inspection.look(engine).workers
    ]
    assert experts[0] and experts[1]
    assert experts[0].isdisjoint(experts[1])


def check_two_updates(engine: VllmEngine) -> None:
    """Workers hold what their own loading gives, where it was, and got what they keep, once."""
    places = engine.collective_rpc("places")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            report = sync.update(engine.weights(seed), version=seed)
            assert report.redundancy == 1.0
            assert report.delivered_nbytes < 2 * report.model_nbytes
        assert sync.verify(engine.weights(2))
        assert not sync.verify(engine.weights(1))
        assert engine.collective_rpc("reasons") == [["", ""]] * len(engine.processes)
        assert not any(engine.differing(2))
        kept = inspection.look(engine).workers
        assert sum(worker["kept_nbytes"] for worker in kept) == report.delivered_nbytes
    # where CUDA graphs would look for them
    assert engine.collective_rpc("places") == places
    assert wsync.handle(engine).model_info(5)["weight_version"] == "2"
    steps = [("sleep", 0, "abort"), ("reset_prefix_cache", False), ("wake_up", ["scheduling"])]
    looks = [("sleep", 0, "keep"), steps[-1]]
    assert engine.calls == [*steps, *steps, *looks, *looks]


def test_a_remote_engine_is_sent_what_its_workers_keep(engine: VllmEngine) -> None:
    """Each worker is a rank of the exchange."""
    options = dataclasses.replace(OPTIONS, delivery="distributed")
    engine.prepare("qwen3_moe", ep=2)
    places = engine.collective_rpc("places")
    with wsync.connect(engine.weights(0), engines=[engine], options=options) as sync:
        report = sync.update(engine.weights(1), version=1)
        assert (report.workers, report.redundancy) == (2, 1.0)
        assert report.delivered_nbytes < 2 * report.model_nbytes
        assert engine.differing(1) == [[], []]
        sync.update(engine.weights(2), version=2)
    assert engine.differing(2) == [[], []]
    assert engine.collective_rpc("places") == places
    assert wsync.handle(engine).model_info(5)["weight_version"] == "2"
    assert [worker["consistent"] for worker in inspection.look(engine).workers] == [True, True]


def test_its_workers_fill_another_engine(engine: VllmEngine) -> None:
    engine.prepare("qwen3_moe", ep=2)
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(engine.weights(1), version="first")
    with ProcessEngine(engine.checkpoint) as joiner, served(joiner) as front:
        wsync.copy_weights(engine, front.url, options=OPTIONS)
        found, wanted = joiner.weights(), engine.weights(1)
        assert found.keys() == wanted.keys()
        assert [name for name in found if not same_bytes(found[name], wanted[name])] == []
        assert joiner.weight_version == "first"
        engine.prepare("qwen3", shuffled="model.layers.1.mlp.down_proj")
        with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
            sync.update()
        text = "load_weights gets all tensors, by vLLM's layerwise reload: model.layers.1.mlp.down"
        with pytest.raises(wsync.StateError, match=re.escape(text)):
            wsync.copy_weights(engine, front.url, options=OPTIONS)


def test_what_is_shuffled_after_loading_goes_through_vllms_own_reload(engine: VllmEngine) -> None:
    path = "model.layers.1.mlp.down_proj"
    engine.prepare("qwen3", shuffled=path)
    places = engine.collective_rpc("places")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            report = sync.update(engine.weights(seed))
        assert report.delivered_nbytes == 2 * report.model_nbytes
        assert engine.differing(2) == [[], []]
        # a failure leaves nothing behind that the next update would find
        engine.collective_rpc("set_fault", args=(1,))
        with pytest.raises(wsync.RemoteError, match="half way"):
            sync.update(engine.weights(3))
        engine.collective_rpc("set_fault", args=(0,))
        sync.update(engine.weights(4))
    assert engine.differing(4) == [[], []]
    reason = f"{path}.weight is changed by process_weights_after_loading"
    assert [said for said, _ in engine.collective_rpc("reasons")] == [reason] * 2
    for now, then in zip(engine.collective_rpc("places"), places, strict=True):
        # vLLM makes the host's copies of its scales anew
        assert {path for path in then if now[path] != then[path]} <= {
            path for path in then if path.endswith("_scale_cpu")
        }


@pytest.mark.parametrize("shuffled", ["", "model.layers.0.mlp.gate_up_proj"])
def test_a_models_own_hook_runs_once_an_update_on_the_new_weights(
    engine: VllmEngine, shuffled: str
) -> None:
    engine.prepare("qwen3", shuffled=shuffled, derives="keeps")
    places = [worker["derived"] for worker in engine.collective_rpc("places")]
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(engine.weights(1))
        calls = engine.collective_rpc("derivations")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        sync.update(engine.weights(2))  # of what is known
    assert engine.differing(2) == [[], []]
    assert engine.collective_rpc("derivations") == [count + 1 for count in calls]
    assert [bool(said) for said, _ in engine.collective_rpc("reasons")] == [bool(shuffled)] * 2
    assert [worker["derived"] for worker in engine.collective_rpc("places")] == places


def test_a_layer_that_is_processed_once_is_named(engine: VllmEngine) -> None:
    engine.prepare("qwen3")
    mlp = "model.layers.0.mlp"  # has the flag, too, as all that contain such a layer
    assert engine.collective_rpc("rewritten", args=(mlp,)) == ["", ""]
    said, _ = engine.collective_rpc("rewritten", args=(f"{mlp}.down_proj",))
    assert said.startswith(f"{mlp}.down_proj: ") and said.endswith("its weights only once")


def test_a_reload_needs_one_of_the_names_of_a_tied_head(engine: VllmEngine) -> None:
    engine.prepare(
        "qwen3", changes={"tie_word_embeddings": True}, shuffled="model.layers.0.self_attn.o_proj"
    )
    weights = engine.weights(1)
    assert "lm_head.weight" not in weights
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update()
        assert not any(engine.differing(1))
        del weights["model.embed_tokens.weight"]
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=r"nothing for .*model\.embed_tokens\.weight"):
            sync.update()


def test_a_reload_refuses_names_that_the_model_has_not_before_it_loses_weights(
    engine: VllmEngine,
) -> None:
    engine.prepare("glm4_moe", packs=True)
    weights = engine.weights(1)
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update(version=1)
    more = weights | {"model.layers.0.mlp.router.weight": torch.zeros(2, 2)}
    with wsync.connect(more, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=r"does not take .*layers\.0\.mlp\.router"):
            sync.update(version=2)
    assert not any(engine.differing(1))
    assert wsync.handle(engine).model_info(5)["weight_version"] == "1"


def test_a_reload_refuses_shapes_that_its_checkpoint_does_not_have(engine: VllmEngine) -> None:
    """vLLM's weight_loaders take the part of a tensor that there is room for."""
    engine.prepare("glm4_moe", packs=True)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = engine.weights(1)
    wider = weights | {name: torch.cat([weights[name], weights[name]])}
    for folder in engine.collective_rpc("folder"):
        save_file(weights, Path(folder, "model.safetensors"))
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        sync.update(version=1)
    with wsync.connect(wider, engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=rf"{name} \(256, 64\) is larger than \(128, "):
            sync.update(version=2)
    assert not any(engine.differing(1))
    assert wsync.handle(engine).model_info(5)["weight_version"] == "1"


def test_what_a_reload_would_leave_as_it_is_is_refused_by_name(engine: VllmEngine) -> None:
    """vLLM counts what is loaded by parameters' weight_loaders."""
    engine.prepare("qwen3", shuffled="model.layers.0.self_attn.o_proj", past="model.norm.weight")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=r"model\.norm\.weight: .* would not load it"):
            sync.update(engine.weights(1))


def test_weights_that_a_models_own_hook_drops_are_refused_by_name(engine: VllmEngine) -> None:
    """As experts of native mega-MoE kernels: vLLM's reload would drop the new ones."""
    engine.prepare("qwen3", derives="drops")
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.RemoteError, match=r"layernorm\.weight: .* has dropped it since"):
            sync.update(engine.weights(1))


def test_weights_that_vllm_packs_once_are_packed_again(engine: VllmEngine) -> None:
    engine.prepare("qwen3_moe", packs=True)
    with wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(engine.weights(seed))
            assert engine.differing(seed) == [[], []]
    said = {reason for reason, _ in engine.collective_rpc("reasons")}
    assert len(said) == 1 and "packs its weights only once" in said.pop()


@pytest.mark.slow
def test_convolutions_that_vllm_packs_are_new_where_they_are_read_unpacked() -> None:
    options = dataclasses.replace(OPTIONS, round_nbytes=1 << 17, ring_nbytes=1 << 18)
    engine = VllmEngine(tp=1)
    try:
        engine.prepare("nemotron_h", packs_convolutions=True)
        (places,) = engine.collective_rpc("places")
        with wsync.connect(engine.weights(0), engines=[engine], options=options) as sync:
            for seed in (1, 2):
                sync.update(engine.weights(seed))
                assert engine.differing(seed) == [[]]
        ((reason, _),) = engine.collective_rpc("reasons")
        assert "conv1d.weight" in reason
        (now,) = engine.collective_rpc("places")
        paths = [path for path in places if path.endswith(".conv_weights")]
        assert paths and all(now[path] == places[path] for path in paths)
    finally:
        engine.close()


def test_experts_that_vllm_moves_between_updates_are_refused(engine: VllmEngine) -> None:
    """Its load_weights goes by where they were when it started."""
    engine.prepare("qwen3_moe", ep=2, balanced=True)
    with pytest.raises(wsync.UnsupportedError, match=r"balances.*enable_eplb"):
        wsync.connect(engine.weights(0), engines=[engine], options=OPTIONS)
    assert engine.calls == []


class Calls:
    """An engine of one worker that only notes what it is asked."""

    def __init__(self, **facts: Any) -> None:
        told = {"rank": 0, "workers": 1, "engine": 0, "engines": 1}
        self.facts = {**told, "weight_version": "4", "instance": "a", **facts}
        self.seen: list[tuple[Any, ...]] = []
        self.llm_engine: Any = None

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method != "wsync_describe" or not args:
            self.seen.append((method, *args))
        return [json.dumps(self.facts)]


def worker_of(model: torch.nn.Module) -> Any:
    worker: Any = WorkerExtension()
    model.load_weights = lambda weights: None  # type: ignore[assignment]
    worker.rank, worker.device = 0, "cpu"
    worker.model_config = worker.vllm_config = None
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    names = ("size", "rank", "index")
    parallel = dict(zip((f"data_parallel_{name}" for name in names), (1, 0, 0), strict=True))
    worker.parallel_config = SimpleNamespace(world_size=1, **parallel)
    return worker


def test_each_engine_that_a_call_reaches_gets_messages_of_its_own() -> None:
    """In each of them, vLLM sets a dense model's data_parallel_size to 1."""
    calls: Any = Calls(engine=2)
    calls.engine_core = SimpleNamespace(engine_ranks_managed=[2, 3])  # as an AsyncLLM has it
    assert VllmHandle(calls).workers == 2
    calls.facts["alone"] = True
    assert VllmHandle(calls).workers == 1
    with pytest.raises(wsync.UnsupportedError, match="2 data-parallel engines of a model with exp"):
        VllmHandle(Calls(engines=2))
    worker = worker_of(torch.nn.Linear(2, 2))
    worker.parallel_config.data_parallel_index = 3
    with pytest.raises(wsync.RemoteError, match="worker 1: control message: Expecting property"):
        worker.wsync_update(["theirs", "{'mine'}"], None, 2)
    with pytest.raises(wsync.RemoteError, match="of engine 3 got none"):
        worker.wsync_update(["theirs"], None, 2)

    class Actor:  # does not tell how many there are, and answers for the first
        def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
            worker.wsync_describe(*args)
            return Calls(engine=2).collective_rpc(method)

    with pytest.raises(wsync.RemoteError, match="engine 3 shares its API with engine 2"):
        VllmHandle(Actor())
    assert worker.wsync_update(["{}"], None, 3)[0] is False
    worker.parallel_config.data_parallel_hybrid_lb = True
    with pytest.raises(wsync.UnsupportedError, match="how many engines one API reaches"):
        VllmHandle(Calls(**json.loads(worker.wsync_describe())))


def test_weights_that_an_update_has_left_half_way_have_no_version() -> None:
    worker = worker_of(torch.nn.Linear(2, 2))
    state = worker._wsync_receiver().state
    state.weight_version = "6"
    assert json.loads(worker.wsync_describe())["weight_version"] == "6"
    state.lose("update 7 is running")
    assert json.loads(worker.wsync_describe())["weight_version"] is None


def test_workers_of_two_versions_are_of_none() -> None:
    class Two(Calls):
        def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
            facts = {**self.facts, "workers": 2}
            return [json.dumps({**facts, "rank": n, "weight_version": str(n)}) for n in range(2)]

    assert VllmHandle(Two()).model_info(5) == {"weight_version": None, "instance": "a a"}


class AsyncCalls(Calls):
    """As AsyncLLM: coroutines, which belong to one loop."""

    loop: asyncio.AbstractEventLoop | None = None
    held = 1

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:  # type: ignore
        assert self.loop in (None, asyncio.get_running_loop())
        return super().collective_rpc(method, args)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.seen.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.seen.append(("resume",))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.held -= 1
        return self.held < 0

    async def reset_encoder_cache(self) -> None:
        self.seen.append(("encoder", self.held))


@pytest.mark.parametrize("driven", [False, True])
def test_coroutines_run_in_the_engines_loop(driven: bool) -> None:
    engine = AsyncCalls()
    if driven:
        loop = engine.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
    found = VllmHandle(engine, loop=engine.loop)
    found.pause("retract", 5)
    found.flush(5)
    found.resume(5)
    assert found.model_info(5) == {"weight_version": "4", "instance": "a"}
    assert ("pause", "keep", False) in engine.seen
    assert ("resume",) in engine.seen
    assert engine.held == -1
    if driven:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_engine_whose_memory_sleeps_goes_on_when_it_is_woken() -> None:
    """vLLM's scheduler must not run on a KV cache that is not there."""

    class Sleeping(AsyncCalls):
        answer: bool | None = False

        async def wake_up(self, tags: list[str] | None = None) -> bool | None:
            self.seen.append(("wake_up", *(tags or ())))
            return self.answer

    engine = Sleeping()
    VllmHandle(engine).resume(5)
    assert engine.seen[1:] == [("wake_up", "scheduling")]
    engine.answer = None  # earlier versions do not know the tag
    VllmHandle(engine).resume(5)
    assert engine.seen[-2:] == [("wake_up", "scheduling"), ("resume",)]


def test_what_old_weights_computed_is_dropped_wherever_it_lies() -> None:
    class Connected(AsyncCalls):
        async def reset_prefix_cache(
            self, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> bool:
            self.seen.append(("prefix", reset_connector))
            return await super().reset_prefix_cache(reset_running_requests)

    engine = Connected(kv_connector=True, multimodal=True)
    VllmHandle(engine).flush(60)
    assert engine.seen[1:] == [("prefix", True), ("prefix", True), ("encoder", -1)]
    alone = Connected()
    handle = VllmHandle(alone)
    handle.flush(60)
    assert alone.seen[1:] == [("prefix", False), ("prefix", False)]
    during = handle.during()
    alone.facts["kv_connector"] = True  # it was started again
    handle.look_anew(60)
    during.flush(60)
    assert alone.seen[-1] == ("prefix", True)
    llm = Calls(multimodal=True)
    llm.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: llm.seen.append(("encoder",)))
    VllmHandle(llm).flush(60)
    assert llm.seen[1:] == [("encoder",)]


@pytest.mark.parametrize(
    "options",
    [{"delivery": "stock"}, {"delivery": "distributed", "broadcast": "bucket"}],
    ids=["buckets", "broadcasts"],
)
def test_what_takes_control_messages_alone_is_refused_before_it_is_paused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    engine, weights = Calls(), {"w": torch.ones(2)}
    text = r"like vLLM, .* only through wsync's receiver, not by (flattened|broadcasts)"
    with pytest.raises(wsync.UnsupportedError, match=text):
        wsync.connect(weights, [engine], options=dataclasses.replace(OPTIONS, **options))
    with pytest.raises(wsync.UnsupportedError, match="has no update_weights_from_disk"):
        DiskSync(weights, [engine], folder=tmp_path / "weights")
    assert {method for method, *_ in engine.seen} == {"wsync_describe"}


def test_a_prefix_cache_that_cannot_be_dropped_is_no_success() -> None:
    engine = VllmHandle(Calls(prefix_cache=True))
    with pytest.raises(wsync.UnsupportedError, match=r"has no reset_prefix_cache.*flush_cache"):
        engine.flush(60)
    VllmHandle(Calls(prefix_cache=False)).flush(60)


def test_workers_say_what_their_engine_keeps_beside_weights(engine: VllmEngine) -> None:
    engine.prepare("qwen3")
    plain = json.loads(engine.collective_rpc("wsync_describe")[0])
    kept = ("prefix_cache", "kv_connector", "multimodal")
    assert [plain[name] for name in kept] == [True, False, False]
    worker = worker_of(torch.nn.Linear(2, 2))
    worker.vllm_config = SimpleNamespace(kv_transfer_config=object())
    worker.model_config = SimpleNamespace(is_multimodal_model=True)
    found = json.loads(worker.wsync_describe())
    assert [found[name] for name in kept] == [False, True, True]


@pytest.mark.parametrize(("method", "said"), [("mtp", True), ("eagle3", False), (None, False)])
def test_a_trainer_is_told_of_layers_that_draft(
    caplog: pytest.LogCaptureFixture, method: str | None, said: bool
) -> None:
    worker = worker_of(torch.nn.Linear(2, 2))
    worker.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
    VllmHandle(Calls(**json.loads(worker.wsync_describe())))
    assert ("Calls object: updates do not change the layers of its model" in caplog.text) == said


def test_an_engine_without_the_extension_is_told_how_to_start() -> None:
    class Plain:
        def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
            raise AttributeError(f"'Worker' object has no attribute {method!r}")

    with pytest.raises(wsync.RemoteError, match=r"worker-extension-cls wsync\.vllm"):
        wsync.handle(Plain())


def test_wsync_is_a_plugin_of_vllm(engine: VllmEngine) -> None:
    """Which vLLM finds, and which does nothing where there is no vLLM."""
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="wsync")
    assert found.load() is register
    register()
    assert engine.collective_rpc("backends") == [["WorkerEngine", "TrainerEngine"]] * 2
