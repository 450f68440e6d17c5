"""Answers that a server streams while an update runs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Self

import requests
from support.server_models import PATIENCE
from support.servers import Server


class Answer(ABC):
    """One that is being generated.  Subclasses say what an event of the stream holds."""

    def __init__(self, server: Server, path: str, **request: Any) -> None:
        self._response = requests.post(
            server.url + path, json={**request, "stream": True}, stream=True, timeout=PATIENCE
        )
        self._lines = self._response.iter_lines()
        self.tokens: list[int] = []
        self.last: dict[str, Any] = {}

    @abstractmethod
    def take(self, event: dict[str, Any]) -> None:
        """Brings `tokens` and `last` up to date."""

    def read(self, count: int) -> None:
        """Until there are so many tokens, or it has ended."""
        for line in self._lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            self.take(json.loads(line.removeprefix(b"data: ")))
            if len(self.tokens) >= count:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
