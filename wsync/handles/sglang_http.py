"""SGLang's HTTP endpoints."""

import contextlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import unquote, urlsplit

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
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.deadline import Deadline, seconds
from wsync.messages.tcp_channel import KEEPALIVE

# what SGLang answers with a status, and without flush_cache
_STEERING: Final = ("pause_generation", "continue_generation")


class HttpHandle(ApiHandle):
    """An engine behind SGLang's HTTP endpoints.

    Environment proxies are not used: the engine is reached directly.  Calls may run in several
    threads.  Each request has a connection of its own, and is made once.
    """

    def __init__(
        self,
        url: str,
        *,
        workers: int | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Asks the server for tp_size unless `workers` is given.

        A URL may have a user and a password, for a proxy in front of the engine; its name has not.

        Raises InvalidArgumentError for an api_key that no HTTP header can have.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(
                f"engine {url!r}: a URL starts with http://, https:// or vllm+http://"
            )
        super().__init__(sessions=True)  # until the server says that it knows none
        url = url.rstrip("/")
        self.name = re.sub(r"(?<=://)[^/?#]*@", "", url)  # as others may read it
        if self.name != url and api_key:
            raise InvalidArgumentError(
                f"engine {self.name}: a URL with a user, and an api_key: requests carry one"
            )
        try:
            self._place = urlsplit(url)
            self._port = self._place.port
        except ValueError as error:
            raise InvalidArgumentError(f"engine {self.name}: {error}") from error
        if not self._place.hostname:
            raise InvalidArgumentError(f"engine {self.name}: no host in this URL")
        self._headers = {"Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
        elif self._place.username is not None:
            user = f"{unquote(self._place.username)}:{unquote(self._place.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode('latin1')).decode()}"
        self._server: dict[str, Any] = {}  # as it was started; copies share it
        self._timeout = timeout
        self.workers = self._setup.workers if workers is None else workers

    @property
    def started(self) -> dict[str, Any]:
        """How the server was started."""
        if not self._server:
            self._server |= self.server_info(self._timeout)
        return self._server

    @property
    def load_formats(self) -> tuple[str, ...]:
        """What the server was started with as --custom-weight-loader."""
        return self._setup.loaders

    def look_anew(self, timeout: float) -> None:
        """Asks what the server is, which may have been started again with other arguments.

        Raises:
            RemoteError: it has other workers or custom weight loaders than before, or drafts now.
            UnsupportedError: it has several HTTP processes now.
        """
        if not self._server:
            return
        found = self.server_info(timeout)
        check_same(self.name, self._setup, Setup.of(self.name, found))
        if found.get("version") != self._server.get("version"):  # it may know less
            self._sessions["known"] = True
        self._server.clear()
        self._server |= found

    def _pause(self, mode: str, timeout: float) -> None:
        self._do("pause_generation", {"mode": mode}, timeout)

    def _flush_once(self, timeout: float) -> str | None:
        status, text = self._ask("POST", "/flush_cache", None, timeout, also=(400,))
        if status == 200 and "flush" not in text.lower():
            raise self._strange("/flush_cache", text)
        return None if status == 200 else engine_text(text)

    @property
    def _setup(self) -> Setup:
        return Setup.of(self.name, self.started)

    def _info(self, method: str, timeout: float) -> dict[str, Any]:
        deadline, path = Deadline(timeout), f"/{method}"
        status, text = self._ask("GET", path, None, deadline.left, also=(404,))
        if status == 404:
            path = f"/get_{method}"
            _, text = self._ask("GET", path, None, deadline.left)
        info = json_or_text(text)
        if not isinstance(info, dict):
            raise RemoteError(f"engine {self.name}: {path}: not a JSON object: {cut(text)}")
        return info

    def _session(self, method: str, timeout: float, **selector: str) -> object:
        if not self._sessions["known"]:
            return None
        status, text = self._ask("POST", f"/{method}", selector, timeout, also=(400, 404))
        self._sessions["known"] = status != 404
        return json_or_text(text) if status != 404 else None

    def _reprocess(self, timeout: float, **steps: bool) -> bool:
        path = "/post_process_weights"
        status, text = self._ask("POST", path, steps, timeout, also=(400, 404))
        if status == 404:
            return False
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
        _, text = self._ask("POST", path, body, timeout)
        answer = json_or_text(text)
        if not isinstance(answer, dict) or says not in answer:
            raise self._strange(path, text)
        check_answer(self.name, path, answer)

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

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        *,
        also: Sequence[int] = (),
    ) -> tuple[int, str]:
        """(status, text).  RemoteError where the status is neither 200 nor one of `also`."""
        status, text = self.request(method, path, body, timeout)
        if status != 200 and status not in also:
            said = f"{path}: HTTP {status}: {engine_text(text)}{self.hint(status)}"
            error = RemoteError(f"engine {self.name}: {said}")
            error.native = status
            raise error
        return status, text

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, str]:
        """(status, text) of one exchange."""
        with self._asks(path) as where:
            deadline = Deadline(timeout)
            if not timeout > 0:
                raise DeadlineError(f"{where}: no time left to ask")
            try:
                return self._exchange(method, path, body, deadline)
            except (OSError, HTTPException) as error:
                timed_out = isinstance(error, TimeoutError) and error.errno is None
                if timed_out or not deadline.left:
                    late = f"{where}: no answer within {seconds(timeout)}"
                    raise DeadlineError(late) from None
                raise PeerClosedError(f"{where}: {cause(error)}") from error

    def _exchange(
        self, method: str, path: str, body: object, deadline: Deadline
    ) -> tuple[int, str]:
        kind = HTTPSConnection if self._place.scheme == "https" else HTTPConnection
        made = kind(self._place.hostname or "", self._port, timeout=deadline.left)
        with contextlib.closing(made):
            made.connect()
            made.sock.settimeout(max(deadline.left, 0.001))
            for option in KEEPALIVE:
                made.sock.setsockopt(*option)
            headers = self._headers
            if body is not None:
                headers = {**headers, "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            made.request(method, self._place.path + path, data, headers)
            answer = made.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")


def _checked_key(api_key: object) -> str:
    """The key; the error does not tell it, which may be read by others."""
    odd = ["\r", "\n", "\0"]
    if isinstance(api_key, str) and all(c not in odd and ord(c) < 256 for c in api_key):
        return api_key
    raise InvalidArgumentError(
        f"api_key: a {type(api_key).__name__} that no HTTP header can have: a text in Latin-1 of "
        "one line is wanted"
    )
