"""Handles: how a trainer reaches an inference engine's own API.

`handle(engine)` makes a handle for an HTTP URL (SGLang's endpoints), a Ray actor (slime's engine
actors), a local object with the same methods, an `sglang.Engine` in this process (verl's) or a vLLM
engine (wsync.handles.vllm).  `handle` returns an EngineHandle as it is.
All calls take a timeout in seconds.  They raise these errors, which name the engine:

    DeadlineError    no answer within the timeout
    PeerClosedError  the engine is not there, or went away during the call
    RemoteError      the engine refused or failed; carries its text

A timeout does not interrupt the method of an object in this process; updates stop waiting for it.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from wsync._core import InvalidArgumentError
from wsync.handles.answers import NotOfferedError, identity_of, retracts
from wsync.handles.local import LocalHandle, RayHandle, url_of
from wsync.handles.sglang_engine import SglangHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, Control


@runtime_checkable
class EngineHandle(Protocol):
    """One inference engine of `workers` tensor-parallel workers in each pipeline stage."""

    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def load_formats(self) -> tuple[str, ...]:
        """Custom weight loaders that the engine accepts as load_format."""
        ...

    def pause(self, mode: str, timeout: float) -> None:
        """Stops generation.  mode: "abort", "retract" or "in_place"."""

    def flush(self, timeout: float) -> None:
        """Empties the engine's cache; asks again until the engine is idle."""

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        """Sends one weight-update request with one pickled payload per worker."""

    def resume(self, timeout: float) -> None:
        """Continues generation."""

    def model_info(self, timeout: float) -> dict[str, Any]:
        """What the engine reports about its model, with "weight_version" if the engine knows it."""


def how_started(engine: EngineHandle, timeout: float) -> Mapping[str, Any]:
    """The arguments that an engine was started with; empty if it does not report them."""
    ask = getattr(type(engine), "server_info", None)
    if ask is None:
        return {}
    try:
        found = ask(engine, timeout)
    except NotOfferedError:
        return {}
    return found if isinstance(found, Mapping) else {}


def who_answers(engine: EngineHandle, deadline: Deadline) -> tuple[dict[str, Any], str | None]:
    """The engine's identity, if it tells one, and the version that it reports.

    SGLang answers server_info after its scheduler has done all earlier work.  So a load from disk
    that was given up has ended before the next load begins."""
    found: Mapping[str, Any] = engine.model_info(deadline.left) or {}
    version = found.get("weight_version")
    if not found.keys() & {"instance", "process"}:
        found = how_started(engine, deadline.left)
    return identity_of(found), None if version is None else str(version)


def pause_mode(engine: EngineHandle, wanted: str) -> str:
    """The mode of `EngineHandle.pause` for Options.pause_mode."""
    if wanted != "auto":
        return wanted
    known = isinstance(engine, HttpHandle) and retracts(engine.started)
    return "retract" if known else "abort"


def control_only(engine: EngineHandle) -> bool:
    """Whether an engine takes only wsync's control messages: no buckets, broadcasts or files.  Only
    True counts, because a user's handle may return anything for an attribute that it lacks."""
    return getattr(engine, "control_only", False) is True


def send_control(
    engine: EngineHandle,
    messages: Sequence[Control],
    *,
    weight_version: int | str | None,
    timeout: float,
) -> None:
    """Sends one request with a control message for each worker, stage by stage.  A handle with a
    method of this name gets the messages; other handles get them as payloads of a weight-update
    request.  SGLang gives a payload to one tensor-parallel rank of every pipeline stage."""
    if hasattr(type(engine), "send_control"):  # on the class: __getattr__ does not count
        own: Any = engine
        own.send_control(messages, weight_version=weight_version, timeout=timeout)
        return
    from wsync.messages import payload

    data = [message.to_bytes() for message in messages]
    payloads = [payload.control(*data[rank :: engine.workers]) for rank in range(engine.workers)]
    engine.update_weights(
        payloads, load_format=LOAD_FORMAT, weight_version=weight_version, timeout=timeout
    )


def show_drafts(engine: EngineHandle, timeout: float) -> None:
    """Makes SGLang call wsync's loader, without a message, with each model that drafts tokens with
    layers of the engine's model.  SGLang from 0.5.21 on calls it for these models last, so that an
    opening message would be too late for them."""
    from wsync.messages import payload

    nothing = [payload.control()] * engine.workers
    engine.update_weights(nothing, load_format=LOAD_FORMAT, weight_version=None, timeout=timeout)


def handle(
    engine: object,
    *,
    workers: int | None = None,
    api_key: str | None = None,
    timeout: float = 30.0,
) -> EngineHandle:
    """A handle for `engine`: a URL, a Ray actor, a local object, or an EngineHandle.

    A Ray actor with a method get_url, as slime's have, stands for the server at that URL.

    workers: number of tensor-parallel workers; by default the engine tells it (by its URL, an
    attribute `workers`, or an actor's get_url or server_info).  api_key: bearer key of a URL.
    timeout: seconds that the engine has to describe itself.
    """
    if workers is not None and workers < 1:
        raise InvalidArgumentError(f"workers={workers}: must be at least 1")
    if isinstance(engine, str):
        scheme, mark, place = engine.partition("://")
        engine = f"{scheme.lower()}{mark}{place}"
    if isinstance(engine, str) and engine.startswith("vllm+"):
        from wsync.handles.vllm import VllmServer

        engine = VllmServer(engine.removeprefix("vllm+"), api_key=api_key)
    made: EngineHandle
    if isinstance(engine, str):
        made = HttpHandle(engine, api_key=api_key, timeout=timeout)
    elif isinstance(engine, EngineHandle):
        made = engine
    else:
        made = _adapt(engine, workers, api_key, timeout)
    if workers is not None and workers != made.workers:
        raise InvalidArgumentError(
            f"engine {made.name}: it has {made.workers} workers, but workers={workers} was given"
        )
    return made


def _adapt(
    engine: object, workers: int | None, api_key: str | None, timeout: float
) -> EngineHandle:
    """A handle for an object with an engine's methods."""
    method = getattr(engine, "update_weights_from_tensor", None)
    if method is None and callable(getattr(engine, "collective_rpc", None)):
        from wsync.handles.vllm import VllmHandle

        return VllmHandle(engine, timeout=timeout)
    if method is None:
        url = getattr(engine, "url", None)
        hint = f"; give its url: {url!r}" if isinstance(url, str) and url else ""
        raise InvalidArgumentError(
            f"engine {engine!r}: neither a URL nor an object with update_weights_from_tensor or "
            f"collective_rpc{hint}"
        )
    if callable(getattr(method, "remote", None)):
        deadline = Deadline(timeout)
        if url := url_of(engine, timeout):
            return HttpHandle(url, api_key=api_key, timeout=deadline.left)
        return RayHandle(engine, workers=workers, timeout=deadline.left)
    if "named_tensors" in inspect.signature(method).parameters:
        return SglangHandle(engine, workers=workers)
    return LocalHandle(engine, workers=workers)


def handles_of(engines: Any, *, timeout: float, api_key: str | None = None) -> list[EngineHandle]:
    """Handles of a list of engines, or of the list that a callable returns.  Together the engines
    have `timeout` seconds to answer.

    Raises InvalidArgumentError if `engines` is no list, or if an engine is given twice, because it
    would wait for itself.  An engine that tells its identity is also found under two URLs.
    """
    deadline, given = Deadline(timeout), listed(engines)
    handles = [handle(engine, api_key=api_key, timeout=deadline.left) for engine in given]
    check_distinct(given, handles)
    for place, made in enumerate(handles):
        number(made, handles[:place])
    return handles


def check_distinct(given: Sequence[object], handles: Sequence[EngineHandle]) -> None:
    """Raises InvalidArgumentError if an engine is given twice; see `handles_of`."""
    known: dict[Any, str] = {}
    for engine, made in zip(given, handles, strict=True):
        for key in _identities(engine, made):
            if key in known:
                other = "" if known[key] == made.name else f": {known[key]} is the same engine"
                raise InvalidArgumentError(f"engine {made.name} is given twice{other}")
            known[key] = made.name


def listed(engines: Any) -> list[Any]:
    """The engines of a list, or of the list that a callable returns."""
    given = engines() if callable(engines) else engines
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgumentError(f"engines={given!r}: expected a list, [{given!r}]")
    return [*given]


def number(made: EngineHandle, others: Sequence[EngineHandle]) -> None:
    """Gives an object of this process a name that no other engine has."""
    names, name, count = {other.name for other in others}, made.name, 2
    while isinstance(made, LocalHandle) and made.name in names:
        made.name, count = f"{name} {count}", count + 1


def _identities(given: object, made: EngineHandle) -> list[Any]:
    """The keys by which an engine that is given twice is found."""
    own = made.name if isinstance(given, str) else id(given)
    instance = made.started.get("instance") if isinstance(made, HttpHandle) else None
    return [own] if instance is None else [own, instance]
