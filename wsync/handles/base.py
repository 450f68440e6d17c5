"""Handles: how a trainer reaches an inference engine's own API.

`handle(engine)` makes one from an HTTP URL (SGLang's endpoints), a Ray actor (slime's engine
actors), a local object with the same methods, an `sglang.Engine` of this process (as verl has
it), a vLLM engine (wsync.handles.vllm), or takes what already is an EngineHandle.
All calls take a timeout in seconds and raise, naming the engine:

    DeadlineError    no answer within the timeout
    PeerClosedError  the engine is not there, or went away during the call
    RemoteError      the engine refused or failed; carries its text

A method of an object of this process is not interrupted; an update does not wait for it longer.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from wsync._core import InvalidArgumentError
from wsync.handles.answers import NotOfferedError
from wsync.handles.local import LocalHandle, RayHandle, url_of
from wsync.handles.sglang_engine import SglangHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, Control


@runtime_checkable
class EngineHandle(Protocol):
    """One inference engine of `workers` tensor-parallel workers."""

    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def load_formats(self) -> tuple[str, ...]:
        """Weight loaders of its own that the engine accepts as load_format."""
        ...

    def pause(self, mode: str, timeout: float) -> None:
        """Stops generation; mode is the engine's word ("abort", "retract", "in_place")."""

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
        """One weight-update request with one pickled payload per worker."""

    def resume(self, timeout: float) -> None:
        """Lets generation go on."""

    def model_info(self, timeout: float) -> dict[str, Any]:
        """What the engine says of its model; has "weight_version" where the engine knows it."""


def how_started(engine: EngineHandle, timeout: float) -> Mapping[str, Any]:
    """How an engine says it was started; nothing where it does not."""
    ask = getattr(type(engine), "server_info", None)
    if ask is None:
        return {}
    try:
        found = ask(engine, timeout)
    except NotOfferedError:
        return {}
    return found if isinstance(found, Mapping) else {}


def control_only(engine: EngineHandle) -> bool:
    """Whether a handle says that its engine takes wsync's control messages alone: no buckets, no
    broadcasts and no files.  A user's handle may answer anything to a question that it does not
    know."""
    return getattr(engine, "control_only", False) is True


def send_control(
    engine: EngineHandle,
    messages: Sequence[Control],
    *,
    weight_version: int | str | None,
    timeout: float,
) -> None:
    """One request with a control message for each worker: as they are to a handle with a method of
    this name, else as the payloads of a weight-update request."""
    if hasattr(type(engine), "send_control"):  # and not by __getattr__
        own: Any = engine
        own.send_control(messages, weight_version=weight_version, timeout=timeout)
        return
    from wsync.messages import payload

    payloads = [payload.control(message.to_bytes()) for message in messages]
    engine.update_weights(
        payloads, load_format=LOAD_FORMAT, weight_version=weight_version, timeout=timeout
    )


def handle(
    engine: object,
    *,
    workers: int | None = None,
    gpus: int | None = None,
    api_key: str | None = None,
    timeout: float = 30.0,
) -> EngineHandle:
    """A handle for `engine`: a URL, a Ray actor, a local object, or an EngineHandle.

    A Ray actor with a method get_url, as slime's have, stands for the server at that URL.

    workers: number of tensor-parallel workers; asked of the engine where it can tell (a URL, an
    attribute `workers`, an actor's get_url or server_info).  gpus: of an actor's or object's
    engine, which are its workers where nobody says how many these are.  api_key: bearer key of a
    URL.  timeout: seconds that it has to say what it is.
    """
    if workers is not None and workers < 1:
        raise InvalidArgumentError(f"workers {workers}: at least 1")
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
        made = _adapt(engine, workers, gpus, api_key, timeout)
    if workers is not None and workers != made.workers:
        raise InvalidArgumentError(f"engine {made.name}: has {made.workers} workers, not {workers}")
    return made


def _adapt(
    engine: object, workers: int | None, gpus: int | None, api_key: str | None, timeout: float
) -> EngineHandle:
    """A handle for an object with an engine's methods."""
    method = getattr(engine, "update_weights_from_tensor", None)
    if method is None and callable(getattr(engine, "collective_rpc", None)):
        from wsync.handles.vllm import VllmHandle

        return VllmHandle(engine, timeout=timeout)
    if method is None:
        url = getattr(engine, "url", None)
        hint = f"; its url is one: {url!r}" if isinstance(url, str) and url else ""
        raise InvalidArgumentError(
            f"engine {engine!r}: neither a URL nor an object with update_weights_from_tensor or "
            f"collective_rpc{hint}"
        )
    if callable(getattr(method, "remote", None)):
        deadline = Deadline(timeout)
        if url := url_of(engine, timeout):
            return HttpHandle(url, api_key=api_key, timeout=deadline.left)
        return RayHandle(engine, workers=workers, gpus=gpus, timeout=deadline.left)
    if "named_tensors" in inspect.signature(method).parameters:
        return SglangHandle(engine, workers=workers)
    return LocalHandle(engine, workers=workers, gpus=gpus)


def handles_of(engines: Any, *, timeout: float, api_key: str | None = None) -> list[EngineHandle]:
    """Handles of a list of engines, or of the list that a callable returns.  Together they have
    `timeout` seconds to answer.

    Raises InvalidArgumentError for what is no list, and for an engine that is given twice, be it
    under two URLs where the engine tells an identity: it would wait for itself.
    """
    given = engines() if callable(engines) else engines
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgumentError(f"engines={given!r}: a list is wanted, [{given!r}]")
    handles: list[EngineHandle] = []
    known: dict[Any, str] = {}
    deadline = Deadline(timeout)
    for engine in given:
        made = handle(engine, api_key=api_key, timeout=deadline.left)
        for key in _identities(engine, made):
            if key in known:
                other = "" if known[key] == made.name else f": {known[key]} is the same one"
                raise InvalidArgumentError(f"engine {made.name} is given twice{other}")
            known[key] = made.name
        handles.append(made)
    return handles


def _identities(given: object, made: EngineHandle) -> list[Any]:
    """What is equal for one engine that is given twice."""
    own = made.name if isinstance(given, str) else id(given)
    instance = made.started.get("instance") if isinstance(made, HttpHandle) else None
    return [own] if instance is None else [own, instance]
