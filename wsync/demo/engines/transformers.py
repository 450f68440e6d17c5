"""A small inference engine on a Hugging Face transformers model, with SGLang's endpoints.

It is for notebooks, demonstrations and tests.  It continues token ids with the likeliest tokens and
takes weight updates as SGLang does.  It has one worker, on the CPU.

    python -m wsync.demo.engines.transformers --model DIR --port 30000           # its weights
    python -m wsync.demo.engines.transformers --model DIR --port 30000 --seed 1  # random weights

Weights have the names of the model's checkpoint, even if transformers 5 fuses the experts.
"""

import base64
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from wsync._core import DeadlineError, InvalidArgumentError, __version__
from wsync.demo.engines.model_worker import ModuleWorker
from wsync.engine.destination import aliases
from wsync.machine.deadline import Deadline, seconds
from wsync.messages.control import LOAD_FORMAT
from wsync.module_tensors import checksum_of

PAUSE_MODES: Final = ("abort", "retract", "in_place")
REQUEST_SECONDS: Final = 600.0
"""The longest time that a request waits for other requests or updates."""


class Gate:
    """Decides which thread of an engine may run.

    New requests wait while the engine is paused.  A running request asks before every step.  With
    "abort", a pause ends running requests and waits until they have ended.  With "retract" and
    "in_place", they go on after the pause.  Only one step or update uses the weights at a time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._aborts = self._running = 0
        self._writing = False  # whether a step or an update uses the weights

    @contextmanager
    def request(self) -> Iterator[Callable[[], bool]]:
        """A context for one request.  Yields a function that tells whether it was aborted."""
        with self._changed:
            self._wait(lambda: not self._paused, REQUEST_SECONDS, "the engine is still paused")
            self._running += 1
            begun = self._aborts
        try:
            yield lambda: self._aborts != begun
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def pause(self, mode: str = "abort") -> None:
        if mode not in PAUSE_MODES:
            raise InvalidArgumentError(f"mode={mode!r}: expected {' or '.join(PAUSE_MODES)}")
        with self._changed:
            self._paused = True
            if mode == "abort":
                self._aborts += 1
                self._changed.notify_all()
                self._wait(lambda: not self._running, REQUEST_SECONDS, "requests are still running")

    def resume(self) -> None:
        with self.alone():
            self._paused = False

    @contextmanager
    def alone(
        self, timeout: float = REQUEST_SECONDS, *, ready: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """A context for a step or an update, which nothing else shares."""
        with self._changed:
            late = "the engine is still paused, or a step or an update is still running"
            self._wait(lambda: not self._writing and ready(), timeout, late)
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def step(self, aborted: Callable[[], bool]) -> AbstractContextManager[None]:
        """A context for one step of a request.  Does not wait for a pause's end after an abort."""
        return self.alone(ready=lambda: aborted() or not self._paused)

    def _wait(self, ready: Callable[[], bool], timeout: float, otherwise: str) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise DeadlineError(f"after {seconds(timeout)}, {otherwise}")


class Engine(ModuleWorker):
    """The engine behind the endpoints: a model, its receiver and its gate."""

    def __init__(self, model: Any, *, model_path: str = "") -> None:
        super().__init__(model.eval())
        self.model = model
        self.model_path = model_path or str(getattr(model.config, "name_or_path", ""))
        self.instance = uuid.uuid4().hex
        self.gate = Gate()

    @property
    def weight_version(self) -> str:
        return self.updates.weight_version

    # --- generation -------------------------------------------------------------------------

    def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Continues one prompt with the likeliest tokens.  Waits while the engine is paused.  If a
        pause begins during generation, its mode decides whether the request ends or goes on.  The
        answer's version is that of the weights that gave the last token."""
        sampling = {"max_new_tokens": 128, **(sampling_params or {})}
        eos = None if sampling.get("ignore_eos") else self.model.config.eos_token_id
        stops = eos if isinstance(eos, list) else [eos]
        finish: dict[str, Any] = {"type": "length", "length": sampling["max_new_tokens"]}
        tokens, output = list(input_ids), list[int]()
        with self.gate.request() as aborted:
            version = self.weight_version
            while len(output) < sampling["max_new_tokens"] and finish["type"] == "length":
                with self.gate.step(aborted), torch.no_grad():
                    if aborted():
                        finish = {"type": "abort", "message": "Aborted by a pause."}
                        break
                    self.updates.check_whole()
                    # read here: an update may begin when this step ends
                    version = self.weight_version
                    output.append(int(self._logits(tokens + output)[-1].argmax()))
                if output[-1] in stops:
                    finish = {"type": "stop", "matched": output[-1]}
        return {
            "output_ids": output,
            "meta_info": {
                "finish_reason": finish,
                "prompt_tokens": len(tokens),
                "completion_tokens": len(output),
                "weight_version": version,
            },
        }

    def logits(self, input_ids: Sequence[int]) -> dict[str, list[list[float]]]:
        """Returns fp32 logits [tokens, vocab] of one prompt, for comparisons."""
        with self.gate.request() as aborted, self.gate.step(aborted), torch.no_grad():
            self.updates.check_whole()
            return {"logits": self._logits(input_ids).float().tolist()}

    def continue_generation(self) -> None:
        """Ends a pause.  Refuses while the weights are inconsistent or have no version yet."""
        self.updates.check_whole()
        self.gate.resume()

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of all tokens.  Nothing is cached, because the next step may use other weights."""
        vocabulary = int(self.model.config.vocab_size)
        if not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise InvalidArgumentError(f"input_ids: must list tokens from 0 to {vocabulary - 1}")
        ids = torch.tensor([list(tokens)], device=self.model.device)
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    # --- weights ----------------------------------------------------------------------------

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        return self.gate.alone(end.left)

    def update_weights_from_disk(
        self, model_path: str, *, end: Deadline, weight_version: str | None = None
    ) -> None:
        super().update_weights_from_disk(model_path, end=end, weight_version=weight_version)
        self.model_path = model_path

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        weight_version: str | None = None,
        *,
        end: Deadline,
    ) -> str:
        """Does the same as `update`, with the payload of one worker in base64."""
        (payload,) = serialized_named_tensors
        data = base64.b64decode(payload, validate=True)
        return self.update(data, load_format=load_format, weight_version=weight_version, end=end)

    def checksums(self) -> dict[str, str]:
        """A 64-bit checksum, in hex, of the bytes of every parameter and persistent buffer.  If
        several names mean one tensor (a tied head), it has one entry, under the first name.
        Waits for a running update."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict()
        with self.gate.alone():
            return {names[0]: checksum(state[names[0]]) for names in aliases(state)}

    def server_info(self) -> dict[str, Any]:
        """How the engine was started, and the load formats that it takes."""
        return {
            "model_path": self.model_path,
            "tp_size": 1,
            "custom_weight_loader": [LOAD_FORMAT],
            "version": f"wsync {__version__}",
            "instance": self.instance,
        }

    def model_info(self) -> dict[str, Any]:
        config = self.model.config
        trouble = self.updates.trouble  # must be read before the version: see UpdateState
        return {
            "model_path": self.model_path,
            "weight_version": self.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures or [type(self.model).__name__],
            "consistent": not trouble,
            "reason": trouble,
            "instance": self.instance,
        }


def checksum(tensor: torch.Tensor) -> str:
    """A 64-bit checksum of a tensor's bytes, in hex."""
    return f"{checksum_of(tensor):016x}"


if __name__ == "__main__":
    from wsync.demo.engines.serve import main

    main()
