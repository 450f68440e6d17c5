"""Engines and trainers that are actors of a real Ray, updated in each of slime's ways."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support import ray_cluster
from support.ray_actors import AsyncEngine, AsyncTrainer, Engine, Llm, Trainer, drawn
from support.ray_cluster import await_death, kill, start
from support.ray_plain_actors import Asking, Raising, Served, Silent
from support.slime_rollout import Manager
from support.slime_trainer import Blow, TrainActor, strike
from support.tiny_qwen3 import dense, draw, in_server, sums
from support.weights_only_engine import digest
from transformers import AutoModelForCausalLM

import wsync
from wsync._core import PeerClosedError, RemoteError
from wsync.handles.base import handle
from wsync.handles.local import RayHandle
from wsync.trainer.checked_engine import CheckedEngine

PATIENCE = 240.0


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """Where the cluster has its files; the paths of its sockets are long."""
    with tempfile.TemporaryDirectory(prefix="wsync-ray-", dir="/tmp") as name:
        with ray_cluster.cluster(Path(name)):
            yield Path(name)


def get(calls: Any) -> Any:
    return ray.get(calls, timeout=PATIENCE)


class Group:
    """The ranks of a trainer, as slime's RayTrainGroup has them."""

    def __init__(self, folder: Path, *kinds: type) -> None:
        store = tempfile.mktemp(dir=folder)
        size = len(kinds)
        self.ranks = [start(kind, rank, size, store) for rank, kind in enumerate(kinds)]

    def connect(self, name: str, engines: list[Any], **arguments: Any) -> None:
        get([rank.connect.remote(name, engines, **arguments) for rank in self.ranks])

    def update(self, seed: int) -> dict[str, float]:
        metrics: dict[str, float] = get([rank.update_weights.remote(seed) for rank in self.ranks])[
            0
        ]
        return metrics

    def errors(self, seed: int) -> list[Exception]:
        """What each rank raises."""
        found = []
        for call in [rank.update_weights.remote(seed) for rank in self.ranks]:
            with pytest.raises(Exception) as caught:
                get(call)
            found.append(caught.value)
        return found

    def disconnect(self) -> None:
        get([rank.disconnect.remote() for rank in self.ranks])


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Iterator[Group]:
    yield Group(folder, AsyncTrainer, Trainer)


@pytest.fixture(scope="module")
def engines() -> list[Any]:
    """Without wsync, the same of coroutines, and with wsync's receiver; tests may not harm them."""
    return [start(Engine), start(AsyncEngine), start(AsyncEngine, receives=True)]


@pytest.fixture(scope="module")
def llm() -> Any:
    """vLLM's kind, which takes no files."""
    return start(Llm)


def states(engines: list[Any]) -> list[tuple[str, str, bool]]:
    return get([engine.state.remote() for engine in engines])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["UpdateWeightFromTensor", "UpdateWeightFromDistributed"])
def test_actors_update_actors(name: str, trainer: Group, engines: list[Any], llm: Any) -> None:
    engines = [*engines, llm]
    trainer.connect(name, engines)
    for number in (1, 2):
        metrics = trainer.update(10 * len(name) + number)
        expected = digest(drawn(10 * len(name) + number))
        assert states(engines) == [(expected, str(number), False)] * len(engines)
    assert metrics["wsync/update_seconds"] > 0
    trainer.disconnect()


@pytest.mark.slow
def test_an_actor_beside_a_server_is_that_server(config: Any) -> None:
    """As slime's engines are: no weights go through the actor."""
    served = start(Served, config)
    url = get(served.get_url.remote())
    weights = draw(config, 1)
    try:
        with wsync.connect(weights, [served], options=wsync.Options(deadline=PATIENCE)) as sync:
            assert sync.ways == {"wsync's receiver": [url]}
            sync.update(version=3)
        assert handle(served).model_info(PATIENCE)["weight_version"] == "3"
        assert in_server(url) == sums(weights)
    finally:
        get(served.close.remote())
        kill(served)


def test_a_handle_made_here_is_used_by_a_trainer(trainer: Group, engines: list[Any]) -> None:
    trainer.connect("UpdateWeightFromTensor", [handle(engine) for engine in engines])
    trainer.update(5)
    assert states(engines) == [(digest(drawn(5)), "1", False)] * len(engines)
    trainer.disconnect()


def test_what_an_engine_raises_is_said_in_its_words() -> None:
    raising = start(Raising)
    asking = start(Asking, raising)
    for engine in (raising, asking):
        made = handle(engine)
        assert isinstance(made, RayHandle)
        for what, text in (
            ("long", "ValueError: the reason, and more"),
            ("own timeout", "GetTimeoutError: a worker of the engine is slow"),
            ("wsync's", "LayoutError: w: dim 1: source 4 != destination 2"),
        ):
            with pytest.raises(RemoteError) as caught:
                made.update_weights([b""], load_format=what, weight_version=1, timeout=PATIENCE)
            start_of = f"engine {made.name}: update_weights_from_tensor: {text}"
            assert str(caught.value).startswith(start_of)
    kill(raising)
    with pytest.raises(PeerClosedError, match="get_server_info: The actor died"):
        handle(raising)


def test_an_actor_that_ray_starts_again_is_another_engine() -> None:
    """It has the weights that it began with, and takes what comes."""
    actor = ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)(Silent).remote()
    made = handle(actor, workers=1)
    checked, first = CheckedEngine(made), made.model_info(PATIENCE)
    checked.pause("abort", PATIENCE)
    given = {"load_format": None, "timeout": PATIENCE}
    checked.update_weights(lambda: [b""], weight_version=None, **given)
    ray.kill(actor, no_restart=False)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:  # calls on their way when it ends fail
        with contextlib.suppress(PeerClosedError):
            if made.model_info(PATIENCE) != first:
                break
    with pytest.raises(
        PeerClosedError, match=r"is not the engine that was paused .*: its process was "
    ):
        checked.verify(PATIENCE)
    kill(actor)


def test_an_engine_that_dies_is_named_and_others_go_on(trainer: Group, engines: list[Any]) -> None:
    """In an update, and before the next."""
    dying = start(Engine)
    trainer.connect("UpdateWeightFromTensor", [dying, *engines])
    trainer.update(31)
    get(dying.exit_in.remote(2))
    # of the second try, and of the first
    for methods in ({"get_weight_version", "update_weights_from_tensor"}, {"get_weight_version"}):
        for error in trainer.errors(32):
            assert isinstance(error, PeerClosedError)
            died = re.findall(re.escape(f"engine {dying}: ") + r"(\w+): The actor died", str(error))
            assert set(died) == methods
        await_death(dying)
    assert [paused for _, _, paused in states(engines)] == [True] * len(engines)
    trainer.connect("UpdateWeightFromTensor", engines)
    trainer.update(33)
    assert states(engines) == [(digest(drawn(33)), "1", False)] * len(engines)
    trainer.disconnect()


@pytest.mark.slow
def test_a_trainer_whose_rank_dies_is_replaced(
    folder: Path, trainer: Group, engines: list[Any]
) -> None:
    other = Group(folder, Trainer, AsyncTrainer)
    other.connect("UpdateWeightFromTensor", engines)
    calls = [
        other.ranks[0].update_weights.remote(51),
        other.ranks[1].update_weights.remote(51, exits=True),
    ]
    with pytest.raises(ray.exceptions.RayActorError):
        get(calls[1])
    with pytest.raises(wsync.WsyncError):
        get(calls[0])
    kill(other.ranks[0])
    trainer.connect("UpdateWeightFromTensor", engines)
    trainer.update(52)
    assert states(engines) == [(digest(drawn(52)), "1", False)] * len(engines)
    trainer.disconnect()


class Run:
    """A run of slime's: its rollout manager with two engines, and its train actor of two ranks."""

    def __init__(self, folder: Path, kind: str) -> None:
        checkpoint = tempfile.mkdtemp(dir=folder)
        AutoModelForCausalLM.from_config(dense()).save_pretrained(checkpoint)
        self.manager = start(Manager, checkpoint, 2)
        known = (2, tempfile.mktemp(dir=folder), self.manager, checkpoint, kind)
        self._ranks = [start(TrainActor, rank, *known) for rank in range(2)]
        self._version = self._seed = 0

    def update(self, *reached: int, blow: Blow | None = None) -> None:
        """An update, which has to reach these engines.  Then slime generates."""
        self._seed += 1
        calls = [rank.update_weights.remote(self._seed, blow) for rank in self._ranks]
        version, other = get(calls)
        assert version == other > self._version  # an attempt that failed may have used one up
        self._version = version
        engines = self._engines()
        for place in reached:
            url = get(engines[place].get_url.remote())
            assert handle(url).model_info(PATIENCE)["weight_version"] == str(version), place
            assert in_server(url) == sums(draw(dense(), self._seed)), place
        get(self.manager.look.remote())

    def strike(self, place: int) -> None:
        """Ends an engine's server between updates."""
        strike(get(self._engines()[place].pids.remote())[0])

    def _engines(self) -> Any:
        return get(self.manager.get_updatable_engines_and_lock.remote())[0]

    def close(self) -> None:
        for actor in (self.manager, *self._ranks):
            ray.kill(actor)


@pytest.fixture(params=["UpdateWeightFromTensor", "UpdateWeightFromDistributed"])
def run(request: pytest.FixtureRequest, folder: Path) -> Iterator[Run]:
    found = Run(folder, request.param)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slime_recovers_engines_that_die_in_updates(run: Run) -> None:
    """support.slime_rollout and slime_trainer were compared with slime 624b824 by hand: its own
    train.py, RolloutManager, health monitor and engine actors, with SGLang 0.5.15.post1 on a CPU,
    went through the same deaths with the same results."""
    run.update(0, 1)
    run.update(1, blow=("tensors", 0, False))
    run.update(0, blow=("round", 1, True))  # slime has started the first again
    run.strike(0)  # which slime has not seen when it starts the other
    run.update(1)
    run.update(0, blow=("commit", 1, False))
    run.strike(0)
    get(run.manager.look_while_recovering.remote())
    run.update(1)  # in slime's list the first has no actor
    run.update(0, 1)
