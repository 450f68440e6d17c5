"""Whether weights are those of one update."""

from __future__ import annotations

import pytest

import wsync
from wsync.engine.update_state import UpdateState


def seen(state: UpdateState) -> tuple[str, bool, str]:
    return state.weight_version, state.consistent, state.trouble


def test_weights_are_called_what_the_closing_message_says() -> None:
    state = UpdateState()
    state.lose("update 3 is running")
    assert seen(state) == ("default", False, "the weights are inconsistent: update 3 is running")
    state.commit("f0", 3)
    unnamed = "update 3 is complete, but its version has not been given yet"
    assert seen(state) == ("default", True, unnamed)
    with pytest.raises(wsync.StateError, match=unnamed):
        state.check_whole()
    state.close("f0", 3, "v3")
    assert seen(state) == ("v3", True, "")
    state.check_whole()


@pytest.mark.parametrize(("session", "number"), [("f0", 2), ("f1", 3)])
def test_a_version_of_another_update_is_refused(session: str, number: int) -> None:
    state = UpdateState()
    state.commit("f0", 3)
    with pytest.raises(wsync.StateError, match=f"not those of update {number} of this connection"):
        state.close(session, number, "v")
    assert state.weight_version == "default"


def test_weights_that_are_lost_get_no_version() -> None:
    state = UpdateState()
    state.commit("f0", 3)
    state.lose("update 4 is running")
    with pytest.raises(wsync.StateError, match="update 4 is running"):
        state.close("f0", 3, "v3")


def test_the_bucket_with_the_version_is_the_last_one() -> None:
    state = UpdateState()
    state.lose("update 4 is running")
    state.bucket_loaded(None)
    assert not state.consistent
    state.bucket_loaded("5")
    assert seen(state) == ("5", True, "")


def test_writing_excludes_everything_else() -> None:
    state = UpdateState()
    with state.replacing("loading", None):
        for other in (state.only(), state.replacing("loading", None)):
            with pytest.raises(wsync.StateError, match="another update is running"), other:
                pass
    with state.only():
        pass
