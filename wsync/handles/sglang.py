"""SGLang's Engine in this process."""

import base64
import importlib
import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wsync._core import (
    UnsupportedError,
)
from wsync.handles.answers import (
    check_answer,
    refusal,
)
from wsync.handles.arguments import check_payloads, disk_arguments
from wsync.handles.local import LocalHandle
from wsync.messages.control import FLATTENED_BUCKET


class SglangHandle(LocalHandle):
    """An `sglang.Engine` of this process.

    Its update_weights_from_tensor serialises one list of tensors for all workers, so what differs
    between workers travels as SGLang's LocalSerializedTensor: a name, and for each worker a
    pickled tensor that this worker alone unpickles.  The request that carries a weight version is
    handed to the engine's tokenizer manager, because that method takes none.

    Such an engine generates when its owner asks it to, so nothing is paused; where SGLang knows
    weight-update sessions (0.5.23), one is open from `pause` to `resume`.  Made against SGLang
    0.5.17 and 0.5.23.
    """

    def __init__(self, engine: Any, *, workers: int | None = None) -> None:
        arguments = getattr(engine, "server_args", None)
        if workers is None:
            workers = getattr(arguments, "tp_size", 1)
        super().__init__(engine, workers=workers)
        loaders = getattr(arguments, "custom_weight_loader", None) or ()
        self.load_formats = tuple(map(str, loaders))

    def pause(self, mode: str, timeout: float) -> None:
        if not hasattr(self._engine, "begin_weight_update"):
            return
        end = time.monotonic() + timeout
        if refusal(self._call("begin_weight_update", timeout)) is not None:
            # a failed update left its session open
            self._checked("end_weight_update", end - time.monotonic())
            self._checked("begin_weight_update", end - time.monotonic())

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None,
        weight_version: int | str | None,
        timeout: float,
    ) -> None:
        check_payloads(self.name, self.workers, payloads)
        arguments = {"load_format": load_format, "flush_cache": False}
        if weight_version is not None:
            request = _sglang("UpdateWeightsFromTensorReqInput", "managers.io_struct")(
                serialized_named_tensors=list(payloads),
                weight_version=str(weight_version),
                **arguments,
            )
            self._request("update_weights_from_tensor", request, timeout)
            return
        tensors: list[Any]
        if load_format == FLATTENED_BUCKET:  # taken as one payload per worker
            tensors = [base64.b64encode(data).decode() for data in payloads]
        else:
            from wsync.messages import payload

            form = _sglang(
                "LocalSerializedTensor",
                "model_executor.model_runner_components.weight_updater",
                "model_executor.model_runner",
            )
            tensors = [(name, form(values=values)) for name, values in payload.per_worker(payloads)]
        self._checked("update_weights_from_tensor", timeout, named_tensors=tensors, **arguments)

    def update_weights_from_disk(
        self, path: str, *, weight_version: int | str | None, timeout: float
    ) -> None:
        form = _sglang("UpdateWeightFromDiskReqInput", "managers.io_struct")
        arguments = disk_arguments(path, weight_version)
        if "flush_cache" in inspect.signature(form).parameters:
            arguments["flush_cache"] = False
        request = form(**arguments)
        self._request("update_weights_from_disk", request, timeout)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise UnsupportedError(
            f"engine {self.name}: {method}: an engine of the trainer's own process is not remote"
        )

    def resume(self, timeout: float) -> None:
        if hasattr(self._engine, "end_weight_update"):
            self._checked("end_weight_update", timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        if hasattr(self._engine, "get_model_info"):
            return super().model_info(timeout)
        return dict(self._call("get_server_info", timeout))

    def _request(self, method: str, request: Any, timeout: float) -> None:
        engine: Any = self._engine

        def send() -> Any:
            return engine.loop.run_until_complete(
                getattr(engine.tokenizer_manager, method)(request, None)
            )

        check_answer(self.name, method, self._run(send, method, timeout))


def _sglang(name: str, *modules: str) -> Any:
    """A class of the SGLang that is installed here, from the first module that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"sglang.srt.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise UnsupportedError(f"this version of sglang has no {name} in any of {', '.join(modules)}")
