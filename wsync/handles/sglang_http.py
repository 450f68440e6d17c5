"""SGLang's HTTP endpoints."""

import contextlib
import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from wsync._core import (
    DeadlineError,
    InvalidArgumentError,
    PeerClosedError,
    RemoteError,
)
from wsync.handles.answers import (
    NotOfferedError,
    Setup,
    cause,
    check_same,
    engine_text,
    json_or_text,
    without_password,
)
from wsync.handles.sglang_base import ApiHandle
from wsync.machine.deadline import Deadline, seconds
from wsync.messages.tcp_channel import KEEPALIVE

# methods of SGLang without an argument flush_cache
_STEERING: Final = ("pause_generation", "continue_generation")


class HttpHandle(ApiHandle):
    """An engine behind SGLang's HTTP endpoints.

    Environment proxies are not used: the engine is reached directly.  Calls may run in several
    threads.  Each request has its own connection, and is not repeated.
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

        Raises InvalidArgumentError if the api_key cannot be in an HTTP header.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(
                f"engine {url!r}: a URL starts with http://, https:// or vllm+http://"
            )
        super().__init__(sessions=True)  # until the server turns out to have none
        self.name = without_password(url.rstrip("/"))
        if self.name != url.rstrip("/"):
            raise InvalidArgumentError(
                f"engine {self.name}: the URL must not contain a user or password; give the "
                "server's key as api_key="
            )
        try:
            self._place = urlsplit(self.name)
            self._port = self._place.port
        except ValueError as error:
            raise InvalidArgumentError(f"engine {self.name}: {error}") from error
        if not self._place.hostname:
            raise InvalidArgumentError(f"engine {self.name}: no host in this URL")
        self._headers = {"Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {_checked_key(api_key)}"
        self._timeout = timeout
        self.workers = self._setup.workers if workers is None else workers

    @property
    def started(self) -> dict[str, Any]:
        """The server's arguments; copies of this handle share them."""
        if not self._started:
            self._started |= self.server_info(self._timeout)
        return self._started

    @property
    def load_formats(self) -> tuple[str, ...]:
        """The server's --custom-weight-loader."""
        return self._setup.loaders

    def look_anew(self, timeout: float) -> None:
        """Asks for the arguments of a server that may have been restarted with other ones.

        Raises:
            RemoteError: the server's workers, custom weight loaders or drafting have changed.
            UnsupportedError: the server now has several HTTP processes.
        """
        if not self._started:
            return
        found = self.server_info(timeout)
        check_same(self.name, self._setup, Setup.of(self.name, found))
        self._sessions["known"] = True  # it may be of another version
        self._started.clear()
        self._started |= found

    @property
    def _setup(self) -> Setup:
        return Setup.of(self.name, self.started)

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        body = dict(arguments)
        if method not in _STEERING:
            body["flush_cache"] = False
        if method == "update_weights_from_disk" and self.started.get("load_format") == "dummy":
            body["load_format"] = "auto"  # with "dummy" it refuses to load
        if method in ("update_weights_from_tensor", "update_weights_from_distributed"):
            body |= self._for_model()
        super()._do(method, body, timeout)

    def _call(self, method: str, timeout: float, /, **arguments: Any) -> Any:
        """Makes one request; returns True for a flush, a JSON object, or the text of a refusal."""
        verb, body = ("GET", None) if method.endswith("_info") else ("POST", arguments)
        path = f"/{method}"
        status, text = self.request(verb, path, body, timeout)
        if status not in (200, 400):
            kind = NotOfferedError if status == 404 else RemoteError
            said = f"HTTP {status}: {engine_text(text)}{self.hint(status)}"
            raise kind(f"engine {self.name}: {path}: {said}")
        if status == 200 and method == "flush_cache" and "flush" in text.lower():
            return True
        answer = json_or_text(text)
        return answer if status == 200 and isinstance(answer, dict) else engine_text(text)

    def pulls(self, timeout: float) -> bool:
        """Whether the server has the endpoint pull_weights, which answers GET with status 405."""
        return self.request("GET", "/pull_weights", None, timeout)[0] != 404

    def hint(self, status: int) -> str:
        """A possible cause of a status: a missing key, or a URL with a path, which OpenAI's clients
        need."""
        if status == 401:
            return "; give the server's key as api_key= to wsync.connect or wsync.handle"
        parts = urlsplit(self.name)
        if status != 404 or not parts.path:
            return ""
        return f"; is the server's root URL {parts.scheme}://{parts.netloc}?"

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, str]:
        """Makes one request; returns (status, text)."""
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
    """Checks a key and returns it.  The error does not show the key, because others may read it."""
    odd = ["\r", "\n", "\0"]
    if isinstance(api_key, str) and all(c not in odd and ord(c) < 256 for c in api_key):
        return api_key
    raise InvalidArgumentError(
        f"api_key: this {type(api_key).__name__} cannot be in an HTTP header: expected one line of "
        "Latin-1 text"
    )
