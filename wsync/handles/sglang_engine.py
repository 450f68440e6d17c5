"""SGLang's Engine in this process."""

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from wsync._core import UnsupportedError
from wsync.handles.answers import Setup, check_answer
from wsync.handles.local import LocalHandle

# the engine's arguments that updates depend on
_ARGUMENTS: Final = (
    *("tp_size", "pp_size", "dp_size", "enable_dp_attention", "nnodes", "tokenizer_worker_num"),
    *("speculative_algorithm", "speculative_draft_model_path", "model_path", "tokenizer_path"),
    *("enable_multi_layer_eagle", "speculative_num_steps", "enable_lora"),
)


class SglangHandle(LocalHandle):
    """An `sglang.Engine` of this process.

    Its own methods serialise one list of tensors for all workers, and take no weight version.  So
    the handle makes requests as those methods do, and gives them to the engine's tokenizer manager.

    Such an engine generates only when its owner asks it to, so nothing is paused.  Written for
    SGLang 0.5.17 and 0.5.23.
    """

    _serves = True

    def __init__(self, engine: Any, *, workers: int | None = None) -> None:
        """Raises the errors of Setup.of."""
        super().__init__(engine, workers=1)
        arguments = getattr(engine, "server_args", None)
        given = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
        given["version"] = getattr(sys.modules.get("sglang"), "__version__", None)
        self._started = {name: value for name, value in given.items() if value is not None}
        self._started["custom_weight_loader"] = list(
            getattr(arguments, "custom_weight_loader", None) or ()
        )
        setup = Setup.of(self.name, {"tp_size": workers or 1} | self._started)
        self.workers, self.load_formats = setup.workers, setup.loaders
        self._sessions["known"] = hasattr(engine, "begin_weight_update")

    def _pause(self, mode: str, timeout: float) -> None:
        """Does nothing, because nothing runs."""

    def _update(self, payloads: Sequence[bytes], settings: dict[str, Any], timeout: float) -> None:
        form = _form("UpdateWeightsFromTensorReqInput")
        told = dict(settings)
        if wanted := self._for_model():
            known = inspect.signature(form).parameters
            told |= {name: value for name, value in wanted.items() if name in known}
        request = form(serialized_named_tensors=list(payloads), **told)
        self._request("update_weights_from_tensor", request)

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        if method != "update_weights_from_disk":
            return super()._do(method, arguments, timeout)
        form = _form("UpdateWeightFromDiskReqInput")
        told = dict(arguments)
        if "flush_cache" in inspect.signature(form).parameters:
            told["flush_cache"] = False
        self._request(method, form(**told))

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise UnsupportedError(
            f"engine {self.name}: {method}: an engine in the trainer's process takes no broadcasts"
        )

    def resume(self, timeout: float) -> None:
        self._end(timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return super().model_info(timeout) or self.server_info(timeout)

    def server_info(self, timeout: float) -> dict[str, Any]:
        return self._started | super().server_info(timeout)

    def _request(self, method: str, request: Any) -> None:
        engine: Any = self._engine

        def send() -> Any:
            return engine.loop.run_until_complete(
                getattr(engine.tokenizer_manager, method)(request, None)
            )

        check_answer(self.name, method, self._result(send, method))


def _form(name: str) -> Any:
    """A request's class in the SGLang that is installed here."""
    try:
        return getattr(importlib.import_module("sglang.srt.managers.io_struct"), name)
    except (ImportError, AttributeError):
        raise UnsupportedError(f"this version of sglang has no {name}") from None
