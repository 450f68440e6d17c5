"""SGLang's update methods, which engines offer as HTTP endpoints, as methods or through Ray."""

import base64
import contextlib
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    StateError,
    UnsupportedError,
)
from wsync.handles.answers import NotOfferedError, check_answer, cut, drafts_of, refusal
from wsync.machine.deadline import POLL_SECONDS, Deadline, seconds
from wsync.messages.control import LOAD_FORMAT

_LOOKS_SECONDS: Final = 1.0  # that another program's session may last

_FLUSH_RETRY_SECONDS = 0.05


class ApiHandle(ABC):
    """The base class of these engines' handles (see wsync.handles.base.EngineHandle).  Subclasses
    define how one method is called.

    SGLang 0.5.23 takes tensors only inside a weight-update session.  The end of a session processes
    all weights as after a load from disk, even if they are not new.  So a session begins with an
    update's first tensors, and ends before the engine goes on.

    slime's SGLang has post_process_weights instead of sessions.  It is called only for weights that
    the engine rearranges after loading (see `rearranges`), as slime does for INT4.
    """

    name: str
    workers: int
    _serves = True  # whether the handle reaches an SGLang server

    def __init__(self, *, sessions: bool = False) -> None:
        self._started: dict[str, Any] = {}
        # whether this update's session is open; None: unknown, another session may be open
        self._begun: bool | None = None
        self._restored = False  # whether this update has made the weights ready for loading
        self._given_up = False  # whether this update was given up
        # calls of this update without an answer: engine and method
        self.unanswered: list[str] = []
        # shared by all updates.  known: whether the engine may have sessions.  left: whether a
        # session is open, perhaps since an update that failed
        self._sessions = {"known": sessions, "left": False, "rearranges": False}

    @property
    def started(self) -> dict[str, Any]:
        """The engine's arguments, if it reports them."""
        return self._started

    def during(self) -> Self:
        """A copy of this handle, for the requests of one update."""
        told = copy.copy(self)
        told._given_up, told.unanswered = False, []
        return told

    def give_up(self) -> None:
        """Makes no further calls for this update, because the next one may begin."""
        self._given_up = True

    def pause(self, mode: str, timeout: float) -> None:
        """Stops generation, and begins an update."""
        self._begun = None
        self._pause(mode, timeout)

    @contextlib.contextmanager
    def _asks(self, method: str) -> Iterator[str]:
        """Wraps a call of the engine; yields the name of the call for errors."""
        where = f"engine {self.name}: {method}"
        if self._given_up:
            raise StateError(f"{where}: not called, because its update was given up")
        self.unanswered.append(where)
        try:
            yield where
        finally:
            self.unanswered.remove(where)

    @abstractmethod
    def _call(self, method: str, timeout: float, /, **arguments: Any) -> Any:
        """Calls a method; returns the engine's answer, also a refusal.  Raises NotOfferedError if
        the engine has no such method."""

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Calls a method; raises if the engine refuses or does not answer."""
        check_answer(self.name, method, self._call(method, timeout, **arguments))

    def _pause(self, mode: str, timeout: float) -> None:
        """Stops generation.  Without a mode engines abort; slime's actors of 0.2.2 take no mode."""
        self._do("pause_generation", {} if mode == "abort" else {"mode": mode}, timeout)

    def _flush_once(self, timeout: float) -> str | None:
        """Empties the cache; returns None, or the reason why that is not possible yet."""
        return refusal(self._call("flush_cache", timeout))

    def _info(self, method: str, timeout: float) -> dict[str, Any]:
        """The answer of a method, which older versions call get_<method>."""
        deadline = Deadline(timeout)
        try:
            answer = self._call(method, deadline.left)
        except NotOfferedError:
            answer = self._call(f"get_{method}", deadline.left)
        if not isinstance(answer, Mapping):
            text = cut(str(answer))
            raise RemoteError(
                f"engine {self.name}: {method}: expected a JSON object, but it answered: {text}"
            )
        return dict(answer)

    @property
    def rearranging(self) -> bool:
        """What `rearranges` was called with."""
        return self._sessions["rearranges"]

    def rearranges(self, rearranges: bool) -> None:
        """Sets whether updates deliver weights that engines rearrange after loading.  They pack
        INT4 of compressed-tensors for a kernel, and cannot load into the packed tensors.  They copy
        the scales of MXFP8 and NVFP4, and only a new rearrangement updates these copies."""
        self._sessions["rearranges"] = rearranges

    def _session(self, method: str, timeout: float, **selector: str) -> object:
        """Begins or ends a session; returns the engine's answer, or None if it has no sessions."""
        if not self._sessions["known"]:
            return None
        try:
            return self._call(method, timeout, **selector)
        except NotOfferedError:
            self._sessions["known"] = False
            return None

    def _for_model(self) -> dict[str, Any]:
        """The arguments by which a request leaves drafts as they are, unless these are layers of
        the engine's model.  SGLang up to 0.5.20 reads disable_draft_model, newer versions read
        selector."""
        if drafts_of(self.started) or not self.started.get("speculative_algorithm"):
            return {}
        return {"disable_draft_model": True, "selector": "target"}

    def _reprocess(self, timeout: float, **steps: bool) -> bool:
        """Calls post_process_weights; returns False if the server does not have it.  An object in
        this process may lack it."""
        method = "post_process_weights"
        try:
            answer = self._call(method, timeout, **steps)
        except NotOfferedError:
            return not self._serves
        check_answer(self.name, method, answer)
        return True

    def _begin(self, timeout: float, load_format: object = None) -> float:
        """Begins a session unless this update has one; returns the rest of the timeout.  Uses a
        session that an earlier update has left open, because ending it would process the weights
        once more.  A worker with wsync's loader itself refuses what it cannot take."""
        sessions = self._sessions
        if self._begun or not (sessions["known"] or sessions["rearranges"]):
            return timeout
        deadline, method = Deadline(timeout), "begin_weight_update"
        self._restored = False
        wanted = {k: v for k, v in self._for_model().items() if k == "selector"}
        answer = self._session(method, deadline.left, **wanted)
        others = Deadline(_LOOKS_SECONDS)
        while refusal(answer) is not None and not sessions["left"] and others.left:
            time.sleep(POLL_SECONDS)  # another program's session ends soon
            answer = self._session(method, deadline.left, **wanted)
        if refusal(answer) is not None and not sessions["left"]:
            self._session("end_weight_update", deadline.left)
            check_answer(self.name, method, self._session(method, deadline.left, **wanted))
        if not sessions["known"] and sessions["rearranges"]:
            steps = {"restore_weights_before_load": True, "post_process_quantization": False}
            self._restored = self._reprocess(deadline.left, **steps)
            if not self._restored and load_format != LOAD_FORMAT:
                raise UnsupportedError(
                    f"engine {self.name}: rearranges weights of this form after loading, and "
                    "cannot do so again: it has neither weight-update sessions (SGLang 0.5.21 and "
                    "newer) nor post_process_weights (slime's SGLang)"
                )
        self._begun, sessions["left"] = True, sessions["known"]
        return deadline.left

    def _end(self, timeout: float) -> float:
        deadline, method = Deadline(timeout), "end_weight_update"
        if self._begun is None:  # the engine refuses this if no session is open
            self._session(method, deadline.left)
        if not self._begun:
            return deadline.left
        check_answer(self.name, method, self._session(method, deadline.left))
        if self._restored:
            steps = {"restore_weights_before_load": False, "post_process_quantization": True}
            again = self._reprocess(deadline.left, **steps)
            check_answer(self.name, "post_process_weights", again)
        self._begun = self._sessions["left"] = False
        return deadline.left

    @contextlib.contextmanager
    def asking(self, timeout: float) -> Iterator[None]:
        """Wraps a question to the workers, which is sent like weights but contains none.  It uses
        the open session, if there is one, or a session of a draft model, whose end leaves the main
        model alone."""
        if self._begun:  # by this update
            yield
            return
        deadline = Deadline(timeout)
        begun = self._session("begin_weight_update", timeout, selector="draft")
        self._begun = True
        try:
            yield
        finally:
            self._begun = False
            if refusal(begun) is None:
                self._session("end_weight_update", max(deadline.left, 1.0))

    def flush(self, timeout: float) -> None:
        """Asks again until the engine is idle."""
        deadline = Deadline(timeout)
        reason: str | None = None
        while reason is None or deadline.left:
            try:
                reason = self._flush_once(deadline.left)
            except DeadlineError:  # a later request had little time left
                if reason is None:
                    raise
                break
            if reason is None:
                return
            time.sleep(min(_FLUSH_RETRY_SECONDS, deadline.left))
        raise DeadlineError(
            f"engine {self.name}: flush_cache: the cache could not be emptied within "
            f"{seconds(timeout)}: {cut(reason)}"
        )

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        check_payloads(self.name, self.workers, payloads)
        timeout = self._begin(timeout, load_format)
        # SGLang's own flush inside an update asserts that the engine is idle; if it is not, the
        # server ends
        settings = {"load_format": load_format, "flush_cache": False, **_version(weight_version)}
        self._update(payloads, settings, timeout)

    def _update(self, payloads: Sequence[bytes], settings: dict[str, Any], timeout: float) -> None:
        texts = [base64.b64encode(data).decode() for data in payloads]
        arguments = {"serialized_named_tensors": texts, **settings}
        self._do("update_weights_from_tensor", arguments, timeout)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        deadline = Deadline(timeout)
        self._session("end_weight_update", timeout)  # an update with tensors may have left one
        self._begun = False
        arguments = {"model_path": path, **_version(weight_version)}
        self._do("update_weights_from_disk", arguments, deadline.left)

    def pull_weights(self, *, folder: str, source: str, number: int, timeout: float) -> None:
        """Makes each host of an engine bring its own copy of a checkpoint up to a version.  SGLang
        has this with slime's patch docker/patch/latest/sglang-pull_weights.patch.

        folder: of the copy.  source: the folder of versions.  number: in the version's name.
        """
        told = {"local_checkpoint_dir": folder, "source_dir": source, "target_version": number}
        method = "pull_weights"
        check_answer(self.name, method, self._call(method, timeout, **told))

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Calls another of SGLang's update methods."""
        if method == "update_weights_from_distributed":
            timeout = self._begin(timeout)
        self._do(method, arguments, timeout)

    def resume(self, timeout: float) -> None:
        self._do("continue_generation", {}, self._end(timeout))

    def model_info(self, timeout: float) -> dict[str, Any]:
        return self._info("model_info", timeout)

    def wait_for(self, version: int | str, *, timeout: float) -> None:
        """Waits until the engine reports a weight version, for example before a gateway sends it
        requests.

        timeout: in seconds.  After it, DeadlineError says which version the engine reports.
        """
        deadline, found = Deadline(timeout), "none"
        while True:
            with contextlib.suppress(PeerClosedError, DeadlineError):  # it may be starting
                found = str(self.model_info(deadline.left).get("weight_version"))
            if found == str(version):
                return
            deadline.check(f"engine {self.name}: it reports version {found}, and not {version}")
            time.sleep(min(POLL_SECONDS, deadline.left))

    def server_info(self, timeout: float) -> dict[str, Any]:
        """The engine's arguments."""
        return self._info("server_info", timeout)


def check_payloads(name: str, workers: int, payloads: Sequence[bytes]) -> None:
    """Raises InvalidArgumentError unless there is one payload for each worker of the engine."""
    if len(payloads) != workers:
        raise InvalidArgumentError(
            f"engine {name}: {len(payloads)} payloads for {workers} workers, which need one each"
        )


def _version(version: int | str | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}
