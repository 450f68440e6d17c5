"""Sync.verify(): what differs between engines and their trainer is named; nothing is changed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fleet_cases, fused
from support.fleet_cases import Fleet
from support.fused import Fused
from support.procs import Ranks
from support.quantised_cases import blocks
from support.workers import ThreadEngine

import wsync
from wsync import _core
from wsync.engine.comparison import Comparison
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import CallingLoader, ModuleLoader

WAYS: dict[str, dict[str, Any]] = {
    "ring": {"delivery": "wsync", "round_nbytes": 1024, "ring_nbytes": 4096},
    "direct": {"delivery": "direct"},
    "gloo": {"delivery": "distributed", "round_nbytes": 1024, "ring_nbytes": 4096},
    "staged": {"delivery": "wsync", "stage": "on"},
}


def options(**more: Any) -> wsync.Options:
    return wsync.Options(**{"deadline": 20.0, "progress": False, **more})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


class Engine(ThreadEngine):
    """An engine in this process, one worker a module, which notes how it is paused."""

    def __init__(self, *modules: Any, loader: Any = RecordedLoader) -> None:
        super().__init__([loader(module) for module in modules])
        self.modules, self.modes, self.paused = modules, list[str](), False

    def pause(self, mode: str, timeout: float) -> None:
        self.modes.append(mode)
        self.paused = True

    def resume(self, timeout: float) -> None:
        self.paused = False

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's parameters, buffers and plain tensors."""
    plain = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return [tensor.detach() for tensor in (*module.state_dict().values(), *plain)]


def held(engine: Engine) -> list[bytes]:
    found = [tensor for module in engine.modules for tensor in tensors(module)]
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in found]


def verify(sync: wsync.Sync, engine: Engine) -> wsync.Verification:
    """What a verification finds; it changes nothing."""
    before, version, engine.modes = held(engine), engine.version, []
    found = sync.verify()
    assert held(engine) == before
    assert (engine.version, engine.paused, engine.modes) == (version, False, ["in_place"])
    assert not any(receiver.trouble for receiver in engine.receivers)
    return found


def named(found: wsync.Verification) -> str:
    assert not found and found.differences in repr(found)
    return found.differences.removeprefix("engine threads: ")


@contextlib.contextmanager
def connected(
    weights: dict[str, torch.Tensor], engine: Engine, **chosen: Any
) -> Iterator[wsync.Sync]:
    with (
        contextlib.closing(engine),
        wsync.connect(weights, [engine], options=options(**chosen)) as sync,
    ):
        sync.update(version=7)
        yield sync


Case = tuple[wsync.Sync, Engine]


@pytest.fixture(scope="module", params=WAYS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A trainer, and an engine of two workers with a share of the experts each."""
    weights = {name: tensor.share_memory_() for name, tensor in fused.draw(1).items()}
    engine = Engine(*(Fused(2, rank, ep=True) for rank in range(2)))
    with connected(weights, engine, **WAYS[request.param]) as sync:
        yield sync, engine


def one_element(module: Any) -> None:
    module.o[1, 3] += 1


def exchanged_rows(module: Any) -> None:
    module.qkv[:2] = module.qkv[[1, 0]]


def stale_expert(module: Any) -> None:
    old = Fused(2, 1, ep=True)
    old.load_weights(list(fused.draw(0).items()))
    module.w13[1] = old.w13[1]


def below_bfloat16(module: Any) -> None:
    """The trainer's bfloat16 is kept as float32."""
    module.router.view(torch.int32)[2, 5] ^= 1


def rounded(module: Any) -> None:
    """The trainer's float32 is kept as bfloat16."""
    module.wide.view(torch.int16)[4, 15] ^= 1


def second_place(module: Any) -> None:
    """The elements were delivered once, and copied here."""
    module.w_vc[0, 0, 0] += 1


FAULTS = {
    one_element: r"o\[1, 19\]",
    exchanged_rows: r"q\[16, 0\]",
    stale_expert: r"experts\.3\.gate\[0, 0\], experts\.3\.up\[0, 0\]",
    below_bfloat16: r"router\[2, 5\]",
    rounded: r"wide\[4, 15\]",
    second_place: r"kv_b\[\d+, 0\]",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_named(case: Case, fault: Callable[[Any], None]) -> None:
    sync, engine = case
    found = verify(sync, engine)
    assert found and found.differences == ""
    assert [each["tensors"] for each in found.workers] == [18, 18]
    now = tensors(engine.modules[1])
    kept = [tensor.clone() for tensor in now]
    with torch.no_grad():
        fault(engine.modules[1])
    text = named(verify(sync, engine))
    assert re.fullmatch(rf"worker 1: other values in {FAULTS[fault]}", text), text
    for tensor, value in zip(now, kept, strict=True):
        tensor.copy_(value)
    assert verify(sync, engine)


def test_what_the_trainer_changed_since_the_update_is_named() -> None:
    weights, engine = fused.draw(1), Engine(Fused())
    with connected(weights, engine) as sync:
        weights["norm"][-1] += 1
        assert named(verify(sync, engine)) == "worker 0: other values in norm[15]"
        sync.update()
        assert verify(sync, engine)


def test_quantised_codes_and_scales_are_compared() -> None:
    module = torch.nn.ModuleDict({"up": torch.nn.Linear(32, 32, bias=False)})
    up: Any = module["up"].requires_grad_(False)
    up.weight.data = up.weight.to(torch.float8_e4m3fn)
    up.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 2), False)
    engine = Engine(module, loader=ModuleLoader)
    with connected({"up.weight": torch.randn(32, 32)}, engine, quantise=blocks(16, 16)) as sync:
        assert verify(sync, engine)
        up.weight_scale_inv[1, 0] *= 2
        up.weight.view(torch.uint8)[20, 7] ^= 1
        text = "worker 0: other values in up.weight[20, 7], up.weight_scale_inv[1, 0]"
        assert named(verify(sync, engine)) == text


def test_a_tensor_under_two_names_is_compared_once() -> None:
    module = torch.nn.Module()
    module.embed = torch.nn.Parameter(torch.zeros(4, 3))
    module.head = module.embed
    weights = dict.fromkeys(("embed", "head"), torch.randn(4, 3))
    with connected(weights, engine := Engine(module, loader=ModuleLoader)) as sync:
        assert verify(sync, engine)
        module.embed.data[3, 2] = 7.0
        assert named(verify(sync, engine)) == "worker 0: other values in embed[3, 2]"


class Computes(torch.nn.Module):
    """Loads one tensor as it is, and computes with another."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(torch.zeros(8, 4))
        self.squared = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            value = tensor * tensor if name == "squared" else tensor
            getattr(self, name).data.copy_(value)


def test_what_goes_through_load_weights_is_named_as_not_compared() -> None:
    weights = {"plain": torch.randn(8, 4), "squared": torch.randn(3)}
    with connected(weights, engine := Engine(Computes())) as sync:
        found = verify(sync, engine)
        assert found and "not compared: squared: squared is not a copy of it" in repr(found)
        engine.modules[0].squared.data[0] += 1
        assert verify(sync, engine)
    with connected(weights, engine := Engine(Computes(), loader=CallingLoader)) as sync:
        found = verify(sync, engine)
        assert not found and found.differences == ""
        assert "all tensors go through load_weights (CallingLoader)" in repr(found)


def test_there_must_be_something_to_compare_through() -> None:
    weights, engine = fused.draw(1), Engine(Fused())
    with contextlib.closing(engine), wsync.connect(weights, [engine], options=options()) as sync:
        with pytest.raises(wsync.StateError, match="verify: call update first"):
            sync.verify()
        sync.update()
        sync.stage()
        with pytest.raises(wsync.StateError, match="an update is staged; call commit first"):
            sync.verify()
        sync.commit()
        assert verify(sync, engine)


CHOICES = [
    ("ring", "first", [1]),
    ("ring", "never", []),
    ("direct", "always", [1, 2, 3]),
    ("gloo", "always", [1, 2, 3]),
    ("staged", "always", [1, 2, 3]),
]


@pytest.mark.parametrize(("way", "wanted", "seen"), CHOICES)
def test_updates_are_verified_before_engines_continue(
    way: str, wanted: str, seen: list[int]
) -> None:
    engine, weights = Engine(Fused()), fused.draw(1)
    chosen = options(verify=wanted, **WAYS[way])
    with (
        contextlib.closing(engine),
        wsync.connect(weights, [engine], options=chosen) as sync,
    ):
        for number in (1, 2, 3):
            report = sync.update()
            assert bool(report.verification) == (number in seen) == ("verified" in str(report))
            assert not engine.paused
        assert report.staged == (way == "staged")
        sync.stage()
        assert bool(sync.commit().verification) == (wanted == "always" and way != "staged")
    if not seen:
        return
    engine = Engine(module := Fused())
    with (
        contextlib.closing(engine),
        wsync.connect(weights, [engine], options=chosen) as sync,
    ):
        spoil(sync, lambda: module.norm.data[2].add_(1))
        text = r"after this update, engine threads: worker 0: other values in norm\[2\]"
        with pytest.raises(wsync.StateError, match=text):
            sync.update()
        assert engine.paused and engine.version is None
        assert sync.update().verification
        assert not engine.paused


def spoil(sync: wsync.Sync, fault: Callable[[], object]) -> None:
    """Makes a fault happen once, when the workers have committed an update."""
    requests: Any = sync._requests
    answered = requests.answered

    def spoilt(*arguments: Any) -> None:
        answered(*arguments)
        fault()
        del requests.answered

    requests.answered = spoilt


def test_an_engine_with_other_weights_is_lost() -> None:
    engines, weights = [Engine(Fused()), Engine(Fused())], fused.draw(1)
    engines[1].name = "other"
    with (
        contextlib.closing(engines[0]),
        contextlib.closing(engines[1]),
        wsync.connect(weights, engines, options=options(verify="first")) as sync,
    ):
        spoil(sync, lambda: engines[1].modules[0].norm.data[2].add_(1))
        report = sync.update()
        (reason,) = report.lost.values()
        assert "other values in norm[2]" in reason
        assert reason.endswith("it stays paused")
        assert [engine.paused for engine in engines] == [False, True]
        assert [*sync.update().lost] == [*report.lost]


def test_boxes_in_steps_and_computed_elements_are_compared() -> None:
    """As read in place from a trainer that keeps every other row, and a norm less 1."""
    builder = _core.LayoutBuilder()
    shape = (6, 4)
    for number in range(2):
        builder.add_parameter(
            "p",
            number,
            "float32",
            [4, 1],
            [((0, 0), (3, 4), (0, 0))],
            [("w", "float32", shape, (number, 0), (0, 0), (3, 4), (0, 1), 0, 1.0, 1.0, (2, 1))],
        )
    manifest, trainer = builder.build(), [torch.randn(3, 4) for _ in range(2)]
    held = torch.stack(trainer, 1).reshape(shape) + 1
    builder.add_shard("w", "float32", shape, (0, 1), (6, 3), 0, 4, [16, 4])
    layout = builder.build()
    lent = _core.BufferTable([(t.data_ptr(), t.nbytes) for t in trainer], trainer)

    def found() -> Any:
        ring, stream = _core.Memory(1), _core.Stream()
        comparison = Comparison(ring, manifest, lent, stream, layout, [held], 20.0)
        comparison.compare(0)
        return comparison.facts()

    assert found() == {"tensors": 1, "nbytes": 72, "different": {}}
    held[3, 2] += 1
    held[:, 0] += 1  # which no update fills
    assert found()["different"] == {"w": [3, 2]}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("way", ["ring", "gloo"])
def test_a_worker_that_dies_meanwhile_stops_no_other_engine(
    tmp_path: Path, trainer: Ranks, way: str
) -> None:
    fleet = Fleet(tmp_path, 2)
    try:
        trainer.run(fleet_cases.connect, fleet.paths, WAYS[way])
        trainer.run(fleet_cases.update, 1)
        assert [good for good, _ in trainer.run(fleet_cases.verify, 1)] == [True, True]
        first = trainer.run(fleet_cases.verify, 2)
        for worker in (0, 1):
            rows = "(0|24)"  # the first ones of a rank
            text = rf"engine engine1: worker {worker}: other values in layer0.weight\[{rows}, "
            assert all(re.search(text, said) for _, said in first), first
        fleet.arm(1, "done", "kill")
        found = trainer.run(fleet_cases.verify, 1)
        assert all(not good and "engine engine1" in said for good, said in found), found
        assert (fleet.serving(0), fleet.held(0, [1])) == ("1", [1, 1])
        fleet.kill(1)
        fleet.start(1)
        assert trainer.run(fleet_cases.update, 2) == [{}, {}]
        assert [good for good, _ in trainer.run(fleet_cases.verify, 2)] == [True, True]
    finally:
        trainer.run(fleet_cases.close)
        fleet.close()
