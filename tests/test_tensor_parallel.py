"""Tensor-parallel workers: their boxes, and logits against transformers."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from wsync import Options
from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    LayoutError,
    PeerClosedError,
    ProtocolError,
    RemoteError,
    StateError,
    UnsupportedError,
)
from wsync.bucket import FlattenedTensorBucket
from wsync.demo.engines.tensor_parallel_engine import TensorParallelEngine
from wsync.demo.engines.tensor_parallel_model import ShardedModel
from wsync.disk import DiskSync, newest
from wsync.handles.base import EngineHandle, handle
from wsync.messages import payload
from wsync.messages.control import Control

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=8, tie_word_embeddings=False),
}
PROMPT = [3, 100, 7, 55, 0, 12]


def reference(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # not all zeros and ones
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def buckets(weights: dict[str, torch.Tensor], workers: int) -> list[bytes]:
    flat = FlattenedTensorBucket(named_tensors=list(weights.items()))
    return [payload.bucket(flat, by_value=True)] * workers


def load(engine: TensorParallelEngine, weights: dict[str, torch.Tensor]) -> None:
    engine.update_weights(
        buckets(weights, engine.workers),
        load_format="flattened_bucket",
        weight_version=1,
        timeout=30,
    )


# --- one worker's share, without processes --------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_one_workers_logits_are_transformers_logits(family: str) -> None:
    model = reference(CONFIGS[family])
    worker = ShardedModel(CONFIGS[family])
    worker.load_weights(weights_of(model).items())
    torch.testing.assert_close(worker.logits(PROMPT), logits_of(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_workers_boxes_cover_the_model(family: str, tp: int, experts: str) -> None:
    """Every element is on a worker, and every worker holds the elements its layout says."""
    config = CONFIGS[family]
    weights = weights_of(reference(config))
    held = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in weights.items()}
    for rank in range(tp):
        worker = ShardedModel(config, rank=rank, tp=tp, experts=experts)
        worker.load_weights(weights.items())
        layout = worker.layout()
        buffers = list(worker.tensors.values())
        assert layout.shard_count == len(worker.boxes)
        for index in range(layout.tensor_count):
            name, dtype, shape, _ = layout.tensor(index)
            assert (dtype, shape) == ("float32", tuple(weights[name].shape))
            for _, buffer, offset, start, extent, strides, _ in layout.shards(index):
                box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
                found = torch.as_strided(
                    buffers[buffer], extent, [stride // 4 for stride in strides], offset // 4
                )
                assert torch.equal(found, weights[name][box]), name
                held[name][box] += 1
    assert all((count > 0).all() for count in held.values())
    replicas = max(1, tp // config.num_key_value_heads)
    assert {int(n) for n in held["model.layers.0.self_attn.k_proj.weight"].unique()} == {replicas}
    assert {int(n) for n in held["model.layers.0.self_attn.q_proj.weight"].unique()} == {1}


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("model.norm.weight", torch.ones(1), r"shape \(1,\) delivered, \(32,\) in"),
        ("model.norm.weight", torch.ones(32, dtype=torch.complex64), "complex64 delivered"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_written(
    name: str, given: torch.Tensor, text: str
) -> None:
    worker = ShardedModel(CONFIGS["qwen3"])
    before = {key: tensor.clone() for key, tensor in worker.tensors.items()}
    first = ("model.layers.0.input_layernorm.weight", torch.full((32,), 7.0))
    with pytest.raises((LayoutError, ProtocolError), match=f"{name}.*{text}"):
        worker.load_weights([first, (name, given)])
    assert all(torch.equal(tensor, before[key]) for key, tensor in worker.tensors.items())


def test_vocabulary_padding_is_zero_and_no_part_of_the_layout() -> None:
    worker = ShardedModel(CONFIGS["qwen3"], rank=1, tp=2)
    table = worker.tensors["model.embed_tokens.weight"]
    assert table.shape == (64, 32)  # 101 rows padded to 128
    assert table[: 101 - 64].all() and not table[101 - 64 :].any()
    layout = worker.layout()
    (shard,) = layout.shards(layout.find("model.embed_tokens.weight"))
    assert (shard[3], shard[4]) == ((64, 0), (37, 32))


@pytest.mark.parametrize(
    ("changes", "options", "kind", "text"),
    [
        ({}, {"rank": 0, "tp": 3}, InvalidArgumentError, "num_attention_heads 4 .* 3 workers"),
        ({"intermediate_size": 50}, {"tp": 4}, LayoutError, "gate_up_proj.*: .* 50 .* 4 ranks"),
        ({"num_key_value_heads": 4}, {"rank": 2, "tp": 2}, InvalidArgumentError, "rank 2 of 2"),
        ({}, {"experts": "dp"}, InvalidArgumentError, "experts 'dp'"),
        ({"hidden_act": "gelu"}, {}, UnsupportedError, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, UnsupportedError, "rope"),
    ],
)
def test_what_cannot_be_cut_or_computed_is_refused(
    changes: dict[str, Any], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    config = Qwen3Config(**{**SIZES, **changes})
    with pytest.raises(kind, match=text):
        ShardedModel(config, **options)


def test_a_stranger_among_the_weights_is_named() -> None:
    with pytest.raises(LayoutError, match="nobody: not in qwen3"):
        ShardedModel(CONFIGS["qwen3"]).load_weights([("nobody", torch.ones(1))])


# --- real processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[TensorParallelEngine]:
    with TensorParallelEngine(CONFIGS["qwen3_moe"], tp=2, experts="ep", name="tiny") as running:
        yield running


def test_two_workers_give_transformers_logits(engine: TensorParallelEngine) -> None:
    model = reference(CONFIGS["qwen3_moe"], seed=1)
    before = engine.logits(PROMPT)
    load(engine, weights_of(model))
    expected = logits_of(model)
    assert not torch.allclose(before, expected, atol=1e-3)
    torch.testing.assert_close(engine.logits(PROMPT), expected, rtol=0, atol=1e-5)
    found = engine.weights()
    assert found.keys() == weights_of(model).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(model).items())
    prompt = torch.tensor([PROMPT])
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # or the token 0 is taken for padding
        do_sample=False,
        max_new_tokens=5,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = generated[0, len(PROMPT) :].tolist()
    assert engine.generate(PROMPT, max_new_tokens=5) == tokens


def test_the_engine_is_its_own_handle(engine: TensorParallelEngine) -> None:
    assert isinstance(engine, EngineHandle)
    assert handle(engine) is engine
    load(engine, weights_of(reference(CONFIGS["qwen3_moe"])))
    info = engine.model_info(10)
    assert (info["weight_version"], info["tp_size"], info["consistent"]) == ("1", 2, True)
    engine.pause("abort", 10)
    with pytest.raises(StateError, match="engine tiny: generation is paused"):
        engine.generate(PROMPT)
    engine.flush(10)
    engine.resume(10)
    assert len(engine.generate(PROMPT, max_new_tokens=2)) == 2


def test_a_refused_update_names_engine_and_worker_and_keeps_the_version(
    engine: TensorParallelEngine,
) -> None:
    version = engine.model_info(10)["weight_version"]
    wrong = {"model.norm.weight": torch.ones(33)}
    engine.pause("abort", 10)
    with pytest.raises(RemoteError, match=r"engine tiny: update: .*model.norm.weight: shape"):
        engine.update_weights(
            buckets(wrong, 2), load_format="flattened_bucket", weight_version="x", timeout=30
        )
    with pytest.raises(RemoteError, match="not a control message"):
        engine.update_weights(
            buckets(wrong, 2),
            load_format="wsync.sglang.load_weights",
            weight_version="x",
            timeout=30,
        )
    with pytest.raises(InvalidArgumentError, match="1 payloads for 2 workers"):
        engine.update_weights([b""], load_format=None, weight_version="x", timeout=30)
    assert engine.model_info(10)["weight_version"] == version
    load(engine, weights_of(reference(CONFIGS["qwen3_moe"])))
    engine.resume(10)


def test_logits_are_never_of_a_bucket_that_comes_meanwhile(
    engine: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(reference(CONFIGS["qwen3_moe"]))
    load(engine, weights)
    whole = engine.logits(PROMPT)
    engine.pause("abort", 10)
    part = {"model.norm.weight": torch.zeros(32)}
    told = {"load_format": "flattened_bucket", "weight_version": None, "timeout": 60}
    comes = threading.Thread(
        target=engine.update_weights, args=(buckets(part, 2),), kwargs=told, daemon=True
    )
    look = engine._check_consistent

    def look_first(timeout: float) -> None:
        look(timeout)
        comes.start()
        comes.join(0.5)  # it has come, or waits

    with monkeypatch.context() as planted:
        planted.setattr(engine, "_check_consistent", look_first)
        assert torch.equal(engine.logits(PROMPT), whole)
    comes.join(60)
    assert not engine.model_info(10)["consistent"]
    load(engine, weights)
    engine.resume(10)


def test_workers_load_the_folder_that_a_link_named_when_it_was_given(
    engine: TensorParallelEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come one after the other, and the link may move between two."""
    old, new = (weights_of(reference(CONFIGS["qwen3_moe"], seed)) for seed in (1, 2))
    for name, weights in (("old", old), ("new", new)):
        with DiskSync(weights, folder=tmp_path / name, options=Options(progress=False)) as sync:
            sync.update()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "old" / "latest")
    ask = engine._call

    def moves(what: str, *more: Any) -> Any:
        if what == "disk":
            link.unlink()
            link.symlink_to(tmp_path / "new" / "latest")
        return ask(what, *more)

    with monkeypatch.context() as planted:
        planted.setattr(engine, "_call", moves)
        engine.update_weights_from_disk(str(link), weight_version="old", timeout=30)
    found = engine.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in old.items())


def test_workers_do_not_load_two_checkpoints_that_follow_each_other_in_one_folder(
    engine: TensorParallelEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker may come to the old files and another to the new ones."""
    config = CONFIGS["qwen3_moe"]
    for name, seed in (("old", 1), ("new", 2)):
        reference(config, seed).save_pretrained(tmp_path / name)
    path = tmp_path / "old" / "model.safetensors"
    ask = engine._call

    def saves(what: str, arguments: Any, timeout: float) -> Any:
        if what == "update_weights_from_disk":
            (tmp_path / "new" / path.name).replace(path)
        return ask(what, arguments, timeout)

    with monkeypatch.context() as planted:
        planted.setattr(engine, "_call", saves)
        with pytest.raises(RemoteError, match=r"old: was changed while workers came to read it"):
            engine.update_weights_from_disk(str(tmp_path / "old"), weight_version=9, timeout=60)
    engine.update_weights_from_disk(str(tmp_path / "old"), weight_version=9, timeout=60)
    found = engine.weights()
    wanted = weights_of(reference(config, 2))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_stalled_worker_costs_the_deadline_and_a_dead_one_is_named() -> None:
    with TensorParallelEngine(CONFIGS["qwen3"], tp=2, name="frail") as frail:
        os.kill(frail.pids[1], signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"engine frail: state: worker 1: .*0\.3 s"):
            frail.model_info(0.3)
        os.kill(frail.pids[1], signal.SIGCONT)
        assert frail.model_info(30)["consistent"]  # the late answer is not taken for this one
        os.kill(frail.pids[1], signal.SIGKILL)
        with pytest.raises(PeerClosedError, match=r"engine frail: .*worker 1 ended with -9"):
            frail.flush(30)


def test_a_worker_that_does_not_get_to_a_checkpoint_leaves_an_inconsistent_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host where the folder is not mounted: nothing was touched there, all elsewhere."""
    old, new = (weights_of(reference(CONFIGS["qwen3"], seed)) for seed in (1, 2))
    for name, weights in (("old", old), ("new", new)):
        with DiskSync(weights, folder=tmp_path / name, options=Options(progress=False)) as sync:
            sync.update()
    with TensorParallelEngine(CONFIGS["qwen3"], tp=2, name="split") as split:

        def take(folder: str) -> None:
            path = str(newest(tmp_path / folder))
            split.update_weights_from_disk(path, weight_version=folder, timeout=30)

        take("old")
        split.pause("abort", 10)
        ask = split._call

        def unmounted(what: str, arguments: Any, timeout: float) -> Any:
            if what == "update_weights_from_disk":
                arguments = [arguments[0], {**arguments[1], "model_path": "/nowhere"}]
            return ask(what, arguments, timeout)

        with monkeypatch.context() as planted:
            planted.setattr(split, "_call", unmounted)
            with pytest.raises(RemoteError, match="/nowhere"):
                take("new")
        info = split.model_info(10)
        assert (info["weight_version"], info["consistent"]) == ("old", False)
        why = "engine split: the weights are inconsistent: worker 1 has older ones"
        for go_on in (lambda: split.resume(10), lambda: split.logits(PROMPT)):
            with pytest.raises(RemoteError, match=why):
                go_on()
        take("new")
        split.resume(10)
        found = split.weights()
        assert all(torch.equal(found[name], tensor) for name, tensor in new.items())


def test_a_request_that_is_not_for_all_workers_alike_changes_nothing() -> None:
    """Two updates in one request; a worker that is not there when it comes."""
    weights = weights_of(reference(CONFIGS["qwen3"], 1))
    with TensorParallelEngine(CONFIGS["qwen3"], tp=2, name="split") as split:
        load(split, weights_of(reference(CONFIGS["qwen3"], 2)))
        before = split.weights()
        opening: dict[str, Any] = {"op": "open", "session": "a", "deadline": 5.0}
        opening["address"] = "0" * 32 + "@/tmp/s"
        two = [Control(update=number, **opening).to_bytes() for number in (1, 2)]
        with pytest.raises(ProtocolError, match="open of update 1 for worker 0, open of update 2"):
            split.update_weights(
                [payload.control(each) for each in two],
                load_format="wsync.sglang.load_weights",
                weight_version=None,
                timeout=30,
            )
        os.kill(split.pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match="worker 1: no answer"):
                split.update_weights(
                    buckets(weights, 2),
                    load_format="flattened_bucket",
                    weight_version="x",
                    timeout=0.5,
                )
        finally:
            os.kill(split.pids[1], signal.SIGCONT)
        info = split.model_info(30)
        assert (info["consistent"], info["weight_version"]) == (True, "1")
        now = split.weights()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
