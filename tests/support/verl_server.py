"""The actor that verl has beside a server, in a module of its own, which imports little."""

from __future__ import annotations

import requests


class ServerActor:
    """verl's actor beside a server; notes what it is asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self.global_steps: int | None = None

    def get_server_address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def set_global_steps(self, global_steps: int) -> None:
        self.asked.append("set_global_steps")
        self.global_steps = global_steps

    def abort_all_requests(self, reject_request: bool = False) -> None:
        self._do("pause_generation")

    def resume_generation(self) -> None:
        self._do("continue_generation")

    def release_kv_cache(self) -> None:
        self.asked.append("release_kv_cache")

    def resume_kv_cache(self) -> None:
        self.asked.append("resume_kv_cache")

    def noted(self) -> tuple[list[str], int | None]:
        """What was asked since the last call, and the step."""
        asked, self.asked = self.asked, []
        return asked, self.global_steps

    def _do(self, method: str) -> None:
        requests.post(f"{self.url}/{method}", json={}, timeout=60).raise_for_status()
        self.asked.append(method)
