"""Handles of vLLM engines: an `LLM`, an `AsyncLLM`, a Ray actor around either, vLLM's own server
("vllm+http://host:port"), or any other object with their collective_rpc.

The engine must be started with `--worker-extension-cls wsync.vllm.WorkerExtension`.  An update uses
these methods, if the engine has them: `pause_generation` and `resume_generation`, or a `sleep` with
a mode; `reset_prefix_cache`, which also resets a KV connector; and `reset_encoder_cache` for a
model that sees images.  Written for vLLM 0.33.0.
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
_DESCRIBED: Final = {"rank", "workers", "engine", "engines"}
# the server's paths for AsyncLLM's methods
_ROUTES: Final = {
    "collective_rpc": "/collective_rpc",
    "pause_generation": "/pause",
    "resume_generation": "/resume",
    "wake_up": "/wake_up",
    "reset_prefix_cache": "/reset_prefix_cache",
    "reset_encoder_cache": "/reset_encoder_cache",
    "update_weight_version": "/update_weight_version",
}
_BODIES: Final = ("collective_rpc", "update_weight_version")  # these take a body
_LATER: Final = ("wake_up", "reset_encoder_cache", "update_weight_version")  # of newer versions
# vLLM's modes for SGLang's; "retract" keeps requests without their cache
_MODES: Final = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VllmHandle(LocalHandle):
    """An object with vLLM's collective_rpc.

    Coroutines run in `loop`, or in the loop of the engine's output handler; another thread must run
    that loop.  If there is neither, each coroutine runs in a new loop.
    """

    control_only = True

    def __init__(
        self,
        engine: Any,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the engine how many workers it has.

        Raises:
            RemoteError: the workers do not have the extension.
            UnsupportedError: calls do not reach all workers.
        """
        super().__init__(engine, workers=1)
        self.load_formats = (LOAD_FORMAT,)
        self._loop = loop
        self._mode = "abort"
        self._remote = callable(getattr(engine.collective_rpc, "remote", None))
        if self._remote:
            self.name = str(engine)
        # which caches may hold results of old weights, as the workers say; copies share this
        self._keeps: dict[str, Any] = {}
        self.workers = self._count(timeout)

    def look_anew(self, timeout: float) -> None:
        """Asks for the workers of an engine that may have been restarted with other arguments.

        Raises:
            RemoteError: the engine has more or fewer workers than before.
            UnsupportedError: calls do not reach all workers any more.
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
                f"engine {self.name}: has no {method}: for known prompts it would use the prefix "
                "cache of the old weights; Options(flush_cache=False) allows this"
            )
        # the encoder's results by image; vLLM's cache of images holds no results of weights
        if keeps("multimodal") and self._has("reset_encoder_cache"):
            self._call("reset_encoder_cache", deadline.left)
        return None

    def resume(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        if self._may_wake():  # versions without this tag change nothing, and answer None
            awake = self._call("wake_up", deadline.left, tags=["scheduling"])
            if isinstance(awake, bool):
                return  # vLLM has gone on, unless some of its memory still sleeps
        if self._has("resume_generation"):
            self._call("resume_generation", deadline.left)

    def send_control(
        self, messages: Sequence[Control], *, weight_version: int | str | None, timeout: float
    ) -> None:
        """Calls all workers once; see wsync.handles.base.send_control."""
        deadline = Deadline(timeout)
        told = [message.to_bytes().decode() for message in messages]
        version = None if weight_version is None else str(weight_version)
        first = self._keeps["engine"]
        for answer in self._ask_workers("wsync_update", timeout, told, version, first):
            good = isinstance(answer, list | tuple) and len(answer) == 2
            if not good or answer[0] is not True:
                check_answer(self.name, "wsync_update", (False, answer[1] if good else answer))
        if version is not None and self._has("update_weight_version"):
            self._call("update_weight_version", deadline.left, new_version=version)

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise RemoteError(f"engine {self.name}: {method}: vLLM takes only wsync's control messages")

    def model_info(self, timeout: float) -> dict[str, Any]:
        """weight_version: the workers' version, if all have the same.  instance: the workers'
        processes and models, if they report them."""
        found = self._describe(timeout)
        versions = {each.get("weight_version") for each in found}
        instances = [each["instance"] for each in found if each.get("instance")]
        return {
            "weight_version": versions.pop() if len(versions) == 1 else None,
            **({"instance": " ".join(instances)} if instances else {}),
        }

    def _count(self, timeout: float) -> int:
        deadline = Deadline(timeout)
        try:
            found = self._describe(deadline.left)
        except RemoteError as error:
            raise RemoteError(
                f"{error} (was vLLM started with --worker-extension-cls {EXTENSION}?)"
            ) from error
        first = found[0]
        if first.get("obstacle"):
            raise UnsupportedError(f"engine {self.name}: {first['obstacle']}")
        engines = self._engines(first, deadline.left)
        self._keeps.clear()
        self._keeps |= first
        if first.get("drafts"):
            _log.warning(
                "engine %s: updates do not change the layers of its model that draft tokens",
                self.name,
            )
        ranks = [each["rank"] for each in found]
        if ranks != list(range(first["workers"])):
            raise UnsupportedError(
                f"engine {self.name}: collective_rpc reaches only workers {ranks} of "
                f"{first['workers']}"
            )
        return engines * len(ranks)

    def _engines(self, first: Mapping[str, Any], timeout: float) -> int:
        """The number of data-parallel engines that each call reaches, although vLLM returns only
        the first one's answer.  first: what a worker of the first engine says."""
        if first.get("alone"):
            return 1
        if first["engines"] > 1:
            raise UnsupportedError(
                f"engine {self.name}: it has {first['engines']} data-parallel engines of a model "
                "with experts, but one collective_rpc, which answers only for the first engine"
            )
        if isinstance(self._engine, VllmServer):
            told = int(self._call("get_world_size", timeout) or 0) // int(first["workers"])
        else:  # of an AsyncLLM
            core = getattr(self._engine, "engine_core", None)
            told = len(getattr(core, "engine_ranks_managed", ()))
        if not told:  # as of an actor: another engine than the first one raises
            self._ask_workers("wsync_describe", timeout, first["engine"])
        return max(told, 1)

    def _describe(self, timeout: float) -> list[dict[str, Any]]:
        """What every worker reports about itself."""
        method = "wsync_describe"
        answers = self._ask_workers(method, timeout)
        found = [json_or_text(text) if isinstance(text, str) else text for text in answers]
        for each in found:
            if not isinstance(each, dict) or not each.keys() >= _DESCRIBED:
                raise RemoteError(
                    f"engine {self.name}: {method}: expected a mapping with the keys "
                    f"{', '.join(sorted(_DESCRIBED))}, but a worker answered {cut(str(each))!r}"
                )
        return found

    def _ask_workers(self, method: str, timeout: float, *arguments: Any) -> list[Any]:
        """Calls a method of every worker; returns their answers.  vLLM gets no timeout, because it
        takes late answers for answers to the next call."""
        answers = self._call("collective_rpc", timeout, method=method, args=arguments)
        if not isinstance(answers, list | tuple) or not answers:
            raise RemoteError(
                f"engine {self.name}: {method}: expected a list of the workers' answers, "
                f"but vLLM answered {cut(str(answers))!r}"
            )
        return list(answers)

    def _method(self, name: str) -> Any:
        """The engine's method, or that of an LLM's llm_engine; None if neither has it."""
        inner = getattr(self._engine, "llm_engine", None)
        return getattr(self._engine, name, getattr(inner, name, None))

    def _has(self, name: str) -> bool:
        return callable(self._method(name))

    def _takes(self, name: str, argument: str) -> bool:
        """Whether an object in this process has a method with this argument."""
        return self._has(name) and argument in inspect.signature(self._method(name)).parameters

    def _sleeps(self) -> bool:
        """Whether `sleep` only pauses: in earlier versions and actors it may drop the weights."""
        return not self._remote and self._takes("sleep", "mode")

    def _may_wake(self) -> bool:
        """Whether `wake_up` can continue generation.  An actor's wake_up may do something else."""
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
    """vLLM's own server at a URL, as an object with the methods of an AsyncLLM.  Each method takes
    a timeout.

    The server must be started with VLLM_SERVER_DEV_MODE=1, which opens /collective_rpc to everyone
    who can reach the server.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._http = HttpHandle(url, workers=1, api_key=api_key)
        self.name = f"vllm+{self._http.name}"  # as the user gives it

    def __getattr__(self, name: str) -> Any:
        if name not in _ROUTES:
            raise AttributeError(name)
        return functools.partial(self._post, name)

    def get_world_size(self, *, timeout: float) -> Any:
        """The number of all engines' workers; None if this version of vLLM does not tell."""
        status, text = self._http.request("GET", "/get_world_size", None, timeout)
        return None if status != 200 else json_or_text(text)["world_size"]

    def wake_up(self, tags: Sequence[str], *, timeout: float) -> Any:
        """Whether the whole engine is awake; None if this version of vLLM does not tell."""
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
        answer = json_or_text(text) if text else {}  # some versions answer some paths with no text
        if not isinstance(answer, dict):
            raise RemoteError(f"{path}: HTTP 200, but not vLLM's answer: {cut(text)!r}")
        if answer.get("status") in ("awake", "sleeping"):
            return answer["status"] == "awake"
        return answer.get("results", answer.get("success"))
