"""SGLang's HTTP endpoints."""

import contextlib
import functools
import re
import threading
from collections.abc import Mapping
from http.client import HTTPException, InvalidURL
from typing import Any, Final, Self
from urllib.parse import urlsplit

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
)
from wsync.handles.answers import (
    Setup,
    cause,
    check_answer,
    check_same,
    cut,
    engine_text,
    json_or_text,
)
from wsync.handles.http_connections import Connections
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.deadline import Deadline, seconds

_MAX_ANSWER_NBYTES: Final = 16 << 20
# what SGLang answers with a status, and without flush_cache
_STEERING: Final = ("pause_generation", "continue_generation")


class HttpHandle(ApiHandle):
    """An engine behind SGLang's HTTP endpoints.

    Environment proxies are not used: the engine is reached directly.  Calls may run in several
    threads.  The requests of an update share connections; each other one has its own.
    """

    def __init__(
        self,
        url: str,
        *,
        workers: int | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the server for tp_size unless `workers` is given, which is compared with it later.

        A URL may have a user and a password, for a proxy in front of the engine; its name has not.

        Raises InvalidArgumentError for an api_key that no HTTP header can have.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(
                f"engine {url!r}: a URL starts with http://, https:// or vllm+http://"
            )
        super().__init__(sessions=True)  # until the server says that it knows none
        self._url = url.rstrip("/")
        self.name = _without_user(self._url)
        if self.name != self._url and api_key:
            raise InvalidArgumentError(
                f"engine {self.name}: a URL with a user, and an api_key: requests carry one"
            )
        self._headers = {"Authorization": f"Bearer {_checked_key(api_key)}"} if api_key else {}
        self._server: dict[str, Any] = {}  # as it was started; copies share it
        self._known: set[str] = set()  # what it has answered for, of what not all engines have
        self._timeout = timeout
        try:
            self._http = self._connections(kept=False)
        except ValueError as error:
            raise InvalidArgumentError(f"engine {self.name}: {error}") from error
        self._said = workers
        self.workers = self._setup.workers if workers is None else workers

    def __repr__(self) -> str:
        return f"HttpHandle({self.name!r})"

    def during(self) -> Self:
        """The same handle, for the requests of one update.  Where the update before has failed,
        what the engine seemed not to know is asked for anew."""
        self._sessions["known"] |= not self._sessions["resumed"]
        self._sessions["resumed"] = False
        told = super().during()
        told._http = self._connections(kept=True)
        return told

    def resume(self, timeout: float) -> None:
        super().resume(timeout)
        self._http.close()  # as servers do with idle connections

    @property
    def started(self) -> dict[str, Any]:
        """How the server was started."""
        return self._server_info()

    @property
    def load_formats(self) -> tuple[str, ...]:
        """What the server was started with as --custom-weight-loader."""
        return self._setup.loaders

    @property
    def instance(self) -> str:
        """What the server calls itself, equal for all its URLs and no other server's; "" where it
        does not say (SGLang)."""
        instance = None
        with contextlib.suppress(RemoteError):  # not all servers know the path
            instance = self._server_info().get("instance")
        return instance if isinstance(instance, str) else ""

    def look_anew(self, timeout: float) -> None:
        """Asks what the server is, which may have been started again with other arguments.

        Raises:
            RemoteError: it has other workers or custom weight loaders than before, or drafts now.
            UnsupportedError: it has several HTTP processes now.
        """
        if not self._server:
            return
        found = self.server_info(timeout)
        check_same(self.name, self._setup, Setup.of(self.name, found, self._said))
        if found.get("version") != self._server.get("version"):  # it may know less
            self._known.clear()
            self._sessions["known"] = True
        self._server.clear()
        self._server |= found

    def _pause(self, mode: str, timeout: float) -> None:
        self._do("pause_generation", {"mode": mode}, timeout)

    def _flush_once(self, timeout: float) -> str | None:
        status, text = self.request("POST", "/flush_cache", None, timeout)
        if status not in (200, 400):
            raise self._failed("/flush_cache", status, text)
        if status == 200 and "flush" not in text.lower():
            raise self._strange("/flush_cache", text)
        return None if status == 200 else engine_text(text)

    def _server_info(self) -> dict[str, Any]:
        if not self._server:
            self._server |= self.server_info(self._timeout)
        return self._server

    @property
    def _setup(self) -> Setup:
        return Setup.of(self.name, self._server_info(), self._said)

    def _info(self, methods: tuple[str, ...], timeout: float) -> dict[str, Any]:
        deadline = Deadline(timeout)
        for path in (f"/{method}" for method in methods):
            status, text = self.request("GET", path, None, deadline.left)
            if status != 404:
                break
        self.lacks(methods[0], status)
        if status != 200:
            raise self._failed(path, status, text)
        info = json_or_text(text)
        if not isinstance(info, dict):
            raise RemoteError(f"engine {self.name}: {path}: not a JSON object: {cut(text)}")
        return info

    def _session(self, method: str, timeout: float, **selector: str) -> object:
        if not self._sessions["known"]:
            return None
        status, text = self.request("POST", f"/{method}", selector, timeout)
        lacks = self.lacks("sessions", status)
        if status not in (200, 400) and not lacks:
            raise self._failed(f"/{method}", status, text)
        self._sessions["known"] = not lacks
        return None if lacks else json_or_text(text)

    def _reprocess(self, timeout: float, **steps: bool) -> bool:
        path = "/post_process_weights"
        status, text = self.request("POST", path, steps, timeout)
        if self.lacks(path, status):
            return False
        if status not in (200, 400):
            raise self._failed(path, status, text)
        check_answer(self.name, path, json_or_text(text))
        return True

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        """One request.  An answer of another form is not an engine's."""
        path, body = f"/{method}", dict(arguments)
        says = "status"
        if method not in _STEERING:
            body["flush_cache"] = False
            says = "success"
        if method == "update_weights_from_disk" and self.started.get("load_format") == "dummy":
            body["load_format"] = "auto"  # by its own it would load none, and refuses
        if method in ("update_weights_from_tensor", "update_weights_from_distributed"):
            body |= self._for_model(body.get("load_format"))
        status, text = self.request("POST", path, body, timeout)
        if status != 200:
            raise self._failed(path, status, text)
        answer = json_or_text(text)
        if not isinstance(answer, dict) or says not in answer:
            raise self._strange(path, text)
        check_answer(self.name, path, answer)

    def lacks(self, what: str, status: int) -> bool:
        """Whether a status says that the engine does not know something that not all have.  What
        it has answered for it knows: then a 404 is a gateway's, which learns its paths anew."""
        if status in (200, 400):  # which is SGLang's refusal
            self._known.add(what)
        return status == 404 and what not in self._known

    def hint(self, status: int) -> str:
        """What a status may come of: no key, or a URL with a path, as clients of OpenAI want it."""
        if status == 401:
            return "; api_key= of wsync.connect or wsync.handle gives the key of a server"
        parts = urlsplit(self.name)
        if status != 404 or not parts.path:
            return ""
        return f"; is the server's root URL {parts.scheme}://{parts.netloc}?"

    def _strange(self, path: str, text: str) -> RemoteError:
        return RemoteError(
            f"engine {self.name}: {path}: HTTP 200, but not an engine's answer: {cut(text)!r}"
        )

    def _failed(self, path: str, status: int, text: str) -> RemoteError:
        said = f"{path}: HTTP {status}: {engine_text(text)}{self.hint(status)}"
        error = RemoteError(f"engine {self.name}: {said}")
        error.native = status
        return error

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, str]:
        """(status, text) of one exchange."""
        where = f"engine {self.name}: {path}"
        if not timeout < threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"{where}: no system can wait for timeout={timeout!r}")
        if not timeout > 0:
            raise DeadlineError(f"{where}: no time left to ask")
        exchange = functools.partial(self._exchange, where, method, path, body, Deadline(timeout))
        return self._run(where, exchange, timeout).result()

    def _exchange(
        self, where: str, method: str, path: str, body: Any, deadline: Deadline
    ) -> tuple[int, str]:
        """The deadline is that of each read; who waits for the whole has its own."""
        try:
            status, data = self._http.request(
                method, path, body, deadline.left, _MAX_ANSWER_NBYTES + 1
            )
        except (InvalidURL, UnicodeError) as error:
            raise RemoteError(f"{where}: {cut(str(error))}") from error
        except (OSError, HTTPException) as error:
            timed_out = isinstance(error, TimeoutError) and error.errno is None
            if timed_out or not deadline.left:
                late = f"{where}: no answer within {seconds(deadline.seconds)}"
                raise DeadlineError(late) from None
            raise PeerClosedError(f"{where}: {cause(error)}") from error
        if len(data) > _MAX_ANSWER_NBYTES:
            raise RemoteError(f"{where}: answer over {_MAX_ANSWER_NBYTES} bytes")
        return status, data.decode("utf-8", "replace")

    def _connections(self, *, kept: bool) -> Connections:
        return Connections(self._url, self._headers, kept=kept)


def _without_user(url: str) -> str:
    """A URL as others may read it."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def _checked_key(api_key: object) -> str:
    """The key; the error does not tell it, which may be read by others."""
    odd = ["\r", "\n", "\0"]
    if isinstance(api_key, str) and all(c not in odd and ord(c) < 256 for c in api_key):
        return api_key
    raise InvalidArgumentError(
        f"api_key: a {type(api_key).__name__} that no HTTP header can have: a text in Latin-1 of "
        "one line is wanted"
    )
