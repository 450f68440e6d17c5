"""Engines that die, refuse updates and come back; the others get every update.

WSYNC_FLEET_SECONDS says how long engines die at random (10 s).
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import agreement_cases, fleet_cases
from support.fleet_cases import Fleet
from support.local_servers import Packing
from support.procs import Ranks

import wsync
from wsync.machine.deadline import Deadline
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.fleet import Fleet as FleetList
from wsync.trainer.requests import EngineRequests

RANKS = 2
PHASES = ["open", "attach", "round", "done", "prepared", "commit", "close"]
QUICK = ["attach", "round", "close"]
REMOTE = {"delivery": "distributed", "exchange": "gloo"}
SECONDS = float(os.environ.get("WSYNC_FLEET_SECONDS") or 10)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        yield ranks


@pytest.fixture
def fleet(tmp_path: Path, trainer: Ranks) -> Iterator[Fleet]:
    found = Fleet(tmp_path, 3)
    yield found
    trainer.run(fleet_cases.close)
    found.close()


def join(trainer: Ranks, fleet: Fleet, **options: object) -> None:
    """Connects, and makes a first update."""
    trainer.run(fleet_cases.connect, fleet.paths, options)
    assert trainer.run(fleet_cases.update, 1) == [{}] * RANKS


def check(fleet: Fleet, version: int, *numbers: int) -> None:
    for number in numbers:
        assert fleet.held(number, [version]) == [version] * 2, number
        assert fleet.serving(number) == str(version), number


def test_an_engine_that_is_gone_costs_itself_and_comes_back(trainer: Ranks, fleet: Fleet) -> None:
    join(trainer, fleet)
    fleet.kill(1)
    lost = trainer.run(fleet_cases.update, 2)
    assert [list(each) for each in lost] == [["engine1"]] * RANKS
    check(fleet, 2, 0, 2)
    lost = trainer.run(fleet_cases.update, 3)
    assert [list(each) for each in lost] == [["engine1"]] * RANKS
    fleet.start(1)
    assert trainer.run(fleet_cases.update, 4) == [{}] * RANKS
    check(fleet, 4, 0, 1, 2)


def test_an_engine_that_was_restarted_takes_the_next_update(trainer: Ranks, fleet: Fleet) -> None:
    join(trainer, fleet)
    fleet.kill(2)
    fleet.start(2)
    assert trainer.run(fleet_cases.update, 2) == [{}] * RANKS
    check(fleet, 2, 0, 1, 2)


@pytest.mark.parametrize("way", [{}, REMOTE], ids=["ring", "gloo"])
def test_an_engine_that_comes_back_with_another_model_is_refused(
    trainer: Ranks, fleet: Fleet, way: dict[str, str]
) -> None:
    join(trainer, fleet, **way)
    fleet.kill(1)
    fleet.start(1, 32)
    for version in (2, 3):
        lost = trainer.run(fleet_cases.update, version)[0]
        assert [*lost] == ["engine1"]
        assert re.search(r"layer0\.weight: .*16\] != .*32", lost["engine1"]), lost
        check(fleet, version, 0, 2)
    fleet.kill(1)
    fleet.start(1)
    assert trainer.run(fleet_cases.update, 4) == [{}] * RANKS
    check(fleet, 4, 0, 1, 2)


def test_an_engine_gets_the_version_alone(trainer: Ranks, fleet: Fleet) -> None:
    join(trainer, fleet)
    fleet.kill(2)
    assert [[*each] for each in trainer.run(fleet_cases.update, 2)] == [["engine2"]] * RANKS
    fleet.start(2)
    for version in (2, 3):  # after a restart, and while the trainer reaches it
        asked = [fleet.asked(number) for number in (0, 1)]
        trainer.run(fleet_cases.update_alone, fleet.paths[2], version)
        assert [fleet.asked(number) for number in (0, 1)] == asked
        check(fleet, version, 2)
        check(fleet, 2, 0, 1)
        assert trainer.run(fleet_cases.update, version + 1) == [{}] * RANKS
        check(fleet, version + 1, 0, 1, 2)
        trainer.run(fleet_cases.update, 2)
    check(fleet, 2, 0, 1, 2)


@pytest.mark.parametrize(
    "phase",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PHASES],
)
def test_a_worker_that_dies_within_an_update_costs_its_engine(
    trainer: Ranks, fleet: Fleet, phase: str
) -> None:
    join(trainer, fleet)
    if phase == "attach":
        fleet.kill(0)  # so that the next update connects anew
        fleet.start(0)
    fleet.arm(1, phase, "kill")
    lost = trainer.run(fleet_cases.update, 2)
    assert [list(each) for each in lost] == [["engine1"]] * RANKS
    check(fleet, 2, 0, 2)
    fleet.kill(1)
    fleet.start(1)
    assert trainer.run(fleet_cases.update, 3) == [{}] * RANKS
    check(fleet, 3, 0, 1, 2)


def test_an_engine_that_refuses_is_asked_again_when_it_was_restarted(
    trainer: Ranks, fleet: Fleet
) -> None:
    join(trainer, fleet)
    fleet.arm(0, "round", "raise")
    lost = trainer.run(fleet_cases.update, 2)
    assert list(lost[0]) == ["engine0"] and "a planted failure" in lost[0]["engine0"]
    check(fleet, 2, 1, 2)
    assert fleet.serving(0) == ""  # it holds a mixture
    asked = fleet.asked(0)
    assert trainer.run(fleet_cases.update, 3) == lost
    assert fleet.asked(0) == asked
    fleet.kill(0)
    fleet.start(0)
    assert trainer.run(fleet_cases.update, 4) == [{}] * RANKS
    check(fleet, 4, 0, 1, 2)


def test_what_two_engines_refuse_is_the_trainers_error(trainer: Ranks, fleet: Fleet) -> None:
    join(trainer, fleet)
    fleet.arm(0, "open", "raise")
    fleet.arm(1, "attach", "raise")  # in the second attempt, which connects anew
    assert all("a planted failure" in text for text in trainer.run(fleet_cases.fail, 2))
    assert trainer.run(fleet_cases.update, 3) == [{}] * RANKS  # neither is left out
    check(fleet, 3, 0, 1, 2)


def test_an_engine_that_stands_still_is_lost_after_the_deadline(
    trainer: Ranks, fleet: Fleet
) -> None:
    join(trainer, fleet, deadline=6.0)
    fleet.arm(1, "round", "stop")
    lost = trainer.run(fleet_cases.update, 2)
    assert [list(each) for each in lost] == [["engine1"]] * RANKS
    check(fleet, 2, 0, 2)


def test_the_error_is_raised_if_no_engine_is_left_or_if_it_is_wanted(
    trainer: Ranks, fleet: Fleet
) -> None:
    join(trainer, fleet, lost="raise")
    fleet.kill(1)
    assert all("engine engine1" in text for text in trainer.run(fleet_cases.fail, 2))
    fleet.kill(0)
    fleet.kill(2)
    trainer.run(fleet_cases.close)
    for number in range(3):
        fleet.start(number)
    join(trainer, fleet)
    for number in range(3):
        fleet.kill(number)
    errors = trainer.run(fleet_cases.fail, 2)
    assert all("PeerClosedError" in text for text in errors), errors


def test_engines_join_and_leave(trainer: Ranks, fleet: Fleet) -> None:
    trainer.run(fleet_cases.connect_to_listed, fleet.paths[:2])
    assert trainer.run(fleet_cases.update, 1) == [{}] * RANKS
    fleet.kill(2)
    trainer.run(fleet_cases.list_engines, fleet.paths)
    lost = trainer.run(fleet_cases.update, 2)
    assert [list(each) for each in lost] == [["engine2"]] * RANKS
    check(fleet, 2, 0, 1)
    fleet.start(2)
    assert trainer.run(fleet_cases.update, 3) == [{}] * RANKS
    check(fleet, 3, 0, 1, 2)
    trainer.run(fleet_cases.list_engines, fleet.paths[1:])
    assert trainer.run(fleet_cases.update, 4) == [{}] * RANKS
    check(fleet, 4, 1, 2)
    check(fleet, 3, 0)
    trainer.run(fleet_cases.list_engines, [])
    assert all("no engines" in text for text in trainer.run(fleet_cases.fail, 5))
    check(fleet, 4, 1, 2)


class Slow(agreement_cases.Stock):
    """Answers when it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ready = threading.Event()
        self.ready.set()

    def server_info(self) -> dict[str, Any]:
        self.ready.wait(60)
        return {}


def listing(engines: list[Any]) -> FleetList:
    found = FleetList(lambda: engines, None, wsync.Options(), ranks=1, api_key=None)
    found.connect()
    return found


def names(fleet: FleetList) -> list[str]:
    """The engines that updates reach."""
    return [handle.name for handle in fleet.handles]


def test_an_engine_whose_checkpoint_does_not_fit_is_named() -> None:
    requests = EngineRequests([wsync.handle(Packing())], wsync.Options())

    def compare(engine: wsync.EngineHandle, timeout: float) -> None:
        raise wsync.LayoutError("a has other shapes")

    requests.compare = compare
    with pytest.raises(wsync.LayoutError, match=f"^engine {requests.engines[0].name}: a has"):
        requests.stop(requests.engines[0], Deadline(5.0))


def test_an_object_that_takes_the_place_of_another_is_reached() -> None:
    engines = [Packing(), Packing()]
    found = listing(engines)
    assert len({*names(found)}) == 2
    found.begin()
    assert found.generation == 0
    engines[0] = Packing()
    found.begin()
    assert found.generation == 1
    assert [handle._engine for handle in found.handles] == engines  # type: ignore[attr-defined]
    assert len({*names(found)}) == 2


def test_a_lost_engine_that_leaves_the_list_is_forgotten() -> None:
    engines = [Slow("first"), Slow("other")]
    found = listing(engines)
    error = wsync.RemoteError("engine first: it refuses")
    known: Any = {"late": (), "grouped": False}
    assert found.find([CheckedEngine(each) for each in found.handles], error, **known)
    for _ in range(2):
        assert [*found.lost] == ["first"] and names(found) == ["other"]
        found.begin()
    del engines[0]
    found.begin()
    assert not found.lost and names(found) == ["other"] and found.handles == found.known


def test_two_engines_that_refuse_for_one_reason_blame_the_trainer() -> None:
    found = listing([*map(Slow, ["first", "second", "third", "fourth", "fifth", "well"])])
    known: Any = {"late": (), "grouped": False}
    shape, missing = "a: it has shape [4]", "worker 1 did not join the update"
    both = wsync.StateError(f"engine first: {shape}; engine second: {shape}")
    assert not found.find([CheckedEngine(each) for each in found.handles], both, **known)
    for error, blame in (
        (wsync.RemoteError(f"engine first: worker 0 (pid 17): update 3: {shape}"), False),
        (wsync.DeadlineError(f"engine second: {missing}"), False),
        (wsync.DeadlineError(f"engine third: {missing}"), False),
        (wsync.RemoteError("engine fourth: update: worker 1 is gone"), False),
        (wsync.RemoteError(f"engine fifth: worker 1 (pid 18): update 1: {shape}"), True),
    ):
        engines = [CheckedEngine(each) for each in found.handles]
        assert found.find(engines, error, **known) != blame


def test_an_engine_that_is_slow_to_join_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.trainer.fleet._JOIN_SECONDS", 0.05)
    slow = Slow("slow")
    engines = [Slow("first")]
    found = listing(engines)
    slow.ready.clear()
    engines.append(slow)
    for _ in range(2):
        found.begin()
        assert names(found) == ["first"]
        assert [*found.lost.values()] == ["it does not answer yet"]
    slow.ready.set()
    end = time.monotonic() + 60
    while found.lost:
        assert time.monotonic() < end
        time.sleep(0.01)
        found.begin()
    assert names(found) == ["first", "slow"] and found.generation == 1


class Late(Slow):
    """Is not there until it is told to be."""

    def server_info(self) -> dict[str, Any]:
        if not self.ready.is_set():
            raise ConnectionRefusedError("no server")
        return {}


def test_a_functions_engines_may_be_missing_at_first() -> None:
    """slime's list has engines that have died since its health monitor's last look."""
    late, engines = Late("late"), [Slow("first"), Slow("other")]
    late.ready.clear()
    found = listing([late, *engines])
    for _ in range(2):
        assert names(found) == ["first", "other"]
        assert [*found.lost] == [str(late)]
        found.begin()
    late.ready.set()
    found.begin()
    assert names(found) == ["late", "first", "other"] and not found.lost
    late.ready.clear()
    with pytest.raises(wsync.PeerClosedError, match="no server"):
        listing([late])
    with pytest.raises(wsync.InvalidArgumentError, match="first is the same engine"):
        listing([late, engines[0], engines[0]])
    with pytest.raises(wsync.InvalidArgumentError, match="neither a URL nor an object"):
        listing([engines[0], late, None])


class Chaos:
    """A fleet whose engines die, stand still, refuse updates and come back at random."""

    def __init__(self, fleet: Fleet, seed: int, *, whole: bool) -> None:
        self._fleet, self._random = fleet, random.Random(seed)
        self._whole = whole  # whether only whole engines die
        self._bad = set[int]()  # engines that have been given a fault

    def strike(self) -> threading.Timer:
        """Restarts some bad engines, and plants faults in some good ones; returns a timer that
        kills one within the update, or none."""
        fleet, chosen = self._fleet, self._random
        ways = ["kill", "kill", "stop", "raise"]  # the last once: twice blames the trainer
        for number in range(len(fleet.paths)):
            if number in self._bad and chosen.random() < 0.5:
                fleet.kill(number)
                fleet.start(number)
                self._bad.discard(number)
            elif number not in self._bad and chosen.random() < 0.1:
                self._bad.add(number)
                if self._whole or chosen.random() < 0.3:
                    fleet.kill(number)
                else:
                    how = chosen.choice(ways)
                    ways = ways[:3] if how == "raise" else ways
                    fleet.arm(number, chosen.choice(PHASES), how, chosen.randrange(2))
        good = [number for number in range(len(fleet.paths)) if number not in self._bad]
        struck = chosen.choice(good) if good and chosen.random() < 0.3 else None
        timer = threading.Timer(0.2 * chosen.random(), self._kill, (struck,))
        timer.start()
        return timer

    def _kill(self, number: int | None) -> None:
        if number is not None:
            self._bad.add(number)
            self._fleet.kill(number)

    def check(self, version: int, lost: dict[str, str]) -> None:
        """Whether good engines have the version, and none serves what it does not say."""
        for number in range(len(self._fleet.paths)):
            if number not in self._bad:
                assert f"engine{number}" not in lost, lost
                check(self._fleet, version, number)
                continue
            try:
                serving = self._fleet.serving(number)
            except wsync.WsyncError:
                continue
            if serving and serving != "default":  # with which it was started
                among = range(max(1, int(serving) - 3), version + 1)
                try:
                    held = self._fleet.held(number, among)
                except wsync.WsyncError:
                    continue  # one of its workers is gone
                assert held == [int(serving)] * 2, (number, lost)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize("way", ["ring", "gloo"])
def test_no_engine_that_lives_misses_an_update(tmp_path: Path, way: str) -> None:
    seed = int(os.environ.get("WSYNC_FLEET_SEED") or time.time())
    print("WSYNC_FLEET_SEED", seed)
    fleet = Fleet(tmp_path, 8)
    with Ranks(4) as trainer:
        try:
            options = {"deadline": 5.0, "verify": "always", **(REMOTE if way == "gloo" else {})}
            trainer.run(fleet_cases.connect, fleet.paths, options)
            trainer.run(fleet_cases.update, 1)
            chaos, version = Chaos(fleet, seed, whole=way == "gloo"), 1
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                version += 1
                timer = chaos.strike()
                lost = trainer.run(fleet_cases.update, version)
                timer.join()
                chaos.check(version, lost[0])
            assert version > 1
        finally:
            fleet.close()
