"""Whether an engine is still the one that was paused for an update."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_handles import FakeServer, server

import wsync
from wsync.disk import DiskSync
from wsync.handles.base import EngineHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.messages.control import UPDATING, Control
from wsync.trainer.checked_engine import CheckedEngine
from wsync.trainer.requests import EngineRequests

__all__ = ["server"]

QUICK = wsync.Options(deadline=30.0, progress=False)


class Engine:
    """A stock engine, which may be started again just before any call; it says its seed."""

    workers = 1
    load_formats = ()

    def __init__(self, name: str = "stock", restarts: str = "") -> None:
        self.name = name
        self.restarts = restarts
        self.seed, self.version, self.told = 1, "default", list[str]()
        self.model = "/models/base"

    def pause(self, mode: str, timeout: float) -> None:
        self._hear("pause")

    def flush(self, timeout: float) -> None:
        self._hear("flush")

    def update_weights(self, *_: Any, weight_version: Any, **__: Any) -> None:
        self._hear("update")
        self.version = self.version if weight_version is None else str(weight_version)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        self._hear("load")
        self.model, self.version = path, str(weight_version)

    def resume(self, timeout: float) -> None:
        self._hear("resume")

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {"weight_version": self.version}

    def server_info(self, timeout: float) -> dict[str, Any]:
        """SGLang 0.5.17 calls itself by what it has loaded last."""
        return {
            "random_seed": self.seed,
            "served_model_name": self.model,
            "model_path": self.model,
        }

    def _hear(self, what: str) -> None:
        if what == self.restarts:
            self.seed, self.version, self.restarts = 2, "default", ""
        self.told.append(what)


@pytest.mark.parametrize("restarts", ["flush", "load", "resume"])
def test_an_engine_that_was_started_again_in_an_update_fails_it(
    restarts: str, tmp_path: Path
) -> None:
    engine, other = Engine(restarts=restarts), Engine("other")
    weights = {"a": torch.zeros(3)}
    with DiskSync(weights, [engine, other], folder=tmp_path, options=QUICK) as sync:
        with pytest.raises(
            wsync.PeerClosedError, match=r"engine stock: it is not the engine.*was 1 and is now 2"
        ):
            sync.update(version=7)
        # what it takes on before it is missed is not the next update's version
        assert ("load" in engine.told) == (restarts != "flush")
        assert ("resume" in other.told) == (restarts == "resume")
        assert sync.update().version == "8"
        assert engine.told[-1] == other.told[-1] == "resume"


def test_a_disk_update_lets_engines_go_on_that_have_loaded_nothing(tmp_path: Path) -> None:
    """As one over the network does; a note names those that stay paused, and what helps."""
    fails, loaded = Engine("fails"), Engine("loaded")
    asked = threading.Event()

    def flush(timeout: float) -> None:
        asked.wait(timeout)
        raise wsync.RemoteError("no")

    fails.flush = flush  # type: ignore[method-assign]
    loaded.update_weights_from_disk = lambda *_, **__: asked.set()  # type: ignore[method-assign]
    engines, weights = [fails, loaded], {"a": torch.zeros(3)}
    with DiskSync(weights, engines, folder=tmp_path, options=QUICK) as sync:
        with pytest.raises(wsync.RemoteError, match="no") as caught:
            sync.update()
    assert fails.told == ["pause", "resume"]
    assert "resume" not in loaded.told
    (note,) = caught.value.__notes__
    assert note.startswith("These engines stay paused until an update succeeds: 'loaded'.  Call up")


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("default", ["pause", "flush", "resume"]),
        (f"{UPDATING}a1-1", ["pause", "flush"]),
    ],
)
def test_engines_that_were_sent_nothing_go_on(version: str, told: list[str]) -> None:
    """SGLang does not say itself whether its weights are whole."""

    class Busy(Engine):
        def flush(self, timeout: float) -> None:
            super().flush(timeout)
            raise wsync.DeadlineError("not idle")

    busy, other = Busy(), Engine("other")
    busy.version = other.version = version
    with wsync.connect({"a": torch.zeros(3)}, [busy, other], options=QUICK) as sync:
        with pytest.raises(wsync.DeadlineError, match="not idle") as failed:
            sync.update()
        assert busy.told == other.told == told
        left = "" if version == "default" else ": 'stock', 'other'"
        assert left in "".join(getattr(failed.value, "__notes__", ""))


def test_a_stock_engine_goes_on_when_the_first_bucket_cannot_be_made() -> None:
    """Its ring has no room for one row; the engine has been told nothing but to pause."""
    engine = Engine()
    options = dataclasses.replace(QUICK, ring_nbytes=64, round_nbytes=64)
    with wsync.connect({"a": torch.zeros(3, 64)}, [engine], options=options) as sync:
        with pytest.raises(wsync.InvalidArgumentError, match="64") as failed:
            sync.update()
    assert engine.told == ["pause", "flush", "resume"]
    assert not hasattr(failed.value, "__notes__")


def test_engines_that_hold_a_part_of_a_failed_update_do_not_go_on_in_the_next() -> None:
    class Failing(Engine):
        def update_weights(self, *_: Any, **__: Any) -> None:
            self._hear("update")
            raise wsync.RemoteError("out of memory")

        def flush(self, timeout: float) -> None:
            super().flush(timeout)
            if "update" in self.told:
                raise wsync.DeadlineError("not idle")

    engine = Failing()
    with wsync.connect({"a": torch.zeros(3)}, [engine], options=QUICK) as sync:
        with pytest.raises(wsync.RemoteError, match="out of memory"):
            sync.update()
        with pytest.raises(wsync.DeadlineError, match="not idle") as failed:
            sync.update()
    assert engine.told == ["pause", "flush", "update", "pause", "flush"]
    assert "stay paused" in failed.value.__notes__[0]


@pytest.mark.parametrize("at", range(1, 4))
def test_an_engine_with_a_fixed_seed_that_was_started_again_says_so_by_its_version(
    at: int, tmp_path: Path
) -> None:
    class Fixed(Engine):
        asked = 0

        def server_info(self, timeout: float) -> dict[str, Any]:
            self.asked += 1
            if self.asked == at:
                self.version = "default"
            return super().server_info(timeout)

    engine = Fixed()
    with DiskSync({"a": torch.zeros(3)}, [engine], folder=tmp_path, options=QUICK) as sync:
        try:
            sync.update(version=7)
        except wsync.PeerClosedError:
            return
    assert engine.asked >= at
    assert engine.version == "7"


def test_an_engine_with_a_fixed_seed_that_was_started_again_gets_no_version() -> None:
    """Where it took a bucket that says one of its own, the times tell that it took to start."""

    class Fixed(Engine):
        started: float | None = 40.1

        def server_info(self, timeout: float) -> dict[str, Any]:
            return super().server_info(timeout) | {"startup_time": {"load_weight": self.started}}

    engine = Fixed()
    checked = CheckedEngine(engine)
    checked.pause("abort", 10)
    checked.update_weights(lambda: [b""], load_format=None, weight_version=None, timeout=10)
    engine.started = 40.2
    with pytest.raises(wsync.PeerClosedError, match=r"startup_time was .*40\.1.* and is .*40\.2"):
        checked.update_weights(lambda: [b""], load_format=None, weight_version=7, timeout=10)


def test_a_stock_engine_is_asked_what_its_scheduler_answers_before_it_loads(tmp_path: Path) -> None:
    asked = []

    class Slow(Engine):
        def server_info(self, timeout: float) -> dict[str, Any]:
            asked.append("server_info")
            return super().server_info(timeout)

        def _hear(self, what: str) -> None:
            asked.append(what)
            super()._hear(what)

    with DiskSync({"a": torch.zeros(3)}, [Slow()], folder=tmp_path, options=QUICK) as sync:
        for version in (1, 2):
            asked.clear()
            sync.update(version=version)
            assert asked[asked.index("load") - 1] == "server_info"


def test_a_version_is_not_given_to_an_engine_that_was_started_again() -> None:
    """The last bucket says it: it would be a part of the weights for a whole."""
    engine = Engine()
    checked = CheckedEngine(engine)
    checked.pause("abort", 10)
    checked.update_weights(lambda: [b""], load_format=None, weight_version=None, timeout=10)
    engine.seed = 2
    with pytest.raises(wsync.PeerClosedError, match="is not the engine that was paused"):
        checked.update_weights(lambda: [b""], load_format=None, weight_version=7, timeout=10)
    assert engine.told == ["pause", "update"]


def test_a_version_is_not_given_to_an_engine_that_has_lost_its_own() -> None:
    """It was started again with the same random seed, so that its version tells it apart."""
    engine = Engine()
    engine.version = "6"
    checked = CheckedEngine(engine)
    checked.pause("abort", 10)
    engine.version = "default"
    with pytest.raises(wsync.PeerClosedError, match="version default, not 6: it was restarted"):
        checked.update_weights(lambda: [b""], load_format=None, weight_version=7, timeout=10)
    assert engine.told == ["pause"]


def bucket(checked: EngineHandle, version: int | None = None) -> None:
    checked.update_weights(lambda: [b""], load_format=None, weight_version=version, timeout=10)


def control(checked: CheckedEngine, op: str, version: int | None = None) -> None:
    address = f"{'0' * 32}@/none" if op == "open" else ""
    message = Control(op=op, session="0a", update=1, deadline=5.0, address=address)
    checked.send_control([message], weight_version=version, timeout=10)


def test_what_an_update_has_left_half_way_is_not_called_what_it_was_before() -> None:
    """SGLang with wsync's loader takes the version of any request, and continues for anybody."""
    engine = Engine()
    engine.version = "6"
    checked = CheckedEngine(engine)
    for _ in range(2):  # the first one fails
        checked.pause("abort", 10)
        control(checked, "open")
        assert engine.version.startswith("updating-")
    control(checked, "close", 8)
    checked.verify(10)
    assert engine.version == "8"


class Plain:
    """A handle that offers what it has to, and passes on whatever else it is asked."""

    name, workers, load_formats = "plain", 1, ()

    def __init__(self) -> None:
        self.version, self.told = "6", list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.told.append(name)

    def update_weights(self, *_: Any, weight_version: Any, **__: Any) -> None:
        self.version = str(weight_version)
        self.told.append("update")

    def model_info(self, timeout: float) -> dict[str, Any]:
        return {"version": self.version, "weight_version": self.version}


def test_a_handle_of_ones_own_is_asked_for_nothing_else() -> None:
    """What it calls a version is not what SGLang does."""
    engine = Plain()
    checked = CheckedEngine(engine)
    message = Control(op="close", session="0a", update=1, deadline=5.0)
    checked.pause("abort", 10)
    checked.send_control([message], weight_version=7, timeout=10)
    checked.verify(10)
    checked.resume(10)
    assert [what for what in engine.told if what != "during"] == ["pause", "update", "resume"]


class Local:
    """slime's engine methods, in this process."""

    def __init__(self) -> None:
        self.instance = "a"

    def server_info(self) -> dict[str, Any]:
        return {"instance": self.instance, "random_seed": 1}

    def pause_generation(self) -> None: ...
    def continue_generation(self) -> None: ...
    def update_weights_from_tensor(self, **_: Any) -> None: ...


def test_a_local_engine_that_was_replaced_is_noticed() -> None:
    local = Local()
    checked = CheckedEngine(wsync.handle(local))
    checked.pause("abort", 10)
    local.instance = "b"
    with pytest.raises(wsync.PeerClosedError, match="instance was 'a' and is now 'b'"):
        checked.verify(10)


def test_an_engine_is_asked_who_it_is_at_the_pause_and_before_and_after_it_goes_on(
    server: FakeServer,
) -> None:
    for path in ("/pause_generation", "/update_weights_from_tensor", "/continue_generation"):
        server.answers[path] = (200, {"success": True, "message": "", "status": "ok"})
    server.answers["/model_info"] = (200, {"weight_version": "1", "instance": "i"})
    checked = CheckedEngine(HttpHandle(server.url, workers=1))
    checked.pause("abort", 10)
    checked.update_weights(lambda: [b""], load_format=None, weight_version=1, timeout=10)
    checked.verify(10)
    checked.resume(10)
    asked = [path for path, *_ in server.seen if path == "/model_info"]
    assert asked == ["/model_info"] * 3


def test_an_engine_that_reports_another_version_is_not_continued() -> None:
    engine = Engine()
    checked = CheckedEngine(engine)
    checked.pause("abort", 10)
    checked.update_weights(lambda: [b""], load_format=None, weight_version=7, timeout=10)
    checked.verify(10)
    engine.version = "6"
    with pytest.raises(wsync.PeerClosedError, match="weight version 6, not 7: it was restarted"):
        checked.verify(10)


def test_what_a_failed_update_has_not_asked_yet_it_asks_no_more() -> None:
    """An engine that answers late who it is: its next update may have begun, or ended, by then."""
    asked, answers = threading.Event(), threading.Event()

    class Slow(Engine):
        slow = False

        def model_info(self, timeout: float) -> dict[str, Any]:
            if self.slow and not asked.is_set():
                asked.set()
                assert answers.wait(60)
            return super().model_info(timeout)

    engine = Slow()
    requests = EngineRequests([engine], dataclasses.replace(QUICK, deadline=0.1))
    (checked,) = requests.engines
    checked.pause("abort", 10)
    engine.slow = True
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            lambda: checked.update_weights_from_disk("a", weight_version=2, timeout=60)
        )
        assert asked.wait(60)
        requests.abandon(wsync.RemoteError("no"))
        (following,) = requests.engines
        following.pause("abort", 10)
        bucket(following)
        following.update_weights_from_disk("b", weight_version=3, timeout=60)
        following.resume(60)
        told = list(engine.told)
        answers.set()
        with pytest.raises(wsync.WsyncError, match=r"not called, because its|version 3, not "):
            call.result(60)
    assert engine.told == told
    assert (engine.version, engine.model) == ("3", "b")
