"""Reads engines' answers: success or refusal in each of SGLang's forms, and texts of errors."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from wsync._core import (
    DeadlineError,
    PeerClosedError,
    RemoteError,
    UnsupportedError,
)
from wsync.machine.error_text import error_text

_TEXT_LIMIT: Final = 2000
_GOOD_STATUS: Final = ("ok", "success", "paused", "resumed")
# fields of SGLang's server_info and model_info that do not change while the engine runs
_IDENTITY: Final = (
    "random_seed",
    "model_type",
    "architectures",
    "tp_size",
    "pp_size",
    "dp_size",
    "nccl_port",
    "version",
    "startup_time",  # the seconds of each part of the start; SGLang 0.5.17 and newer
    "process",  # Ray's worker process, for an actor
)


def without_password(url: str) -> str:
    """A URL for texts: without the user and the password."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def identity_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The facts by which an engine differs from other engines, and from itself before a restart.
    wsync's own `instance` is enough.  An engine without `instance` has other facts: the process of
    an actor, or the arguments, startup times and random seed of an SGLang server."""
    if found.get("instance") is not None:
        return {"instance": found["instance"]}
    return {name: found[name] for name in _IDENTITY if found.get(name) is not None}


def drafts_itself(started: Mapping[str, Any]) -> bool:
    """Whether an SGLang server drafts tokens with layers of its model's own checkpoint (layers of
    multi-token prediction), which trainers have, too.  started: the server's arguments."""
    algorithm = str(started.get("speculative_algorithm")).upper()
    return algorithm in ("EAGLE", "NEXTN") and not other_draft(started)


def drafts_of(started: Mapping[str, Any]) -> int:
    """How many models of an SGLang server draft tokens with layers of its model's own checkpoint,
    and can be updated.  started: the server's arguments.

    Up to SGLang 0.5.20, a server with one model for each step ends when it is asked to update them.
    """
    if not drafts_itself(started) or not started.get("enable_multi_layer_eagle"):
        return int(drafts_itself(started))
    version = re.match(r"0\.(\d+)\.(\d+)", str(started.get("version")))
    old = version is not None and tuple(map(int, version.groups())) < (5, 21)
    return 0 if old else int(started.get("speculative_num_steps") or 1)


def other_draft(started: Mapping[str, Any]) -> str:
    """The folder of another model with which an SGLang server drafts tokens (EAGLE3, DFLASH).  This
    is "" if the server drafts with its own model or not at all.  started: the server's arguments.

    Up to SGLang 0.5.20 a load from disk changes model_path; tokenizer_path keeps the first folder.
    """
    draft = started.get("speculative_draft_model_path") or ""
    own = (started.get("model_path"), started.get("tokenizer_path"))
    return str(draft) if started.get("speculative_algorithm") and draft not in own else ""


def stages_of(started: Mapping[str, Any]) -> int:
    """The number of an SGLang server's pipeline stages.  started: the server's arguments."""
    return int(started.get("pp_size") or 1)


def ignores_pause(started: Mapping[str, Any], mode: str) -> str:
    """Says why a server does not pause in this mode of Options.pause_mode.  Returns "" if it
    does."""
    if (stages := stages_of(started)) == 1 or mode in ("abort", "auto"):
        return ""
    return (
        f"pp_size {stages}: SGLang's pipeline stages go on with their requests in "
        f"pause_mode={mode!r}: give pause_mode='abort'"
    )


def retracts(started: Mapping[str, Any]) -> bool:
    """Whether an SGLang server can empty its cache in pause_mode="retract".  Up to 0.5.22, requests
    that wait keep it from that (sglang#33783)."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(started.get("version")))
    version = tuple(map(int, found.groups())) if found else ()
    return version >= (0, 5, 23) and stages_of(started) == 1


class NotOfferedError(RemoteError):
    """An engine does not have the method that was called (over HTTP: status 404)."""


class Setup(NamedTuple):
    """The facts about an engine that a connection depends on.

    workers: the number in each pipeline stage.  loaders: custom weight loaders.  drafts: for an
    engine with such loaders, `drafts_of`.
    """

    workers: int
    loaders: tuple[str, ...] = ()
    drafts: int = 0
    stages: int = 1

    @staticmethod
    def of(name: str, started: Mapping[str, Any]) -> "Setup":
        """The setup of an SGLang server.

        Raises:
            UnsupportedError: the server has several HTTP processes.
            RemoteError: the server does not say how many workers it has.
        """
        processes = started.get("tokenizer_worker_num", 1)
        if processes not in (1, None):
            raise UnsupportedError(
                f"engine {name}: tokenizer_worker_num {processes}: each process keeps its own "
                "weight version, and an update reaches only one; start the server with one process"
            )
        workers = started.get("tp_size")
        if type(workers) is not int or workers < 1:
            vllm = f"; for a vLLM server, give {'vllm+' + name!r}"
            hint = vllm if name.startswith("http") else ""
            raise RemoteError(
                f"engine {name}: server_info: expected a number of workers as tp_size, "
                f"not {workers!r}{hint}"
            )
        found = started.get("custom_weight_loader")
        loaders = tuple(map(str, found)) if isinstance(found, list) else ()
        return Setup(workers, loaders, drafts_of(started) if loaders else 0, stages_of(started))

    def __str__(self) -> str:
        text = f"{self.workers} workers and custom weight loaders {list(self.loaders)}"
        text = text if self.stages == 1 else f"pp_size {self.stages}, {text}"
        models = "a model" if self.drafts == 1 else f"{self.drafts} models"
        return f"{text}, and {models} that draft with its layers" if self.drafts else text


def check_same(name: str, before: object, now: object) -> None:
    """Raises RemoteError if a restart has changed facts about an engine that a connection depends
    on."""
    if now != before:
        raise RemoteError(
            f"engine {name}: it was restarted with {now}, and had {before} before: connect again; "
            "if you made its handle yourself, make a new one"
        )


def refusal(answer: Any) -> str | None:
    """Returns None if an engine's answer means success.  Otherwise returns the engine's text.

    These mean success: None, True, {"success": True}, (True, message, ...), an object with
    `success`, and a list with one of these from each worker; {"status": "ok"}, SGLang's answer to
    pausing; and a `requests` Response with a good status, which slime's actors return.  Other
    mappings mean refusal: SGLang's error handlers answer {"object": "error", "message", "code"}.
    """
    if answer is None or answer is True:
        return None
    if answer is False:
        return "refused"
    if isinstance(answer, Mapping):
        good = answer.get("success") is True or (
            "success" not in answer and str(answer.get("status")).lower() in _GOOD_STATUS
        )
        return None if good else str(answer.get("message") or answer.get("error") or dict(answer))
    if isinstance(answer, list) and answer:
        return next((text for text in map(refusal, answer) if text is not None), None)
    if isinstance(answer, tuple) and answer:
        return None if answer[0] is True else str(answer[1] if len(answer) > 1 else answer)
    if hasattr(answer, "success"):
        return refusal((answer.success, getattr(answer, "message", answer)))
    good = getattr(answer, "ok", False) is True
    return None if good else answer if isinstance(answer, str) and answer else repr(answer)


def check_answer(name: str, what: str, answer: object) -> None:
    """Raises RemoteError if an engine's answer to the call `what` says that it failed."""
    reason = refusal(answer)
    if reason is not None:
        raise RemoteError(f"engine {name}: {what}: {cut(reason)}")


def translate(where: str, error: BaseException) -> BaseException:
    """Converts an engine's own error to one of wsync's."""
    text = f"{where}: {cut(error_text(error))}"
    if isinstance(error, TimeoutError):
        return DeadlineError(text if str(error) else f"{where}: no answer in time")
    if isinstance(error, ConnectionError | EOFError):
        return PeerClosedError(text)
    return RemoteError(text)


def json_or_text(text: str) -> Any:
    """The value of a JSON text; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_text(text: str) -> str:
    """The message inside an engine's answer."""
    answer = json_or_text(text)
    for key in ("message", "detail", "error"):
        if isinstance(answer, Mapping) and answer.get(key):
            answer = answer[key]
    return cut(answer if isinstance(answer, str) else json.dumps(answer))


def cause(error: BaseException) -> str:
    """The text of a connection's error."""
    text = cut(str(error)) or type(error).__name__
    return f"{text}; is this an http:// server?" if "WRONG_VERSION_NUMBER" in text else text


def cut(text: str, limit: int = _TEXT_LIMIT) -> str:
    """The beginning of a text, which may be a long traceback."""
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."
