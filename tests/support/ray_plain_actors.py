"""Ray actors that need no torch, which takes a process seconds to import."""

from __future__ import annotations

from typing import Any

import ray

import wsync


class Silent:
    """slime's engine methods of one that says nothing of itself."""

    def ping(self) -> None:
        pass

    def pause_generation(self) -> None:
        pass

    def update_weights_from_tensor(self, **given: Any) -> tuple[bool, str]:
        return True, ""


class Served:
    """slime's engine: an actor beside the server that it has started."""

    def __init__(self, config: Any) -> None:
        from wsync.demo.engines.serve import serve_in_process

        self._server = serve_in_process(config)

    def ping(self) -> None:
        pass

    def get_url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._server.close()

    def update_weights_from_tensor(self, **request: Any) -> None:
        raise AssertionError("weights went through the actor")


class Raising:
    """An engine that raises what each load_format stands for."""

    def ping(self) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"tp_size": 1}

    def update_weights_from_tensor(self, load_format: str, **request: Any) -> None:
        raise {
            "long": ValueError("the reason, and more" + "." * 5000),
            "own timeout": ray.exceptions.GetTimeoutError("a worker of the engine is slow"),
            "wsync's": wsync.LayoutError("w: dim 1: source 4 != destination 2"),
        }[load_format]


class Asking:
    """An engine that has another actor answer."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def get_server_info(self) -> dict[str, Any]:
        return {"tp_size": 1}

    def update_weights_from_tensor(self, **request: Any) -> None:
        ray.get(self._other.update_weights_from_tensor.remote(**request))
