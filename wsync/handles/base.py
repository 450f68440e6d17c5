"""Handles: how a trainer reaches an inference engine's own API.

`handle(engine)` makes one from an HTTP URL (SGLang's endpoints), a Ray actor (slime's engine
actors), a local object with the same methods, an `sglang.Engine` of this process (as verl has
it), a vLLM engine (wsync.handles.vllm), or takes what already is an EngineHandle.
All calls take a timeout in seconds and raise, naming the engine:

    DeadlineError    no answer within the timeout
    PeerClosedError  the engine is not there, or went away during the call
    RemoteError      the engine refused or failed; carries its text
"""

import base64
import contextlib
import copy
import importlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.handles.answers import (
    cause,
    check_answer,
    cut,
    engine_text,
    json_or_text,
    refusal,
    retry_flush,
    seconds,
    translate,
)
from wsync.messages.control import LOAD_FORMAT, UPDATE_HEADER

_MAX_ANSWER_NBYTES: Final = 16 << 20
# what SGLang answers to a pause or a continue
_SAID: Final = ("status", "message")
# of SGLang's server_info and model_info, what does not change while it runs
_IDENTITY: Final = (
    "random_seed",
    "model_type",
    "architectures",
    "served_model_name",
    "tp_size",
    "pp_size",
    "dp_size",
    "nccl_port",
    "version",
)


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


def handle(
    engine: object,
    *,
    workers: int | None = None,
    api_key: str | None = None,
    timeout: float = 30.0,
) -> EngineHandle:
    """A handle for `engine`: a URL, a Ray actor, a local object, or an EngineHandle.

    workers: number of tensor-parallel workers; asked of the engine where it can tell (a URL, an
    attribute `workers`), required for Ray actors.  api_key: bearer key of a URL.  timeout: seconds
    that it has to say what it is.
    """
    if workers is not None and workers < 1:
        raise InvalidArgumentError(f"workers {workers}: at least 1")
    if isinstance(engine, str) and engine.startswith("vllm+"):
        from wsync.handles.vllm import VllmServer

        engine = VllmServer(engine.removeprefix("vllm+"), api_key=api_key)
    if isinstance(engine, str):
        return HttpHandle(engine, workers=workers, api_key=api_key, timeout=timeout)
    if isinstance(engine, EngineHandle):
        if workers is not None and workers != engine.workers:
            raise InvalidArgumentError(
                f"engine {engine.name}: has {engine.workers} workers, not {workers}"
            )
        return engine
    method = getattr(engine, "update_weights_from_tensor", None)
    if method is None and callable(getattr(engine, "collective_rpc", None)):
        from wsync.handles.vllm import VllmHandle

        return VllmHandle(engine, workers=workers, timeout=timeout)
    if method is None:
        url = getattr(engine, "url", None)
        hint = f"; its url is one: {url!r}" if isinstance(url, str) and url else ""
        raise InvalidArgumentError(
            f"engine {engine!r}: neither a URL nor an object with update_weights_from_tensor or "
            f"collective_rpc{hint}"
        )
    if callable(getattr(method, "remote", None)):
        return RayHandle(engine, workers=workers)
    if "named_tensors" in inspect.signature(method).parameters:
        return SglangHandle(engine, workers=workers)
    return LocalHandle(engine, workers=workers)


def handles_of(engines: Any, *, timeout: float, api_key: str | None = None) -> list[EngineHandle]:
    """Handles of a list of engines, or of what a callable returns; all of them together have
    `timeout` seconds to say what they are.

    Raises InvalidArgumentError for what is no list, and for an engine that is given twice, be it
    under two URLs where the engine tells an identity: it would wait for itself.
    """
    given = engines() if callable(engines) else engines
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgumentError(f"engines={given!r}: a list is wanted, [{given!r}]")
    handles: list[EngineHandle] = []
    known: dict[Any, str] = {}
    end = time.monotonic() + timeout
    for engine in given:
        made = handle(engine, api_key=api_key, timeout=max(end - time.monotonic(), 0.0))
        for key in _identities(engine, made):
            if key in known:
                other = "" if known[key] == made.name else f": {known[key]} is the same one"
                raise InvalidArgumentError(f"engine {made.name} is given twice{other}")
            known[key] = made.name
        handles.append(made)
    return handles


def _identities(given: object, made: EngineHandle) -> list[Any]:
    """What is equal for one engine that is given twice."""
    if isinstance(made, HttpHandle):
        return [_place(made.name), *filter(None, [made.instance])]
    return [_place(given)] if isinstance(given, str) else [id(given)]


def _place(url: str) -> str:
    """A URL, with one spelling for what stands for 127.0.0.1."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return url
    host = "127.0.0.1" if host in ("localhost", "0.0.0.0") else host
    port = port or {"http": 80, "https": 443}.get(parts.scheme.removeprefix("vllm+"))
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


class HttpHandle:
    """An engine behind SGLang's HTTP endpoints.

    Environment proxies are not used: the engine is reached directly.  Each call opens its own
    connection, so calls may run in several threads.  SGLang 0.5.23 takes weights only inside a
    weight-update session: one is open from `pause` to `resume` where the server knows them.
    """

    def __init__(
        self,
        url: str,
        *,
        workers: int | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the server for tp_size unless `workers` is given."""
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"engine {url!r}: a URL starts with http:// or https://")
        self.name = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._server: dict[str, Any] | None = None
        self._known = {"sessions": True}  # of the server, whichever update asks
        self._timeout = timeout
        self.workers = self._ask_workers() if workers is None else workers

    def __repr__(self) -> str:
        return f"HttpHandle({self.name!r})"

    def during(self, update: str) -> "HttpHandle":
        """The same handle, for the requests of one update; engines without wsync do not read its
        id."""
        told = copy.copy(self)
        told._headers = {**self._headers, UPDATE_HEADER: update}
        return told

    def identity(self, timeout: float) -> dict[str, Any]:
        """What tells this server from another one, or from itself before a restart: an instance of
        wsync's own, else how SGLang was started, with a random seed that it draws unless told."""
        end = time.monotonic() + timeout
        found = self._info(("/server_info", "/get_server_info"), timeout)
        if "instance" in found:
            return {"instance": found["instance"]}
        found = {**self.model_info(end - time.monotonic()), **found}
        return {name: found[name] for name in _IDENTITY if name in found}

    @property
    def load_formats(self) -> tuple[str, ...]:
        """What the server was started with as --custom-weight-loader."""
        loaders = self._server_info().get("custom_weight_loader")
        return tuple(map(str, loaders)) if isinstance(loaders, list) else ()

    @property
    def instance(self) -> str:
        """What the server calls itself, equal for all its URLs and no other server's; "" where it
        does not say (SGLang)."""
        instance = None
        with contextlib.suppress(RemoteError):  # not all servers know the path
            instance = self._server_info().get("instance")
        return instance if isinstance(instance, str) else ""

    def pause(self, mode: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._call("POST", "/pause_generation", {"mode": mode}, timeout, _SAID)
        try:
            self._session("/begin_weight_update", end)
        except RemoteError:  # a failed update left its session open
            self._session("/end_weight_update", end)
            self._session("/begin_weight_update", end)

    def flush(self, timeout: float) -> None:
        def flush_once(remaining: float) -> str | None:
            status, text = self.request("POST", "/flush_cache", None, remaining)
            if status not in (200, 400):
                raise self._failed("/flush_cache", status, text)
            if status == 200 and "flush" not in text.lower():
                raise self._strange("/flush_cache", text)
            return None if status == 200 else engine_text(text)

        retry_flush(self.name, flush_once, timeout)

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        _check_payloads(self.name, self.workers, payloads)
        body = _update_arguments(payloads, load_format, weight_version)
        if load_format == LOAD_FORMAT:  # for the model alone: until 0.5.17, and since
            body |= {"disable_draft_model": True, "selector": "target"}
        self._call("POST", "/update_weights_from_tensor", body, timeout)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        body = {**_disk_arguments(path, weight_version), "flush_cache": False}
        self._call("POST", "/update_weights_from_disk", body, timeout)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Another of SGLang's update endpoints, by name; never flushes, see _update_arguments."""
        self._call("POST", f"/{method}", {**arguments, "flush_cache": False}, timeout)

    def resume(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._session("/end_weight_update", end)
        self._call("POST", "/continue_generation", {}, end - time.monotonic(), _SAID)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return self._info(("/model_info", "/get_model_info"), timeout)

    def _server_info(self) -> dict[str, Any]:
        if self._server is None:
            self._server = self._info(("/server_info", "/get_server_info"), self._timeout)
        return self._server

    def _ask_workers(self) -> int:
        info = self._server_info()
        if info.get("pp_size", 1) not in (1, None):
            raise UnsupportedError(
                f"engine {self.name}: pp_size {info['pp_size']}: SGLang gives every pipeline "
                "stage the payload of its tensor-parallel rank, so stages cannot be told apart"
            )
        workers = info.get("tp_size")
        if type(workers) is not int or workers < 1:
            raise RemoteError(f"engine {self.name}: /server_info: tp_size is {workers!r}")
        return workers

    def _info(self, paths: tuple[str, str], timeout: float) -> dict[str, Any]:
        """The JSON object at the first path, or at the second where the first is unknown."""
        deadline = time.monotonic() + timeout
        path = paths[0]
        status, text = self.request("GET", path, None, timeout)
        if status == 404:
            path = paths[1]
            status, text = self.request("GET", path, None, deadline - time.monotonic())
        if status != 200:
            raise self._failed(path, status, text)
        try:
            info = json.loads(text)
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise RemoteError(f"engine {self.name}: {path}: not a JSON object: {cut(text)}")
        return info

    def _session(self, path: str, end: float) -> None:
        """Begins or ends a weight-update session; a server that knows none is not asked again."""
        if not self._known["sessions"]:
            return
        status, text = self.request("POST", path, {}, end - time.monotonic())
        if status == 404:
            self._known["sessions"] = False
        elif status != 200:
            raise self._failed(path, status, text)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        timeout: float,
        form: tuple[str, ...] = ("success",),
    ) -> None:
        """One request.  An answer without any field of `form` is nobody's who knows it."""
        status, text = self.request(method, path, body, timeout)
        if status != 200:
            raise self._failed(path, status, text)
        answer = json_or_text(text)
        check_answer(self.name, path, answer)
        if not isinstance(answer, dict) or not any(name in answer for name in form):
            raise self._strange(path, text)

    def _strange(self, path: str, text: str) -> RemoteError:
        return RemoteError(
            f"engine {self.name}: {path}: HTTP 200, but not an engine's answer: {cut(text)!r}"
        )

    def _failed(self, path: str, status: int, text: str) -> RemoteError:
        return RemoteError(f"engine {self.name}: {path}: HTTP {status}: {engine_text(text)}")

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, str]:
        """(status, text) of one exchange.  requests' timeout restarts with every byte; the
        deadline is kept by reading the answer in pieces."""
        import requests

        where = f"engine {self.name}: {path}"
        deadline = time.monotonic() + timeout
        if timeout <= 0:
            raise DeadlineError(f"{where}: no time left to ask")
        try:
            with requests.Session() as session:
                session.trust_env = False
                with session.request(
                    method,
                    self.name + path,
                    json=body,
                    headers=self._headers,
                    timeout=timeout,
                    allow_redirects=False,
                    stream=True,
                ) as response:
                    data = bytearray()
                    for piece in response.iter_content(1 << 16):
                        data += piece
                        if len(data) > _MAX_ANSWER_NBYTES:
                            raise RemoteError(f"{where}: answer over {_MAX_ANSWER_NBYTES} bytes")
                        if time.monotonic() > deadline:
                            raise DeadlineError(
                                f"{where}: answer not complete in {seconds(timeout)}"
                            )
                    return response.status_code, data.decode("utf-8", "replace")
        except requests.Timeout:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}") from None
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            # a read timeout inside the body arrives as a ConnectionError
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{where}: no answer within {seconds(timeout)}") from None
            raise PeerClosedError(f"{where}: {cause(error)}") from error
        except (requests.RequestException, ValueError) as error:
            raise RemoteError(f"{where}: {cut(str(error))}") from error


class LocalHandle:
    """An object in this process with slime's engine methods (pause_generation, flush_cache,
    continue_generation, update_weights_from_tensor).  Its attributes `name`, `workers` and
    `load_formats` are read where it has them.

    Each call runs in a thread of its own, so that a stalled engine costs its deadline only; the
    abandoned thread ends when the engine returns.
    """

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        self._engine = engine
        self.name = str(getattr(engine, "name", None) or f"{type(engine).__qualname__} object")
        if workers is None:
            workers = getattr(engine, "workers", 1)
        self.workers = int(workers or 1)
        self.load_formats: tuple[str, ...] = tuple(getattr(engine, "load_formats", ()))

    def pause(self, mode: str, timeout: float) -> None:
        # slime's actors of 0.2.2 take no mode; abort is what they do
        arguments = {} if mode == "abort" else {"mode": mode}
        self._checked("pause_generation", timeout, **arguments)

    def flush(self, timeout: float) -> None:
        def flush_once(remaining: float) -> str | None:
            answer = self._call("flush_cache", remaining)
            return refusal(answer)

        retry_flush(self.name, flush_once, timeout)

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        _check_payloads(self.name, self.workers, payloads)
        arguments = _update_arguments(payloads, load_format, weight_version)
        self._checked("update_weights_from_tensor", timeout, **arguments)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        arguments = _disk_arguments(path, weight_version)
        self._checked("update_weights_from_disk", timeout, **arguments)

    def identity(self, timeout: float) -> dict[str, Any]:
        """As HttpHandle.identity, where the engine says it."""
        for method in ("server_info", "get_server_info"):
            if hasattr(self._engine, method):
                found = self._call(method, timeout)
                if isinstance(found, Mapping):
                    return {name: found[name] for name in _IDENTITY if name in found}
        return {}

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """Another of slime's update methods, by name."""
        self._checked(method, timeout, **arguments)

    def resume(self, timeout: float) -> None:
        self._checked("continue_generation", timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        for method in ("model_info", "get_model_info"):
            if hasattr(self._engine, method):
                answer = self._call(method, timeout)
                if not isinstance(answer, Mapping):
                    raise RemoteError(f"engine {self.name}: {method}: {cut(repr(answer))}")
                return dict(answer)
        if hasattr(self._engine, "get_weight_version"):
            return {"weight_version": self._call("get_weight_version", timeout)}
        return {}

    def _checked(self, method: str, timeout: float, **arguments: Any) -> None:
        check_answer(self.name, method, self._call(method, timeout, **arguments))

    def _call(self, method: str, timeout: float, **arguments: Any) -> Any:
        function: Callable[..., Any] = getattr(self._engine, method)
        return self._run(lambda: function(**arguments), method, timeout)

    def _run(self, function: Callable[[], Any], what: str, timeout: float) -> Any:
        where = f"engine {self.name}: {what}"
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name=where, daemon=True)
        thread.start()
        thread.join(max(timeout, 0.0))
        if failure:
            raise translate(where, failure[0]) from failure[0]
        if not outcome:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}")
        return outcome[0]


class RayHandle(LocalHandle):
    """A Ray actor with slime's engine methods."""

    def __init__(self, engine: object, *, workers: int | None = None) -> None:
        super().__init__(engine, workers=workers)
        self.name = str(engine)
        if workers is None:
            raise InvalidArgumentError(
                f"engine {self.name}: say how many workers a Ray actor's engine has (workers=)"
            )

    def _call(self, method: str, timeout: float, **arguments: Any) -> Any:
        ray = importlib.import_module("ray")
        where = f"engine {self.name}: {method}"
        try:
            reference = getattr(self._engine, method).remote(**arguments)
            return ray.get(reference, timeout=max(timeout, 0.0))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(f"{where}: no answer within {seconds(timeout)}") from None
        except ray.exceptions.RayActorError as error:
            raise PeerClosedError(f"{where}: {cut(str(error))}") from error
        except ray.exceptions.RayTaskError as error:
            raise RemoteError(f"{where}: {cut(str(error))}") from error


class SglangHandle(LocalHandle):
    """An `sglang.Engine` of this process.

    Its update_weights_from_tensor serialises one list of tensors for all workers, so what differs
    between workers travels as SGLang's LocalSerializedTensor: a name, and for each worker a
    pickled tensor that this worker alone unpickles.  The request that carries a weight version is
    handed to the engine's tokenizer manager, because that method takes none.

    Such an engine generates when its owner asks it to, so nothing is paused; where SGLang knows
    weight-update sessions (0.5.23), one is open from `pause` to `resume`.  Made against SGLang
    0.5.17 and 0.5.23.
    """

    def __init__(self, engine: Any, *, workers: int | None = None) -> None:
        arguments = getattr(engine, "server_args", None)
        if workers is None:
            workers = getattr(arguments, "tp_size", 1)
        super().__init__(engine, workers=workers)
        loaders = getattr(arguments, "custom_weight_loader", None) or ()
        self.load_formats = tuple(map(str, loaders))

    def pause(self, mode: str, timeout: float) -> None:
        if not hasattr(self._engine, "begin_weight_update"):
            return
        end = time.monotonic() + timeout
        if refusal(self._call("begin_weight_update", timeout)) is not None:
            # a failed update left its session open
            self._checked("end_weight_update", end - time.monotonic())
            self._checked("begin_weight_update", end - time.monotonic())

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        _check_payloads(self.name, self.workers, payloads)
        arguments = {"load_format": load_format, "flush_cache": False}
        if weight_version is not None:
            request = _sglang("UpdateWeightsFromTensorReqInput", "managers.io_struct")(
                serialized_named_tensors=list(payloads),
                weight_version=str(weight_version),
                **arguments,
            )
            self._request("update_weights_from_tensor", request, timeout)
            return
        tensors: list[Any]
        if load_format == "flattened_bucket":  # taken as one payload per worker
            tensors = [base64.b64encode(data).decode() for data in payloads]
        else:
            from wsync.messages import payload

            form = _sglang(
                "LocalSerializedTensor",
                "model_executor.model_runner_components.weight_updater",
                "model_executor.model_runner",
            )
            tensors = [(name, form(values=values)) for name, values in payload.per_worker(payloads)]
        self._checked("update_weights_from_tensor", timeout, named_tensors=tensors, **arguments)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        form = _sglang("UpdateWeightFromDiskReqInput", "managers.io_struct")
        arguments = _disk_arguments(path, weight_version)
        if "flush_cache" in inspect.signature(form).parameters:
            arguments["flush_cache"] = False
        request = form(**arguments)
        self._request("update_weights_from_disk", request, timeout)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise UnsupportedError(
            f"engine {self.name}: {method}: an engine of the trainer's own process is not remote"
        )

    def resume(self, timeout: float) -> None:
        if hasattr(self._engine, "end_weight_update"):
            self._checked("end_weight_update", timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        if hasattr(self._engine, "get_model_info"):
            return super().model_info(timeout)
        return dict(self._call("get_server_info", timeout))

    def _request(self, method: str, request: Any, timeout: float) -> None:
        engine: Any = self._engine

        def send() -> Any:
            return engine.loop.run_until_complete(
                getattr(engine.tokenizer_manager, method)(request, None)
            )

        check_answer(self.name, method, self._run(send, method, timeout))


def _sglang(name: str, *modules: str) -> Any:
    """A class of the SGLang that is installed here, from the first module that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"sglang.srt.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise UnsupportedError(f"this version of sglang has no {name} in any of {', '.join(modules)}")


def _check_payloads(name: str, workers: int, payloads: Sequence[bytes]) -> None:
    if len(payloads) != workers:
        raise InvalidArgumentError(
            f"engine {name}: {len(payloads)} payloads for {workers} workers, one each is needed"
        )


def _update_arguments(
    payloads: Sequence[bytes], load_format: str | None, weight_version: int | str | None
) -> dict[str, Any]:
    """Arguments of SGLang's update_weights_from_tensor.

    flush_cache is always false: SGLang's own flush inside an update asserts that the engine is
    idle, and the assertion ends the server.
    """
    arguments: dict[str, Any] = {
        "serialized_named_tensors": [base64.b64encode(data).decode() for data in payloads],
        "load_format": load_format,
        "flush_cache": False,
    }
    if weight_version is not None:
        arguments["weight_version"] = str(weight_version)
    return arguments


def _disk_arguments(path: str, weight_version: int | str | None) -> dict[str, Any]:
    """Arguments of SGLang's and slime's update_weights_from_disk."""
    version = {} if weight_version is None else {"weight_version": str(weight_version)}
    return {"model_path": path, **version}
