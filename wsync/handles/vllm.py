"""Handles of vLLM engines: an `LLM`, an `AsyncLLM`, a Ray actor around one, vLLM's own server as
"vllm+http://host:port", or anything else that has their collective_rpc.

The engine's workers are started with `--worker-extension-cls wsync.vllm.WorkerExtension`.  It is
paused and its caches are emptied where it offers that: `pause_generation` and `resume_generation`,
or a `sleep` that knows level 0 and a mode; `reset_prefix_cache`, with reset_connector where a KV
connector keeps more; `reset_encoder_cache` where the model sees images.  Made against vLLM 0.33.0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from wsync._core import RemoteError, UnsupportedError
from wsync.handles.answers import check_answer, check_same, cut, engine_text, json_or_text
from wsync.handles.local import LocalHandle
from wsync.handles.sglang_http import HttpHandle
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT, Control

_log = logging.getLogger(__name__)

EXTENSION: Final = "wsync.vllm.WorkerExtension"
_DESCRIBED: Final = {"rank", "workers", "engines"}
# the server's paths for what AsyncLLM's methods do; some take a body, and some versions lack some
_ROUTES: Final = {
    "collective_rpc": "/collective_rpc",
    "pause_generation": "/pause",
    "resume_generation": "/resume",
    "wake_up": "/wake_up",
    "reset_prefix_cache": "/reset_prefix_cache",
    "reset_encoder_cache": "/reset_encoder_cache",
    "update_weight_version": "/update_weight_version",
}
_BODIES: Final = ("collective_rpc", "update_weight_version")
_LATER: Final = ("wake_up", "reset_encoder_cache", "update_weight_version")
# vLLM's words for SGLang's; a retracted request is one that is kept without its cache
_MODES: Final = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VllmHandle(LocalHandle):
    """An object with vLLM's collective_rpc.

    Coroutines run in `loop`, or in the one of the engine's output handler, which some other thread
    has to drive; where there is neither, each in a loop of its own.
    """

    control_only = True

    def __init__(
        self,
        engine: Any,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the workers how many they are.

        Raises:
            RemoteError: they do not have the extension.
            UnsupportedError: calls do not reach all of them.
        """
        super().__init__(engine, workers=1)
        self.load_formats = (LOAD_FORMAT,)
        self._loop = loop
        self._mode = "abort"
        self._remote = callable(getattr(engine.collective_rpc, "remote", None))
        if self._remote:
            self.name = str(engine)
        # where old weights' work may lie, as the workers say; copies share it
        self._keeps: dict[str, Any] = {}
        self.workers = self._count(timeout)

    def look_anew(self, timeout: float) -> None:
        """Asks what the engine is, which may have been started again with other arguments.

        Raises:
            RemoteError: it has other workers than before.
            UnsupportedError: calls do not reach all of them any more.
        """
        check_same(self.name, self.workers, self._count(timeout))

    def _pause(self, mode: str, timeout: float) -> None:
        self._mode = mode
        word = _MODES.get(mode, mode)
        if self._has("pause_generation"):
            self._call("pause_generation", timeout, mode=word, clear_cache=False)
        elif self._sleeps():
            self._call("sleep", timeout, level=0, mode=word)

    def _flush_once(self, timeout: float) -> str | None:
        deadline, keeps, method = Deadline(timeout), self._keeps.get, "reset_prefix_cache"
        if self._has(method):
            arguments = {"reset_running_requests": True} if self._mode == "retract" else {}
            if keeps("kv_connector"):
                arguments["reset_connector"] = True
            if self._call(method, deadline.left, **arguments) is False:
                return "requests or a KV connector hold blocks of the prefix cache"
        elif keeps("prefix_cache"):
            raise UnsupportedError(
                f"engine {self.name}: has no {method}: prompts that it has seen before would be "
                "answered from the old weights' prefix cache; flush_cache=False lets it be so"
            )
        # what is kept by an image's hash; vLLM's cache of images themselves holds no weights' work
        if keeps("multimodal") and self._has("reset_encoder_cache"):
            self._call("reset_encoder_cache", deadline.left)
        return None

    def resume(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        if self._may_wake():  # versions that do not know the tag change nothing, and answer None
            awake = self._call("wake_up", deadline.left, tags=["scheduling"])
            if isinstance(awake, bool):
                return  # vLLM goes on unless some of its memory sleeps, and says whether it does
        if self._has("resume_generation"):
            self._call("resume_generation", deadline.left)

    def send_control(
        self, messages: Sequence[Control], *, weight_version: int | str | None, timeout: float
    ) -> None:
        """One call of all workers; see wsync.handles.base.send_control."""
        deadline = Deadline(timeout)
        told = [message.to_bytes().decode() for message in messages]
        version = None if weight_version is None else str(weight_version)
        for answer in self._ask_workers("wsync_update", timeout, told, version):
            good = isinstance(answer, list | tuple) and len(answer) == 2
            if not good or answer[0] is not True:
                check_answer(self.name, "wsync_update", (False, answer[1] if good else answer))
        if version is not None and self._has("update_weight_version"):
            self._call("update_weight_version", deadline.left, new_version=version)

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise RemoteError(f"engine {self.name}: {method}: vLLM takes wsync's control messages only")

    def model_info(self, timeout: float) -> dict[str, Any]:
        """The version, where the workers have one; instance: their processes, and which models
        they have."""
        found = self._describe(timeout)
        versions = {each.get("weight_version") for each in found}
        instances = [each["instance"] for each in found if each.get("instance")]
        return {
            "weight_version": versions.pop() if len(versions) == 1 else None,
            **({"instance": " ".join(instances)} if instances else {}),
        }

    def _count(self, timeout: float) -> int:
        try:
            found = self._describe(timeout)
        except RemoteError as error:
            raise RemoteError(
                f"{error} (are vLLM's workers started with --worker-extension-cls {EXTENSION}?)"
            ) from error
        first = found[0]
        if first["engines"] > 1:
            raise UnsupportedError(
                f"engine {self.name}: {first['engines']} data-parallel engines behind one "
                "collective_rpc, which answers only for the first of them"
            )
        self._keeps.clear()
        self._keeps |= first
        if first.get("drafts"):
            _log.warning(
                "engine %s: updates leave the layers of its model that draft tokens as they are",
                self.name,
            )
        ranks = [each["rank"] for each in found]
        if ranks != list(range(first["workers"])):
            raise UnsupportedError(
                f"engine {self.name}: collective_rpc reaches workers {ranks} of {first['workers']}"
            )
        return len(ranks)

    def _describe(self, timeout: float) -> list[dict[str, Any]]:
        """What every worker says of itself."""
        method = "wsync_describe"
        answers = self._ask_workers(method, timeout)
        found = [json_or_text(text) if isinstance(text, str) else text for text in answers]
        for each in found:
            if not isinstance(each, dict) or not each.keys() >= _DESCRIBED:
                raise RemoteError(f"engine {self.name}: {method}: a worker says {cut(str(each))!r}")
        return found

    def _ask_workers(self, method: str, timeout: float, *arguments: Any) -> list[Any]:
        """What every worker answers.  vLLM is given no timeout: it takes answers that come too
        late for those of the next call."""
        answers = self._call("collective_rpc", timeout, method=method, args=arguments)
        if not isinstance(answers, list | tuple) or not answers:
            raise RemoteError(f"engine {self.name}: {method}: workers answer {answers!r}")
        return list(answers)

    def _method(self, name: str) -> Any:
        """An LLM leaves some to its llm_engine."""
        inner = getattr(self._engine, "llm_engine", None)
        return getattr(self._engine, name, getattr(inner, name, None))

    def _has(self, name: str) -> bool:
        return callable(self._method(name))

    def _takes(self, name: str, argument: str) -> bool:
        """Whether a method of an object of this process has an argument."""
        return self._has(name) and argument in inspect.signature(self._method(name)).parameters

    def _sleeps(self) -> bool:
        """Whether sleeping is pausing: earlier versions and actors may give up the weights."""
        return not self._remote and self._takes("sleep", "mode")

    def _may_wake(self) -> bool:
        """Whether waking up can be going on.  An actor's wake_up may be another thing."""
        resumes = self._has("resume_generation") or self._sleeps()
        return resumes and not self._remote and self._takes("wake_up", "tags")

    def _invoke(self, method: str, timeout: float, arguments: dict[str, Any]) -> Any:
        if isinstance(self._engine, VllmServer):
            arguments["timeout"] = timeout
        answer = super()._invoke(method, timeout, arguments)
        if not inspect.iscoroutine(answer):
            return answer
        handler = getattr(self._engine, "output_handler", None)
        loop = self._loop or (handler.get_loop() if handler is not None else None)
        if loop is None:
            return asyncio.run(asyncio.wait_for(answer, timeout))
        return asyncio.run_coroutine_threadsafe(answer, loop).result(timeout)


class VllmServer:
    """vLLM's own server at a URL, as an object with the methods of an AsyncLLM, each of which has a
    timeout.

    It has to be started with VLLM_SERVER_DEV_MODE=1, which opens /collective_rpc to whoever can
    reach it.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._http = HttpHandle(url, workers=1, api_key=api_key)
        self.name = f"vllm+{self._http.name}"  # as it is given

    def __getattr__(self, name: str) -> Any:
        if name not in _ROUTES:
            raise AttributeError(name)
        return functools.partial(self._post, name)

    def wake_up(self, tags: Sequence[str], *, timeout: float) -> Any:
        """Whether all of it is awake; None where this version of vLLM does not say it."""
        return self._post("wake_up", tags=tags, timeout=timeout)

    def _post(self, method: str, /, *, timeout: float, **arguments: Any) -> Any:
        path, body = _ROUTES[method], None
        if "reset_connector" in arguments:
            arguments["reset_external"] = arguments.pop("reset_connector")
        if method in _BODIES:
            body = arguments
        elif arguments:
            path += f"?{urlencode(arguments, doseq=True)}"
        status, text = self._http.request("POST", path, body, timeout)
        if status == 404 and method in _LATER:
            return None
        if status != 200:
            unset = "; is VLLM_SERVER_DEV_MODE=1 set?" if status == 404 else ""
            hint = self._http.hint(status) or unset
            raise RemoteError(f"{path}: HTTP {status}: {engine_text(text)}{hint}")
        answer = json_or_text(text) if text else {}  # some paths of some versions say nothing
        if not isinstance(answer, dict):
            raise RemoteError(f"{path}: HTTP 200, but not vLLM's answer: {cut(text)!r}")
        if answer.get("status") in ("awake", "sleeping"):
            return answer["status"] == "awake"
        return answer.get("results", answer.get("success"))
