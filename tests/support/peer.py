"""A second interpreter that a test tells what to do."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any
from unittest import mock

from support.procs import spawned

PATIENCE = 120.0


class PeerError(AssertionError):
    """What the peer's code has raised: its type and text."""


class Peer:
    """A process that runs code in one namespace; a context manager, at whose end it is killed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pipe, there = Pipe()
        self._process = spawned(_serve, there, daemon=True)
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        there.close()

    def __call__(self, code: str, **names: object) -> Any:
        """Runs code in which `names` are set; the value of its last line, if that is one."""
        self._pipe.send((code, names))
        assert self._pipe.poll(PATIENCE), f"the peer does not come back from {code!r}"
        success, value = self._pipe.recv()
        if not success:
            raise PeerError(value)
        return value

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    names: dict[str, Any] = {}
    while True:
        try:
            code, values = pipe.recv()
        except EOFError:
            return
        try:
            names |= values
            pipe.send((True, _run(code, names)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _run(code: str, names: dict[str, Any]) -> Any:
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "peer", "exec"), names)
    return eval(ast.unparse(last), names) if last is not None else None
