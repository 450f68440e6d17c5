"""SGLang's Engine in this process."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from wsync._core import UnsupportedError
from wsync.handles.answers import Setup, check_answer
from wsync.handles.local import LocalHandle

# of its arguments, what updates go by
_ARGUMENTS: Final = (
    *("tp_size", "pp_size", "dp_size", "enable_dp_attention", "nnodes", "tokenizer_worker_num"),
    *("speculative_algorithm", "speculative_draft_model_path", "model_path", "tokenizer_path"),
    *("enable_lora", "lora_paths", "lora_target_modules", "custom_weight_loader"),
)


class SglangHandle(LocalHandle):
    """An `sglang.Engine` of this process.

    Its own methods serialise one list of tensors for all workers, and take no weight version.  So
    requests are made as those methods make them, and handed to the engine's tokenizer manager.

    Such an engine generates when its owner asks it to, so nothing is paused.  Made against SGLang
    0.5.17 and 0.5.23.
    """

    _serves = True

    def __init__(self, engine: Any, *, workers: int | None = None) -> None:
        """Raises UnsupportedError as Setup.of does."""
        super().__init__(engine, workers=1)
        arguments = getattr(engine, "server_args", None)
        given = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
        self._started = {name: value for name, value in given.items() if value is not None}
        setup = Setup.of(self.name, {"tp_size": workers or 1} | self._started)
        self.workers, self.load_formats = setup.workers, setup.loaders
        self._sessions["known"] = True  # until it turns out that it knows none

    def _pause(self, mode: str, timeout: float) -> None:
        """Nothing runs."""

    def _update(self, payloads: Sequence[bytes], settings: dict[str, Any], timeout: float) -> None:
        told = settings | self._for_model(settings["load_format"])
        told["serialized_named_tensors"] = list(payloads)
        self._request("update_weights_from_tensor", "UpdateWeightsFromTensorReqInput", told)

    def _do(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        if method == "update_weights_from_disk":
            self._request(
                method, "UpdateWeightFromDiskReqInput", {**arguments, "flush_cache": False}
            )
        else:
            super()._do(method, arguments, timeout)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float) -> None:
        raise UnsupportedError(
            f"engine {self.name}: {method}: an engine of the trainer's own process is not remote"
        )

    def resume(self, timeout: float) -> None:
        self._end(timeout)

    def model_info(self, timeout: float) -> dict[str, Any]:
        return super().model_info(timeout) or self.server_info(timeout)

    def server_info(self, timeout: float) -> dict[str, Any]:
        return self._started | super().server_info(timeout)

    def _request(self, method: str, form: str, told: Mapping[str, Any]) -> None:
        """form: the request's class, of which each version of SGLang has other fields."""
        engine: Any = self._engine
        try:
            made = getattr(importlib.import_module("sglang.srt.managers.io_struct"), form)
        except (ImportError, AttributeError):
            raise UnsupportedError(f"this version of sglang has no {form}") from None
        known = inspect.signature(made).parameters
        request = made(**{name: value for name, value in told.items() if name in known})

        def send() -> Any:
            ask = getattr(engine.tokenizer_manager, method)
            return engine.loop.run_until_complete(ask(request, None))

        check_answer(self.name, method, self._result(send, method))
