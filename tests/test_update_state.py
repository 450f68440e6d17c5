"""Every transition of the state of updates at an engine worker, and everything that it refuses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto

import pytest

import wsync
from wsync.engine.update_state import REFUSALS, Ended, Refused, Repeated, UpdateState

PATIENCE = 60.0
TENSORS = {"a": "a", "b": "b"}  # what an update has to bring

Step = Callable[[UpdateState], object]


def load(names: str, update: str = "", version: str | None = None, origin: str = "") -> Step:
    """One request that brings these tensors."""

    def step(state: UpdateState) -> frozenset[str]:
        with state.serving(update, version), state.loading(list(names), TENSORS, origin) as came:
            return came

    return step


def begin(update: str = "") -> Step:
    return lambda state: state.begin(update)


def go_on(update: str = "") -> Step:
    return lambda state: state.go_on(update)


def rename(version: str, update: str = "") -> Step:
    return lambda state: state.rename(version, update)


def regroup(update: str = "") -> Step:
    return lambda state: state.regroup(update)


def fail(update: str = "") -> Step:
    """A request that fails before it writes anything."""

    def step(state: UpdateState) -> None:
        with contextlib.suppress(KeyError), state.serving(update, None):
            raise KeyError("planted")

    return step


def replace(state: UpdateState) -> None:
    """All weights, by another way than buckets."""
    with state.replacing("loading"):
        pass


def replace_named(state: UpdateState) -> None:
    with state.serving("", "disk"):
        replace(state)


def fail_midway(state: UpdateState) -> None:
    with contextlib.suppress(KeyError), state.replacing("loading"):
        raise KeyError("planted")


def open_(state: UpdateState) -> None:
    """What a control message that opens an update does until it fails or commits."""
    state.end_buckets()
    state.lose("update 3 is running")


def commit(state: UpdateState) -> None:
    open_(state)
    state.commit("f0", 3)


def close(session: str = "f0", number: int = 3, version: str | None = "v3") -> Step:
    return lambda state: state.close(session, number, version)


FIRST, SECOND = ("a" * 16 + f"{count:08x}" for count in (15, 16))  # of one trainer


class Phase(Enum):
    """The states of an update that wsync.engine.update_state lists."""

    NONE = auto()
    BEGUN = auto()
    PARTIAL = auto()
    COMPLETE = auto()
    ENDED = auto()


def phase_of(state: UpdateState) -> Phase:
    update = state._now
    if update.ended:
        return Phase.NONE if update.id is None else Phase.ENDED
    if update.missing is None:
        return Phase.BEGUN
    return Phase.PARTIAL if update.missing else Phase.COMPLETE


WHOLE, UNNAMED, LOST = "WHOLE", "UNNAMED", "LOST"


def weights(state: UpdateState) -> str:
    if not state.consistent:
        assert "the weights are inconsistent: " in state.trouble
        return LOST
    return UNNAMED if state.trouble else WHOLE


# what happens, and what the update and the weights are then, and what these are called
TRANSITIONS: list[tuple[list[Step], Phase, str, str]] = [
    ([], Phase.NONE, WHOLE, "default"),
    ([begin()], Phase.BEGUN, WHOLE, "default"),
    ([begin("a1")], Phase.BEGUN, WHOLE, "default"),
    ([begin("a1"), begin("a1")], Phase.BEGUN, WHOLE, "default"),
    ([begin("a1"), begin("b2")], Phase.BEGUN, WHOLE, "default"),
    ([begin(FIRST), begin(SECOND)], Phase.BEGUN, WHOLE, "default"),
    ([begin(), begin("b2")], Phase.BEGUN, WHOLE, "default"),
    ([begin("b2"), begin()], Phase.BEGUN, WHOLE, "default"),
    ([begin(), begin()], Phase.ENDED, WHOLE, "default"),
    ([begin(), go_on()], Phase.NONE, WHOLE, "default"),
    ([begin(), go_on(), begin()], Phase.BEGUN, WHOLE, "default"),
    ([begin("a1"), go_on("a1")], Phase.NONE, WHOLE, "default"),
    ([begin("a1"), go_on("a1"), go_on("a1")], Phase.NONE, WHOLE, "default"),
    ([begin("a1"), go_on()], Phase.NONE, WHOLE, "default"),
    ([go_on()], Phase.NONE, WHOLE, "default"),
    # buckets
    ([begin(), load("a")], Phase.PARTIAL, LOST, "default"),
    ([begin("a1"), load("a", "a1"), begin("a1")], Phase.PARTIAL, LOST, "default"),
    ([begin(), load("a"), load("b")], Phase.COMPLETE, WHOLE, "unknown"),
    ([begin(), load("a"), load("b", version="7")], Phase.COMPLETE, WHOLE, "7"),
    ([begin(), load("a", version="7"), load("b")], Phase.COMPLETE, WHOLE, "7"),
    ([begin("a1"), load("a", "a1"), load("b", "a1", "7")], Phase.COMPLETE, WHOLE, "7"),
    # the last bucket may bring nothing that is missing
    ([begin("a1"), load("a", "a1"), load("b", "a1")], Phase.COMPLETE, UNNAMED, "default"),
    ([begin("a1"), load("ab", "a1"), load("", "a1", "7")], Phase.COMPLETE, WHOLE, "7"),
    ([begin("a1"), load("ab", "a1"), begin("b2")], Phase.BEGUN, UNNAMED, "default"),
    ([begin("a1"), load("ab", "a1"), load("c", "a1"), fail("a1")], Phase.ENDED, UNNAMED, "default"),
    ([begin(), load("a"), load("b"), go_on()], Phase.NONE, WHOLE, "unknown"),
    ([begin(), load("a"), begin("b2")], Phase.BEGUN, LOST, "default"),
    ([begin(), load("a"), begin("b2"), load("ab", "b2", "7")], Phase.COMPLETE, WHOLE, "7"),
    ([load("ab", version="7")], Phase.NONE, WHOLE, "7"),
    ([begin(), load("ab", version="7")], Phase.COMPLETE, WHOLE, "7"),
    ([begin(), load("a"), load("ab", version="7")], Phase.COMPLETE, WHOLE, "7"),
    ([begin(), load("a"), fail(), load("ab", version="7")], Phase.ENDED, WHOLE, "7"),
    # two trainers without ids: the second one's are told apart by the version that they say
    ([begin(), load("a", version="6"), begin()], Phase.BEGUN, LOST, "default"),
    (
        [begin(), load("a", version="6"), begin(), load("b", version="1"), load("a", version="1")],
        Phase.COMPLETE,
        WHOLE,
        "1",
    ),
    ([begin(), load("a"), begin()], Phase.ENDED, LOST, "default"),
    ([begin(), load("a"), begin(), load("ab")], Phase.ENDED, WHOLE, "unknown"),
    # what ends an update
    ([begin(), fail()], Phase.ENDED, WHOLE, "default"),
    ([begin("a1"), load("a", "a1"), fail("a1")], Phase.ENDED, LOST, "default"),
    ([begin(), regroup()], Phase.BEGUN, WHOLE, "default"),
    ([begin(), load("a"), regroup()], Phase.ENDED, LOST, "default"),
    ([begin("a1"), load("a", "a1"), regroup("a1")], Phase.PARTIAL, LOST, "default"),
    # other ways
    ([begin(), load("a"), replace], Phase.ENDED, WHOLE, "unknown"),
    ([replace_named], Phase.NONE, WHOLE, "disk"),
    ([fail_midway], Phase.NONE, LOST, "default"),
    ([begin(), load("a"), open_], Phase.ENDED, LOST, "default"),
    ([begin(), commit], Phase.ENDED, UNNAMED, "default"),
    ([commit, close()], Phase.NONE, WHOLE, "v3"),
    ([commit, close(), close()], Phase.NONE, WHOLE, "v3"),  # repeated on its way
    ([commit, close(version=None)], Phase.NONE, WHOLE, "unknown"),
    ([commit, begin("b2")], Phase.BEGUN, UNNAMED, "default"),
    ([commit, replace], Phase.NONE, WHOLE, "unknown"),
    ([commit, load("ab", version="7")], Phase.NONE, WHOLE, "7"),
    ([rename("x")], Phase.NONE, WHOLE, "x"),
    ([begin("a1"), rename("x", "a1")], Phase.BEGUN, WHOLE, "x"),
]


@pytest.mark.parametrize(("steps", "phase", "held", "version"), TRANSITIONS)
def test_what_happens_changes_the_state(
    steps: list[Step], phase: Phase, held: str, version: str
) -> None:
    state = UpdateState()
    for step in steps:
        step(state)
    assert (phase_of(state), weights(state), state.weight_version) == (phase, held, version)


def busy(state: UpdateState) -> None:
    with state.only():
        replace(state)


BEGAN = [begin("a1"), load("a", "a1")]
OVER = [begin("a1"), go_on("a1")]
MIXED = [begin(), load("a", version="6"), begin()]

# what has happened, what is refused then, by which text, and of what kind; and if the update ends
FORBIDDEN: list[tuple[list[Step], Step, str, type[Exception], bool]] = [
    ([], begin("A1"), "bad id", wsync.InvalidArgumentError, False),
    ([], begin("a" * 65), "bad id", wsync.InvalidArgumentError, False),
    ([], load("a", "A1"), "bad id", wsync.InvalidArgumentError, False),
    ([], go_on("A1"), "bad id", wsync.InvalidArgumentError, False),
    (OVER, begin("a1"), "late pause", wsync.StateError, False),
    ([*BEGAN, begin("b2")], begin("a1"), "late pause", wsync.StateError, False),
    ([begin(SECOND)], begin(FIRST), "late pause", wsync.StateError, False),
    ([begin(SECOND), go_on(SECOND)], begin(FIRST), "late pause", wsync.StateError, False),
    ([begin(SECOND), begin("b2")], begin(FIRST), "late pause", wsync.StateError, False),
    # another update's turn
    ([], load("ab", "a1"), "not paused", wsync.StateError, False),
    ([], go_on("a1"), "not paused", wsync.StateError, False),
    ([], rename("x", "a1"), "not paused", wsync.StateError, False),
    ([begin()], load("ab", "a1"), "not paused", wsync.StateError, False),
    (OVER, load("ab", "a1"), "ended", Ended, False),
    ([*OVER, begin("b2")], go_on("a1"), "ended", Ended, False),
    ([*BEGAN, begin("b2")], load("b", "a1"), "ended", Ended, False),
    ([*BEGAN, begin()], load("b", "a1"), "ended", Ended, False),
    (BEGAN, load("ab"), "no id", wsync.StateError, False),
    (BEGAN, rename("x"), "no id", wsync.StateError, False),
    # the weights are not those of one update
    (BEGAN, go_on("a1"), "inconsistent", wsync.StateError, False),
    (BEGAN, go_on(), "inconsistent", wsync.StateError, False),
    (BEGAN, rename("x", "a1"), "inconsistent", wsync.StateError, False),
    ([begin(), load("a")], go_on(), "inconsistent", wsync.StateError, False),
    ([fail_midway], go_on(), "inconsistent", wsync.StateError, False),
    ([open_], go_on(), "inconsistent", wsync.StateError, False),
    ([commit], go_on(), "unnamed", wsync.StateError, False),
    ([commit], rename("x"), "unnamed", wsync.StateError, False),
    ([begin("a1"), load("ab", "a1")], go_on("a1"), "unnamed", wsync.StateError, False),
    ([begin("a1"), load("ab", "a1")], go_on(), "unnamed", wsync.StateError, False),
    # buckets where none may come
    ([], load("a"), "unpaused", Refused, False),
    ([begin(), go_on()], load("a"), "unpaused", Refused, False),
    ([begin(), fail()], load("a"), "unpaused", Refused, False),
    ([*BEGAN, fail("a1")], load("b", "a1"), "unpaused", Refused, False),
    ([begin(), replace], load("a"), "unpaused", Refused, False),
    ([begin(), commit], load("a"), "unpaused", Refused, False),
    ([begin(), load("a"), regroup()], load("b"), "unpaused", Refused, False),
    ([begin(), begin()], load("a"), "contested", Refused, False),
    ([begin(), begin()], load("a", version="1"), "contested", Refused, False),
    ([begin(), load("a"), begin()], load("b"), "contested", Refused, False),
    # the first said a version, the second did not come to say one
    ([*MIXED, begin()], load("a", version="1"), "contested", Refused, False),
    (MIXED, load("a", version="6"), "abandoned", Refused, False),
    (MIXED, load("b", version="6"), "abandoned", Refused, False),
    (MIXED, load("b"), "abandoned", Refused, False),
    ([*MIXED, load("b", version="1")], load("a", version="6"), "abandoned", Refused, False),
    ([*MIXED, load("b", version="1")], load("a"), "abandoned", Refused, False),
    (
        [*MIXED, load("b", version="1"), begin()],
        load("a", version="6"),
        "abandoned",
        Refused,
        False,
    ),
    # buckets that are another's, or repeated
    (BEGAN, load("a", "a1"), "repeated", Repeated, False),
    ([*BEGAN, load("b", "a1")], load("b", "a1"), "repeated", Repeated, False),
    ([*BEGAN, load("b", "a1")], load("ab", "a1"), "repeated", Repeated, False),
    (BEGAN, load("b", "a1", origin="g"), "repeated", Refused, False),
    ([begin(), load("a")], load("a"), "two trainers", Refused, True),
    ([begin(), load("a")], load("b", origin="g"), "two trainers", Refused, True),
    ([begin(), load("a", version="6")], load("b", version="7"), "two trainers", Refused, True),
    ([begin(), load("a"), load("b")], load("b"), "two trainers", Refused, True),
    # versions
    (
        [begin("a1")],
        load("a", "a1", "7"),
        "no version",
        wsync.StateError,
        True,
    ),
    ([], close(), "not committed", wsync.StateError, False),
    ([commit], close(number=2), "not committed", wsync.StateError, False),
    ([commit], close(session="0f"), "replaced", wsync.StateError, False),
    ([commit, replace], close(), "replaced", wsync.StateError, False),
    ([commit, load("ab")], close(), "replaced", wsync.StateError, False),
    ([commit, open_], close(), "inconsistent", wsync.StateError, False),
    ([], busy, "busy", wsync.StateError, False),
]
# which a thread of its own brings about; see below
ELSEWHERE = {"meanwhile"}


def pattern(text: str) -> str:
    """What a refusal matches, whatever its values are."""
    return "(.|\n)*".join(
        part for part in REFUSALS[text].replace("{", "\0").replace("}", "\0").split("\0")[::2]
    )


@pytest.mark.parametrize(("steps", "step", "text", "kind", "ends"), FORBIDDEN)
def test_what_is_refused_changes_nothing(
    steps: list[Step], step: Step, text: str, kind: type[Exception], ends: bool
) -> None:
    state = UpdateState()
    for former in steps:
        former(state)
    before = phase_of(state), weights(state), state.weight_version
    with pytest.raises(kind, match=pattern(text)) as caught:
        step(state)
    assert type(caught.value) is kind
    if ends:
        assert phase_of(state) == Phase.ENDED and state.weight_version == before[2]
        with pytest.raises(wsync.StateError):
            load("b", "a1" if text == "no version" else "")(state)
    else:
        assert (phase_of(state), weights(state), state.weight_version) == before


@pytest.mark.parametrize(
    ("steps", "step", "left"),
    [
        # the copy of an older bucket may have completed the update
        ([begin(), load("a"), load("b", version="6")], load("b", version="7"), LOST),
        ([begin(), load("a"), load("b")], load("b"), LOST),
        # every byte is known to be of one update
        ([begin(), load("a", version="7"), load("b", version="7")], load("a", version="6"), WHOLE),
        ([begin(), load("ab")], load("b"), WHOLE),
    ],
)
def test_weights_that_may_be_of_two_trainers_are_lost(
    steps: list[Step], step: Step, left: str
) -> None:
    state = UpdateState()
    for former in steps:
        former(state)
    assert weights(state) == WHOLE
    with pytest.raises(Refused, match=pattern("two trainers")):
        step(state)
    assert weights(state) == left


def test_every_refusal_is_tried() -> None:
    assert {text for _, _, text, _, _ in FORBIDDEN} | ELSEWHERE == REFUSALS.keys()


def test_an_update_may_follow_one_that_was_refused() -> None:
    """Whatever two trainers without ids have done, a whole update makes an end of it."""
    for steps, step, _, kind, _ in FORBIDDEN:
        state = UpdateState()
        for former in steps:
            former(state)
        with contextlib.suppress(kind):
            step(state)
        for following in (begin("c3"), load("a", "c3"), load("b", "c3", "9"), go_on("c3")):
            following(state)
        assert (phase_of(state), weights(state), state.weight_version) == (Phase.NONE, WHOLE, "9")


def test_a_bucket_gives_what_has_come_before_it() -> None:
    state = UpdateState()
    state.begin("")
    assert [load("a")(state), load("b")(state)] == [frozenset(), frozenset("a")]


@pytest.mark.parametrize(
    ("update", "versions", "before"),
    [
        ("a1", (None, "7"), "t"),
        ("", ("7", "7"), "t"),
        ("", (None, None), "t"),
        ("", ("6", "7"), ""),  # another trainer's
    ],
)
def test_another_name_of_a_tensor_has_come_before_a_bucket_of_all(
    update: str, versions: tuple[str | None, str | None], before: str
) -> None:
    state = UpdateState()
    state.begin(update)
    for names, version in zip((["t"], ["a", "b"]), versions, strict=True):
        with (
            state.serving(update, version),
            state.loading(names, {**TENSORS, "t": "a"}) as came,
        ):
            pass
    assert came == frozenset(before)
    assert (weights(state), state.weight_version) == (WHOLE, versions[1] or "unknown")


def test_a_request_of_wsyncs_that_does_not_complete_the_weights_takes_no_version() -> None:
    state = UpdateState()
    state.begin("a1")
    with pytest.raises(wsync.StateError, match=r"version 7 is not taken on: .* has yet to bring 1"):
        load("a", "a1", "7")(state)
    assert state.weight_version == "default"


def test_a_bucket_that_is_let_in_as_another_update_begins_is_none_of_its() -> None:
    state = UpdateState()
    begins = threading.Thread(target=state.begin, args=("b2",))

    class Names(list[str]):
        """Of which the update that pauses comes in the middle."""

        def __iter__(self) -> Iterator[str]:
            if not begins.ident:
                begins.start()
                begins.join(0.5)  # it has come, or waits
            return super().__iter__()

    state.begin("a1")
    load("a", "a1")(state)
    with contextlib.suppress(wsync.StateError), state.serving("a1", None):
        with state.loading(Names("b"), TENSORS):
            pass
    begins.join(PATIENCE)
    for step in (load("a", "b2"), load("b", "b2", "9")):
        assert not step(state) or state.consistent
    assert weights(state) == WHOLE


def test_a_request_belongs_to_the_update_that_it_was_let_in_for() -> None:
    state = UpdateState()
    state.begin("a1")
    load("a", "a1")(state)
    with pytest.raises(wsync.StateError, match=pattern("meanwhile")), state.serving("a1", None):
        state.begin("b2")
        with state.loading(["b"], TENSORS):
            pass
    # and ends no other one
    with pytest.raises(KeyError), state.serving("b2", None):
        state.begin("c3")
        raise KeyError("planted")
    for step in (load("a", "c3"), load("b", "c3", "9")):
        step(state)
    assert weights(state) == WHOLE


def test_a_request_is_let_in_and_its_turn_is_checked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = UpdateState()
    begins = threading.Thread(target=state.begin, args=("b2",))
    check = state._check_turn

    def pauses_next(update: str) -> None:
        check(update)
        begins.start()
        begins.join(0.5)  # it has come, or waits

    state.begin("a1")
    load("a", "a1")(state)
    with monkeypatch.context() as patch, contextlib.suppress(wsync.StateError):
        patch.setattr(state, "_check_turn", pauses_next)
        load("b", "a1")(state)
    begins.join(PATIENCE)
    for step in (load("a", "b2"), load("b", "b2", "9")):
        step(state)
    assert weights(state) == WHOLE


def test_what_is_forgotten_while_it_is_written_is_not_whole() -> None:
    state = UpdateState()
    state.begin("")
    load("a")(state)
    with state.serving("", None), state.loading(["b"], TENSORS):
        state.begin("b2")
    assert (phase_of(state), weights(state)) == (Phase.BEGUN, LOST)


def test_writing_excludes_everything_else() -> None:
    state = UpdateState()
    for way in (state.writing, state.replacing):
        with way("something"), pytest.raises(wsync.StateError, match="another update is running"):
            replace(state)
    state.restored()
    replace(state)
    assert weights(state) == WHOLE


class Watched(UpdateState):
    """Notes what another thread may read after every step since the weights were written to; it
    asks for the trouble first."""

    seen: list[str]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "consistent" and not value:
            self.__dict__["seen"] = []
        elif "seen" in self.__dict__ and not self.trouble:
            self.seen.append(self.weight_version)


@pytest.mark.parametrize(
    ("steps", "version"),
    [
        ([replace], "unknown"),
        ([replace_named], "disk"),
        ([begin("a1"), load("a", "a1"), load("b", "a1", "7")], "7"),
        ([begin(), load("a", version="7"), load("b")], "7"),
        ([begin(), load("ab")], "unknown"),
        ([commit, close()], "v3"),
    ],
)
def test_new_weights_never_bear_the_old_version(steps: list[Step], version: str) -> None:
    state = Watched()
    for step in steps:
        step(state)
    assert set(state.seen) == {version}
