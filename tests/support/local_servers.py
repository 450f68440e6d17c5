"""Servers of SGLang as local objects, as far as updates without weights of their own go."""

from __future__ import annotations

from typing import Any


class Engine:
    """SGLang as a local object, as far as connecting goes."""

    def __init__(self, name: str = "e", **started: Any) -> None:
        self.name = name
        self.started = {"tp_size": 1} | started

    def server_info(self) -> dict[str, Any]:
        return self.started

    def update_weights_from_tensor(self, **_: Any) -> None: ...
    def update_weights_from_disk(self, **_: Any) -> None: ...


class Packing(Engine):
    """Notes when it restores and packs weights, as slime's actors do; it reports versions."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "somebody's"
        self.calls: list[str] = []

    def get_weight_version(self) -> str:
        return self.version

    def get_server_info(self) -> dict[str, Any]:
        return {"tp_size": 1}

    def pause_generation(self) -> None: ...
    def flush_cache(self) -> None: ...

    def update_weights_from_tensor(self, **given: Any) -> None:
        self.version = given.get("weight_version", self.version)
        self.calls.append("load")

    def update_weights_from_disk(self, **given: Any) -> None:
        self.version = given["weight_version"]
        self.calls.append("read")

    def post_process_weights(self, restore_weights_before_load: bool, **_: Any) -> None:
        self.calls.append("restore" if restore_weights_before_load else "pack")

    def continue_generation(self) -> None:
        self.calls.append("continue")
