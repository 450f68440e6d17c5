"""Handles of vLLM engines: an `LLM`, an `AsyncLLM`, a Ray actor around one, vLLM's own server as
"vllm+http://host:port", or anything else that has their collective_rpc.

The engine's workers are started with `--worker-extension-cls wsync.vllm.WorkerExtension`.  It is
paused and its cache is emptied where it offers that: `pause_generation` and `resume_generation`,
or a `sleep` that knows level 0 and a mode; `reset_prefix_cache`.  Made against vLLM 0.33.0.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from wsync._core import InvalidArgumentError, RemoteError, UnsupportedError
from wsync.handles.answers import engine_text, json_or_text
from wsync.handles.api import version_argument
from wsync.handles.http import HttpHandle
from wsync.handles.local import LocalHandle
from wsync.messages.control import LOAD_FORMAT, Control

EXTENSION: Final = "wsync.vllm.WorkerExtension"
_PATIENCE_SECONDS: Final = 3600.0
# vLLM's words for SGLang's; a retracted request is one that is kept without its cache
_MODES: Final = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VllmHandle(LocalHandle):
    """An object with vLLM's collective_rpc.

    Coroutines run in `loop`, or in the one of the engine's output handler, which some other thread
    has to drive; where there is neither, each in a loop of its own.
    """

    def __init__(
        self,
        engine: Any,
        *,
        workers: int | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the workers how many they are.

        Raises:
            RemoteError: they do not have the extension.
            UnsupportedError: calls do not reach all of them.
        """
        self._vllm = _Engine(engine, loop)
        super().__init__(self._vllm)
        self.workers = self._count(timeout)
        if workers is not None and workers != self.workers:
            raise InvalidArgumentError(
                f"engine {self.name}: has {self.workers} workers, not {workers}"
            )

    def send_control(
        self, messages: Sequence[Control], *, weight_version: int | str | None, timeout: float
    ) -> None:
        """One call of all workers; see wsync.handles.base.send_control."""
        told = [message.to_bytes().decode() for message in messages]
        self._do("update", {"messages": told, **version_argument(weight_version)}, timeout)

    def _count(self, timeout: float) -> int:
        try:
            found = self._run(self._vllm.describe, "wsync_describe", timeout)
        except RemoteError as error:
            raise RemoteError(
                f"{error} (are vLLM's workers started with --worker-extension-cls {EXTENSION}?)"
            ) from error
        first = found[0]
        if first["engines"] > 1:
            raise UnsupportedError(
                f"engine {self.name}: {first['engines']} data-parallel engines behind one "
                "collective_rpc, which answers for the first of them alone"
            )
        ranks = [each["rank"] for each in found]
        if ranks != list(range(first["workers"])):
            raise UnsupportedError(
                f"engine {self.name}: collective_rpc reaches workers {ranks} of {first['workers']}"
            )
        return len(ranks)


class VllmServer:
    """vLLM's own server at a URL, as an object with the methods of an AsyncLLM.

    It has to be started with VLLM_SERVER_DEV_MODE=1, which opens /collective_rpc to whoever can
    reach it.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._http = HttpHandle(url, workers=1, api_key=api_key)
        self.name = self._http.name

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        answer = self._post("/collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results")
        return results if isinstance(results, list) else []

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    def resume_generation(self) -> None:
        self._post("/resume")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        query = f"?reset_running_requests={str(reset_running_requests).lower()}"
        return self._post(f"/reset_prefix_cache{query}").get("success") is not False

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # whoever calls waits as long as it likes, in another thread
        status, text = self._http.request("POST", path, body, _PATIENCE_SECONDS)
        if status != 200:
            hint = "; is VLLM_SERVER_DEV_MODE=1 set?" if status == 404 else ""
            raise RemoteError(f"{path}: HTTP {status}: {engine_text(text)}{hint}")
        answer = json_or_text(text)
        return answer if isinstance(answer, dict) else {}


class _Engine:
    """slime's engine methods on behalf of a vLLM engine."""

    load_formats = (LOAD_FORMAT,)
    workers = 1

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.name = str(getattr(engine, "name", None) or f"{type(engine).__qualname__} object")
        self._engine = engine
        self._loop = loop
        self._mode = "abort"
        self._remote = callable(getattr(engine.collective_rpc, "remote", None))
        if self._remote:
            self.name = str(engine)

    def pause_generation(self, mode: str = "abort") -> None:
        self._mode = mode
        word = _MODES.get(mode, mode)
        if self._has("pause_generation"):
            self._call("pause_generation", mode=word, clear_cache=False)
        elif self._sleeps():
            self._call("sleep", level=0, mode=word)

    def flush_cache(self) -> Any:
        if not self._has("reset_prefix_cache"):
            return None
        arguments = {"reset_running_requests": True} if self._mode == "retract" else {}
        answer = self._call("reset_prefix_cache", **arguments)
        return (False, "requests hold blocks of the prefix cache") if answer is False else None

    def continue_generation(self) -> None:
        if self._has("resume_generation"):
            self._call("resume_generation")
        elif self._sleeps():
            self._call("wake_up", tags=["scheduling"])

    def update(self, messages: Sequence[str], weight_version: str | None = None) -> Any:
        for answer in self._ask("wsync_update", list(messages), weight_version):
            good = isinstance(answer, list | tuple) and len(answer) == 2
            if not good or answer[0] is not True:
                return False, str(answer[1] if good else answer)
        if weight_version is not None and self._has("update_weight_version"):
            self._call("update_weight_version", new_version=weight_version)
        return True, "Success"

    def update_weights_from_tensor(self, load_format: str | None, **_: Any) -> Any:
        return False, f"vLLM takes no weights in requests; load_format is {load_format!r}"

    def update_weights_from_disk(self, **_: Any) -> Any:
        return False, "vLLM engines are not updated through the disk"

    def model_info(self) -> dict[str, Any]:
        """The version, where the workers have one; instance: their processes, and which models
        they have."""
        found = self.describe()
        versions = {each["weight_version"] for each in found}
        instances = [each["instance"] for each in found if each.get("instance")]
        return {
            "weight_version": versions.pop() if len(versions) == 1 else None,
            **({"instance": " ".join(instances)} if instances else {}),
        }

    def describe(self) -> list[dict[str, Any]]:
        """What every worker says of itself."""
        return [json.loads(text) for text in self._ask("wsync_describe")]

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        # without a timeout: vLLM takes answers that come too late for those of the next call
        answers = self._call("collective_rpc", method=method, args=arguments)
        if not isinstance(answers, list | tuple) or not answers:
            raise RemoteError(f"{method}: workers answer {answers!r}")
        return list(answers)

    def _has(self, method: str) -> bool:
        return callable(getattr(self._engine, method, None))

    def _sleeps(self) -> bool:
        """Whether sleeping is pausing: earlier versions and actors may give up the weights."""
        if self._remote or not self._has("sleep"):
            return False
        return "mode" in inspect.signature(self._engine.sleep).parameters

    def _call(self, name: str, /, **arguments: Any) -> Any:
        function = getattr(self._engine, name)
        if self._remote:
            ray = importlib.import_module("ray")
            try:
                return ray.get(function.remote(**arguments))
            except ray.exceptions.RayActorError as error:
                raise ConnectionError(str(error)) from error
        answer = function(**arguments)
        if not inspect.iscoroutine(answer):
            return answer
        handler = getattr(self._engine, "output_handler", None)
        loop = self._loop or (handler.get_loop() if handler is not None else None)
        if loop is None:
            return asyncio.run(answer)
        return asyncio.run_coroutine_threadsafe(answer, loop).result()
