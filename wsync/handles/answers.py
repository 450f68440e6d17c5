"""What engines answer: success or refusal, in any of the shapes that SGLang uses, and texts of
errors for a person to read."""

import json
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
# of SGLang's server_info and model_info, what does not change while it runs
_IDENTITY: Final = (
    "random_seed",
    "model_type",
    "architectures",
    "tp_size",
    "pp_size",
    "dp_size",
    "nccl_port",
    "version",
    "startup_time",  # how long each part of it took, from 0.5.17 on
    "process",  # of Ray's, that an actor is
)


def identity_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What tells an engine from another one, or from itself before a restart, of all that it says
    of itself: an `instance` of wsync's own, else how and in what times SGLang was started, with a
    random seed that it draws unless told, or which process an actor is."""
    if found.get("instance") is not None:
        return {"instance": found["instance"]}
    return {name: found[name] for name in _IDENTITY if found.get(name) is not None}


def drafts_itself(started: Mapping[str, Any]) -> bool:
    """Whether a server of SGLang, by how it was started, drafts tokens with layers of its model's
    own checkpoint: layers of multi-token prediction, which trainers have, too."""
    algorithm = str(started.get("speculative_algorithm")).upper()
    return algorithm in ("EAGLE", "NEXTN") and not other_draft(started)


def other_draft(started: Mapping[str, Any]) -> str:
    """The folder of another model that a server of SGLang drafts tokens with (EAGLE3, DFLASH), by
    how it was started; "" if it drafts with its own model or not at all.

    Until SGLang 0.5.20 a load from disk changes model_path.  tokenizer_path still has the first.
    """
    draft = started.get("speculative_draft_model_path") or ""
    own = (started.get("model_path"), started.get("tokenizer_path"))
    return str(draft) if started.get("speculative_algorithm") and draft not in own else ""


class NotOfferedError(RemoteError):
    """An engine has no method of this name."""


class Setup(NamedTuple):
    """What a connection goes by of how an engine was started.

    workers: of each pipeline stage.  loaders: custom ones of weights.  drafts: whether layers of
    its model are drafted with, which these loaders leave as they are, and buckets do not.
    """

    workers: int
    loaders: tuple[str, ...] = ()
    drafts: bool = False
    stages: int = 1

    @staticmethod
    def of(name: str, started: Mapping[str, Any]) -> "Setup":
        """Of SGLang's server.

        Raises:
            UnsupportedError: it has several HTTP processes.
            RemoteError: it does not say how many workers it has.
        """
        processes = started.get("tokenizer_worker_num", 1)
        if processes not in (1, None):
            raise UnsupportedError(
                f"engine {name}: tokenizer_worker_num {processes}: each process answers with a "
                "weight version of its own, and an update tells it to one of them: start it with 1"
            )
        workers = started.get("tp_size")
        if type(workers) is not int or workers < 1:
            vllm = f"; a server of vLLM is given as {'vllm+' + name!r}"
            hint = vllm if name.startswith("http") else ""
            raise RemoteError(f"engine {name}: server_info: tp_size is {workers!r}{hint}")
        found = started.get("custom_weight_loader")
        loaders = tuple(map(str, found)) if isinstance(found, list) else ()
        return Setup(
            workers, loaders, bool(loaders) and drafts_itself(started), started.get("pp_size") or 1
        )

    def __str__(self) -> str:
        text = f"{self.workers} workers and custom weight loaders {list(self.loaders)}"
        text = text if self.stages == 1 else f"pp_size {self.stages}, {text}"
        return f"{text}, drafting with layers of its model" if self.drafts else text


def check_same(name: str, before: object, now: object) -> None:
    """Raises RemoteError if an engine that may have been started again is not any more what a
    connection was made for."""
    if now != before:
        raise RemoteError(
            f"engine {name}: was started again with {now}, and had {before}: connect anew, by a "
            "new handle where you hold one"
        )


def refusal(answer: Any) -> str | None:
    """None if an engine's answer says success, else the engine's text.

    Success is None, True, {"success": True}, (True, message, ...), an object with `success`, or
    one of these from each worker in a list; {"status": "ok"}, which is SGLang's answer to pausing;
    and requests' Response of a good status, which is that of slime's actors.  Other mappings are
    not: SGLang's error handlers have {"object": "error", "message", "code"}.
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
    """An error of an engine's own as one of wsync's."""
    text = f"{where}: {cut(error_text(error))}"
    if isinstance(error, TimeoutError):
        return DeadlineError(text if str(error) else f"{where}: no answer in time")
    if isinstance(error, ConnectionError | EOFError):
        return PeerClosedError(text)
    return RemoteError(text)


def json_or_text(text: str) -> Any:
    """What JSON a text is, or the text."""
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
    """What the system said of a connection."""
    text = cut(str(error)) or type(error).__name__
    return f"{text}; is it http:// there?" if "WRONG_VERSION_NUMBER" in text else text


def cut(text: str, limit: int = _TEXT_LIMIT) -> str:
    """The beginning of a text, which may be a traceback of pages."""
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."
