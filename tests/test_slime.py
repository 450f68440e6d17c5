"""`--custom-megatron-init-path wsync.slime.install`, with a stand-in for slime's actor module."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ray_double, slime_cases, slime_double
from support.local_servers import Packing
from support.procs import Ranks
from support.quantised_cases import METHODS
from support.ray_double import Actor
from support.tiny_qwen3 import draw, in_server, sums

import wsync
from wsync.handles.base import handle
from wsync.layout import from_tensors
from wsync.slime import install


class Served:
    """slime's actor beside a server."""

    def __init__(self, url: str) -> None:
        self.get_url = lambda: url

    def update_weights_from_tensor(self, serialized_named_tensors: Any, **more: Any) -> None:
        raise AssertionError("weights went through the actor")


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    ray_double.install(monkeypatch)
    monkeypatch.setenv("WSYNC_OPTIONS", '{"deadline": 60, "progress": false}')
    return slime_double.install(monkeypatch)


def arguments(weights: Any, **more: Any) -> SimpleNamespace:
    told = {
        "custom_megatron_init_path": install,
        "update_weight_mode": "full",
        "update_weight_transport": "nccl",
        "update_weight_disk_dir": None,
        "update_weight_start_version": 4,
        "colocate": True,
        "rank": 0,
        "rollout_num_gpus_per_engine": 1,
        "weights": weights,
        "model": from_tensors(weights),
        "model_name": "qwen3config",
        "quantization_config": None,
        "hf_checkpoint": "",
        "custom_update_weight_post_write_path": None,
    }
    return SimpleNamespace(**{**told, **more})


def started(slime: Any, weights: Any, **more: Any) -> Any:
    """A train actor's updater, as it has chosen it."""
    actor = slime.MegatronTrainRayActor()
    actor.init(arguments(weights, **more), "actor")
    return actor.weight_updater


def test_slimes_actor_updates_a_server_by_wsyncs_receiver(
    slime: Any, server: str, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    weights = draw(config, 1)
    chosen = started(slime, weights)
    for number in (5, 6):
        weights.update(draw(config, number))
        if number == 5:
            chosen.connect_rollout_engines(
                [Actor(Served(server))],
                None,
                engine_gpu_counts=[1],
                engine_gpu_offsets=[0],
                engine_parallel_configs=[{"tp_size": 1, "pp_size": 1}],
            )
        chosen.update_weights()
        assert chosen.weight_version == number
        assert handle(server).model_info(30)["weight_version"] == str(number)
        assert in_server(server) == sums(weights)
    metrics = chosen.pop_metrics()
    assert metrics["wsync/commit_seconds"] == metrics["perf/update_weights_commit_time"] > 0
    assert "perf/update_weights_time" not in metrics  # slime's own goes before it
    assert chosen.pop_metrics() == {} == chosen.update_weight_metrics
    assert hasattr(chosen, "disconnect_rollout_engines")
    chosen.disconnect_rollout_engines()
    way = f"{server} by wsync's receiver"
    said = [text for text in caplog.messages if text.startswith("wsync: ")]
    assert said[0] == f"wsync: UpdateWeightFromTensor: {way}"
    assert [text.split(": ")[1] for text in said[1:]] == ["version 5", "version 6"]
    assert all(text.endswith(f"; {way}") for text in said[1:])


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        ({}, wsync.UpdateWeightFromTensor),
        ({"colocate": False}, wsync.UpdateWeightFromDistributed),
        ({"update_weight_transport": "disk"}, wsync.UpdateWeightFromDisk),
    ],
)
def test_each_of_slimes_three_classes_is_replaced(
    slime: Any, tmp_path: Any, more: dict[str, Any], ours: type
) -> None:
    chosen = started(
        slime, {"w": torch.ones(2)}, update_weight_disk_dir=str(tmp_path / "versions"), **more
    )
    assert type(chosen._updater) is ours
    assert chosen.weight_version == 4


def test_servers_of_slime_repack_int4_around_an_update(slime: Any) -> None:
    weights = {"mlp.x_proj.weight": torch.ones(16, 64, dtype=torch.bfloat16)}
    chosen = started(slime, weights, quantization_config=METHODS["int4"][0])
    engine = Packing()
    chosen.connect_rollout_engines([Actor(engine)], None, engine_gpu_counts=[1])
    chosen.update_weights()
    assert type(chosen._updater) is wsync.UpdateWeightFromTensor
    assert engine.calls == ["restore", "load", "pack", "continue"]


class Failing(Packing):
    """Raises these errors, one in each of its first pauses."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = [*errors]

    def pause_generation(self) -> None:
        self.calls.append("pause")
        if self.errors:
            raise self.errors.pop(0)


def test_an_update_that_transport_has_failed_is_tried_once_more(
    slime: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def updated(*errors: Exception) -> tuple[Any, Failing]:
        chosen, engine = started(slime, {"w": torch.ones(2)}), Failing(*errors)
        chosen.connect_rollout_engines([engine], None, engine_gpu_counts=[1])
        return chosen, engine

    gone = ConnectionResetError("gone")
    chosen, engine = updated(gone)
    chosen.update_weights()
    assert engine.calls == ["pause", "continue", "pause", "load", "continue"]
    assert engine.version == str(chosen.weight_version) == "5"
    assert "an update has failed, and is tried once more: engine " in caplog.text

    chosen, engine = updated(gone, gone)
    with pytest.raises(wsync.PeerClosedError) as caught:
        chosen.update_weights()
    note = caught.value.__notes__[-1]
    assert note.startswith("This was attempt 2.  The first had failed: engine ")
    assert engine.calls == ["pause", "continue"] * 2

    chosen, engine = updated(ValueError("no such weight"))
    with pytest.raises(wsync.RemoteError, match="no such weight"):
        chosen.update_weights()
    assert engine.calls == ["pause", "continue"]

    monkeypatch.setenv("WSYNC_OPTIONS", '{"progress": false, "retry": false}')
    chosen, engine = updated(gone)
    with pytest.raises(wsync.PeerClosedError):
        chosen.update_weights()
    assert engine.calls == ["pause", "continue"]


def test_ranks_try_once_more_together_or_not_at_all() -> None:
    with Ranks(2, path=sys.path) as ranks:
        for facts in ranks.run(slime_cases.fail_once, False, timeout=240):
            assert facts == {"error": "", "version": 5}
        first, second = ranks.run(slime_cases.fail_once, True, timeout=240)
    assert first == {"error": "DeadlineError: rank 0 has missed the end", "version": 5}
    assert second == {"error": "", "version": 5}


def test_deltas_stay_slimes_own(slime: Any, caplog: pytest.LogCaptureFixture) -> None:
    chosen = started(slime, {"w": torch.ones(2)}, update_weight_mode="delta")
    assert type(chosen) is slime.UpdateWeightFromDiskDelta
    (text,) = caplog.messages
    assert text.startswith("wsync: slime's own updater for update_weight_mode 'delta' runs")


def test_what_wsync_cannot_deliver_goes_slimes_own_way(
    slime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = slime.UpdateWeightFromTensor
    model = [torch.nn.Linear(2, 2)]
    chosen = started(slime, {"w": torch.ones(2)}, model=model, model_name="mamba")
    assert type(chosen._updater) is own
    args, model, getter, name, quantised = chosen.made_with
    assert (args.model, args.model_name, args.quantization_config) == (model, name, quantised)
    assert getter() is args.weights
    chosen.connect_rollout_engines(["e"], None, engine_gpu_counts=[1])
    chosen.update_weights()
    assert (chosen.weight_version, chosen.connected) == (5, [(["e"], [1], None)])
    assert chosen.pop_metrics() == {"slime/own": 1.0}
    assert not hasattr(chosen, "disconnect_rollout_engines")
    (text,) = caplog.messages
    assert text.startswith("wsync: slime's own UpdateWeightFromTensor runs instead")
    assert "not know the model family 'mamba'" in text


def test_an_engine_that_wsync_cannot_update_changes_over(
    slime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = started(slime, {"w": torch.ones(2)})
    staged, engines = [{"tp_size": 1, "pp_size": 2}], [Actor(slime_cases.Staged())]
    for _ in range(2):
        chosen.connect_rollout_engines(engines, None, [2], [0], staged)
    assert type(chosen._updater) is slime.UpdateWeightFromTensor.args[1]
    assert chosen.connected == [(engines, [2], staged)] * 2
    assert chosen.weight_version == 4
    (text,) = caplog.messages
    assert "UpdateWeightFromTensor runs instead of wsync's: engine " in text
    assert "pp_size 2: SGLang answers for its first pipeline stage only" in text


def test_a_users_mistake_is_an_error(slime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_OPTIONS", '{"dead_line": 7}')
    with pytest.raises(wsync.InvalidArgumentError, match="no option 'dead_line'"):
        started(slime, {"w": torch.ones(2)})


def _renamed(slime: Any) -> None:
    slime.UpdateWeightFromDisk.sync = slime.UpdateWeightFromDisk.update_weights


def _other_arguments(slime: Any) -> None:
    def update_weights(self: Any, version: int) -> None:
        del self, version

    slime.UpdateWeightFromTensor.update_weights = update_weights


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda slime: delattr(slime, "UpdateWeightFromTensor"), "no class UpdateWeightFromTensor"),
        (_renamed, "UpdateWeightFromDisk has an unknown method sync"),
        (_other_arguments, r"UpdateWeightFromTensor.update_weights takes \(self, version\), not"),
    ],
)
def test_another_slime_is_refused_by_what_differs(slime: Any, change: Any, reason: str) -> None:
    change(slime)
    before = dict(vars(slime))
    with pytest.raises(wsync.UnsupportedError, match=reason) as error:
        install(SimpleNamespace())
    assert str(error.value).startswith(f"{slime_double.ACTOR}: ")
    assert dict(vars(slime)) == before


def test_no_slime_at_all_is_named() -> None:
    with pytest.raises(wsync.UnsupportedError, match="No module named 'slime'"):
        install(SimpleNamespace())


def options_of(**arguments: Any) -> wsync.Options:
    source = from_tensors({"w": torch.ones(1)})
    args = SimpleNamespace(**arguments)
    return wsync.UpdateWeightFromTensor(args, source, None, model_name="any")._options


def test_options_come_from_the_environment_and_from_slimes_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: Any = {"checkpoint": "", "pause_mode": "abort", "lost": "raise"}
    assert options_of(update_weight_buffer_size=5) == wsync.Options(bucket_nbytes=5, **own)
    monkeypatch.setenv("WSYNC_OPTIONS", '{"deadline": 7, "threads": 2, "bucket_nbytes": 6}')
    found = options_of(update_weight_buffer_size=5, wsync_options={"threads": 3})
    assert (found.deadline, found.threads, found.bucket_nbytes) == (7, 3, 6)
    monkeypatch.setenv("WSYNC_OPTIONS", "")
    assert options_of() == wsync.Options(**own)
    assert options_of(use_fault_tolerance=True) == wsync.Options(**own | {"lost": "continue"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{deadline: 7}", "WSYNC_OPTIONS='{deadline: 7}': Expecting property name"),
        ("[7]", r"WSYNC_OPTIONS=\[7\]: expected a mapping"),
        ('{"dead_line": 7}', "WSYNC_OPTIONS: no option 'dead_line'; there are deadline, round"),
        ('{"deadline": "7"}', "deadline='7' is not a number"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setenv("WSYNC_OPTIONS", text)
    with pytest.raises(wsync.InvalidArgumentError, match=reason):
        options_of()
    monkeypatch.delenv("WSYNC_OPTIONS")
    with pytest.raises(
        wsync.InvalidArgumentError, match=r"args.wsync_options=7: expected a mapping"
    ):
        options_of(wsync_options=7)


def test_the_flags_of_the_readme_name_functions() -> None:
    page = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
    found = re.findall(r"^--(custom-megatron-init-path|sglang-\S+) (wsync\S+)$", page, re.MULTILINE)
    assert [flag for flag, _ in found] == [
        "custom-megatron-init-path",
        "sglang-custom-weight-loader",
    ]
    for _, path in found:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_ranks_change_over_together() -> None:
    with Ranks(2, path=sys.path) as ranks:
        for facts in ranks.run(slime_cases.change_over, True, timeout=240):
            assert facts == {"found": ["slime", "slime"], "version": 5}
        for facts in ranks.run(slime_cases.change_over, False, timeout=240):
            assert facts == {"found": ["wsync", "slime"], "version": 5}
