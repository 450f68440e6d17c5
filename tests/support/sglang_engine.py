"""Run as a script: updates an engine object that is SGLang's own code where it meets wsync.

    python sglang_engine.py TREE

`sglang.Engine` and its workers import half an inference engine, so what handles weights is taken
out of the real files and run alone: Engine's update_weights_from_tensor, _unwrap_tensor, the
serialiser and its unpickler, the request's class.  The two workers are threads.  Prints a JSON
object of what the workers hold.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import binascii
import dataclasses
import io
import json
import pickle
import sys
import threading
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

import wsync
from wsync.sglang import load_weights

WORKERS = 2
LOADER = "wsync.sglang.load_weights"
COMMON = {
    "MultiprocessingSerializer",
    "SafeUnpickler",
    "_looks_like_pickle_payload",
    "_safe_load_torch_storage",
    "normalize_serialized_named_tensor_payload",
    "normalize_serialized_named_tensor_payloads",
}


class BaseReq:
    """Stands for msgspec's structs."""

    def __init_subclass__(cls, **_: Any) -> None:
        dataclasses.dataclass(kw_only=True)(cls)


def taken(path: Path, wanted: set[str], names: dict[str, Any]) -> dict[str, Any]:
    """The definitions of `wanted` in a file, also those inside classes, run in `names`."""
    module = ast.parse("from __future__ import annotations\n" + path.read_text(), str(path))
    found = [node for node in ast.walk(module) if getattr(node, "name", None) in wanted]
    # 0.5.17 has no loader of storages of its own
    missing = wanted - {node.name for node in found} - {"_safe_load_torch_storage"}  # type: ignore[attr-defined]
    assert not missing, f"{path} lacks {missing}"
    module.body = [module.body[0], *found]  # type: ignore[list-item]
    exec(compile(module, str(path), "exec"), names)
    return names


def add_module(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The names of a new module that `import` finds; classes are pickled under its name."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(parts[count]))
        package.__path__ = []
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(values)
    return module.__dict__


def sglang(tree: Path) -> dict[str, Any]:
    srt = tree / "sglang" / "srt"
    names: dict[str, Any] = {
        "BaseReq": BaseReq,
        "ForkingPickler": ForkingPickler,
        "SerializedTensorPayload": Any,
        "binascii": binascii,
        "cast": lambda _, value: value,
        "dataclass": dataclasses.dataclass,
        "get_parallel": lambda: types.SimpleNamespace(tp_size=WORKERS),
        "io": io,
        "pickle": pickle,
        "pybase64": base64,
        "torch": torch,
    }
    taken(srt / "utils" / "common.py", COMMON, names)
    place = "model_executor.model_runner_components.weight_updater"
    updater = add_module(f"sglang.srt.{place}", names)
    path = srt.joinpath(*place.split(".")).with_suffix(".py")
    taken(path, {"LocalSerializedTensor", "_unwrap_tensor"}, updater)
    request = add_module("sglang.srt.managers.io_struct", names)
    taken(srt / "managers" / "io_struct.py", {"UpdateWeightsFromTensorReqInput"}, request)
    taken(srt / "entrypoints" / "engine.py", {"update_weights_from_tensor"}, request)
    return request | {"_unwrap_tensor": updater["_unwrap_tensor"]}


class TokenizerManager:
    """Hands each worker its payload and waits for all, as the schedulers do."""

    def __init__(self, names: dict[str, Any], models: list[torch.nn.Module]) -> None:
        self._names = names
        self._models = models
        self.version = "default"
        self.formats: list[str] = []

    async def update_weights_from_tensor(self, obj: Any, request: Any) -> tuple[bool, str]:
        data = self._names["normalize_serialized_named_tensor_payloads"](
            obj.serialized_named_tensors
        )
        loading = [
            threading.Thread(target=self._load, args=(rank, data[rank], obj.load_format))
            for rank in range(WORKERS)
        ]
        for thread in loading:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join(30) for thread in loading])
        if obj.weight_version is not None:
            self.version = obj.weight_version
        return True, "Success"

    def _load(self, rank: int, data: bytes, load_format: str | None) -> None:
        assert load_format == LOADER
        tensors = self._names["MultiprocessingSerializer"].deserialize(data)
        self.formats += [type(tensor).__name__ for _, tensor in tensors]
        pairs = [(n, self._names["_unwrap_tensor"](t, rank, "cpu")) for n, t in tensors]
        load_weights(self._models[rank], pairs)


def make_engine(names: dict[str, Any], models: list[torch.nn.Module]) -> Any:
    manager = TokenizerManager(names, models)
    arguments = types.SimpleNamespace(tp_size=WORKERS, custom_weight_loader=[LOADER])

    class Engine:
        """The methods that wsync calls, SGLang's own where they carry weights."""

        loop = asyncio.new_event_loop()
        server_args = arguments
        tokenizer_manager = manager
        open = False

        def flush_cache(self) -> None: ...

        def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
            was, Engine.open = Engine.open, True
            return not was, "a weight-update session is already open"

        def end_weight_update(self) -> tuple[bool, str]:
            was, Engine.open = Engine.open, False
            return was, "no weight-update session is open"

        def get_model_info(self) -> dict[str, Any]:
            return {"weight_version": manager.version}

    Engine.update_weights_from_tensor = names["update_weights_from_tensor"]
    return Engine()


class Model(torch.nn.Linear):
    """As models of SGLang: it loads its weights itself."""

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def main() -> None:
    names = sglang(Path(sys.argv[1]))
    models = [Model(3, 5) for _ in range(WORKERS)]
    engine = make_engine(names, models)
    weights = {"weight": torch.arange(15.0).reshape(5, 3), "bias": torch.arange(5.0)}
    options = wsync.Options(deadline=60, progress=False)
    engine.begin_weight_update()  # as an update that failed leaves it
    with wsync.connect(weights, engines=[engine], options=options) as sync:
        for _ in range(2):
            weights["bias"] += 1
            sync.update()
    print(
        json.dumps(
            {
                "equal": [
                    torch.equal(model.state_dict()[name], tensor)
                    for model in models
                    for name, tensor in weights.items()
                ],
                "forms": sorted(set(engine.tokenizer_manager.formats)),
                "handle": type(wsync.handle(engine)).__name__,
                "version": wsync.handle(engine).model_info(5)["weight_version"],
                "open": engine.open,
            }
        )
    )
    engine.loop.close()


if __name__ == "__main__":
    main()
