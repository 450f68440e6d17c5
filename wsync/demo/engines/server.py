"""Serves an Engine at SGLang's HTTP endpoints, with the paths and answers of SGLang 0.5.23."""

import inspect
import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from wsync._core import InvalidArgumentError, WsyncError
from wsync.demo.engines.transformers import REQUEST_SECONDS, Engine
from wsync.machine.deadline import Deadline
from wsync.machine.error_text import error_text


class EngineServer(ThreadingTCPServer):
    """Answers each connection in its own thread.  A request that waits, as in a pause, does not
    block the request that ends the wait.

    Raises:
        InvalidArgumentError: it cannot listen on the port.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine, port: int) -> None:
        calls = _calls(engine).items()
        self._calls = {path: (call, inspect.signature(call).parameters) for path, call in calls}
        try:
            super().__init__(("127.0.0.1", port), _Requests)
        except (OSError, OverflowError) as error:
            raise InvalidArgumentError(f"127.0.0.1:{port}: {error}") from error

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def answer(self, path: str, data: bytes) -> tuple[int, Any]:
        """Returns the status and content of an answer.  Ignores fields that an endpoint does not
        know, as SGLang does."""
        if path[1:] not in self._calls:
            return 404, {"message": "Not Found"}
        call, known = self._calls[path[1:]]
        try:
            fields = {k: v for k, v in json.loads(data or b"{}").items() if k in known}
            late = {"end": Deadline(REQUEST_SECONDS)} if "end" in known else {}
            found = call(**fields | late)
        except Exception as error:  # also torch's, if the content is not a valid tensor
            text = str(error) if isinstance(error, WsyncError) else error_text(error)
            return 400, {"success": False, "status": "error", "message": text}
        if isinstance(found, dict):
            return 200, found
        return 200, {"success": True, "status": "ok", "message": found or "Success"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may close it at any time
            super().handle_error(request, client_address)


def _calls(engine: Engine) -> dict[str, Callable[..., Any]]:
    """The function for each path.  The function is called with the fields of the request's body.
    If the function returns a dictionary, this is the answer; a text or None goes into an answer of
    success."""
    return {
        "health": lambda: {},
        "model_info": engine.model_info,
        "server_info": engine.server_info,
        "weights_checker": lambda: {"success": True, "ranks": [{"checksums": engine.checksums()}]},
        "pause_generation": engine.gate.pause,
        "continue_generation": engine.continue_generation,
        "flush_cache": lambda: "Cache flushed.",  # this engine has no cache
        "generate": engine.generate,
        "wsync/logits": engine.logits,  # not in SGLang: fp32 logits [tokens, vocab] of a prompt
        "update_weights_from_tensor": engine.update_weights_from_tensor,
        "update_weights_from_disk": engine.update_weights_from_disk,
    }


class _Requests(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered, so an answer is sent in one piece
    server: EngineServer

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, content = self.server.answer(self.path.partition("?")[0], data)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Logs nothing."""
