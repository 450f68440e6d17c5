"""A small inference engine on a Hugging Face transformers model, with SGLang's endpoints.

For notebooks, demonstrations and tests: it generates text one token at a time and takes weight
updates the way SGLang does.  One worker, CPU.

    python -m wsync.demo.engines.transformers --model DIR --port 30000     # weights from DIR
    python -m wsync.demo.engines.transformers --config DIR --port 30000    # random weights

Without a tokenizer, text is token ids in decimal with spaces between them.

Weights go by the names of the model's checkpoint, also where transformers 5 has fused experts.
"""

import base64
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from wsync._core import InvalidArgumentError, StateError
from wsync.demo.engines.gate import REQUEST_SECONDS, Gate
from wsync.demo.engines.model_worker import ModuleWorker
from wsync.demo.engines.request_bodies import SamplingParams
from wsync.engine.destination import aliases
from wsync.engine.update_groups import BROADCAST_SECONDS
from wsync.machine.deadline import Deadline
from wsync.module_tensors import checksum_of

if TYPE_CHECKING:
    from fastapi import FastAPI

_GREEDY_TEMPERATURE = 1e-6


@dataclass(slots=True)
class Generation:
    """What came out: token ids, their log probabilities, why it ended, and the version of the
    weights that gave the last token."""

    rid: str
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=dict)
    weight_version: str = ""


class Engine(ModuleWorker):
    """The engine behind the endpoints: a model, its receiver, and who may run when.

    broadcast_seconds: the most that one broadcast of a trainer may take; the engine then leaves
    that trainer's group.  worker: as of ModuleWorker.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        model_path: str = "",
        broadcast_seconds: float = BROADCAST_SECONDS,
        **worker: Any,
    ) -> None:
        super().__init__(model.eval(), **worker)
        self.model = model
        self.tokenizer = tokenizer
        self.model_path = model_path or str(getattr(model.config, "name_or_path", ""))
        self.instance = uuid.uuid4().hex
        self.gate = Gate()
        self.broadcast_seconds = broadcast_seconds

    @property
    def weight_version(self) -> str:
        return self.updates.weight_version

    # --- generation -------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text))
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise InvalidArgumentError(
                f"text {text[:60]!r}: without a tokenizer, text is token ids in decimal"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return " ".join(map(str, ids))

    def generate(self, ids: Sequence[int], sampling: SamplingParams, rid: str = "") -> Generation:
        """Continues `ids`.  Waits while the engine is paused; what runs when it is paused ends,
        starts over or goes on as the pause's mode says."""
        self._check_prompt(ids, sampling)
        rid = rid or uuid.uuid4().hex
        tokens = list(ids)
        cache: Any = None
        stops = set() if sampling.ignore_eos else self._eos()
        with self.gate.request(rid, REQUEST_SECONDS) as ticket:
            result = Generation(rid, weight_version=self.weight_version)
            result.finish = {"type": "length", "length": sampling.max_new_tokens}
            while len(result.output_ids) < sampling.max_new_tokens:
                with self.gate.step(ticket, REQUEST_SECONDS) as go, torch.no_grad():
                    if not go:
                        result.finish = {"type": "abort", "message": "Aborted by a pause."}
                        break
                    self.updates.check_whole()
                    # not later: an update may follow as soon as the gate is left
                    result.weight_version = self.weight_version
                    if ticket.retracted:
                        cache, ticket.retracted = None, False
                    step = self.model(
                        input_ids=torch.tensor(
                            [tokens if cache is None else tokens[-1:]], device=self.model.device
                        ),
                        past_key_values=cache,
                        use_cache=True,
                    )
                cache = step.past_key_values
                token, logprob = _pick(step.logits[0, -1], sampling.temperature)
                tokens.append(token)
                result.output_ids.append(token)
                result.logprobs.append(logprob)
                if token in stops:
                    result.finish = {"type": "stop", "matched": token}
                    break
        return result

    def logits(self, ids: Sequence[int]) -> list[list[float]]:
        """fp32 logits [len(ids), vocab] of one prompt, for comparisons."""
        self._check_prompt(ids, SamplingParams(max_new_tokens=0))
        with (
            self.gate.request(uuid.uuid4().hex, REQUEST_SECONDS) as ticket,
            self.gate.step(ticket, REQUEST_SECONDS) as go,
            torch.no_grad(),
        ):
            if not go:
                raise StateError("aborted by a pause")
            self.updates.check_whole()
            logits = self.model(
                input_ids=torch.tensor([list(ids)], device=self.model.device), use_cache=False
            ).logits[0]
        rows: list[list[float]] = logits.float().tolist()
        return rows

    def resume(self, timeout: float) -> None:
        """Refused while the weights are inconsistent or have no version yet."""
        self.updates.check_whole()
        self.gate.resume(timeout)

    def _check_prompt(self, ids: Sequence[int], sampling: SamplingParams) -> None:
        vocab = int(self.model.config.vocab_size)
        if not ids:
            raise InvalidArgumentError("the prompt is empty")
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise InvalidArgumentError(f"input_ids[{position}]: {token!r}, vocabulary {vocab}")
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and len(ids) + sampling.max_new_tokens > longest:
            raise InvalidArgumentError(
                f"{len(ids)} tokens and {sampling.max_new_tokens} new ones: at most {longest}"
            )

    def _eos(self) -> set[int]:
        eos = getattr(self.model.config, "eos_token_id", None)
        return set(eos) if isinstance(eos, list | tuple) else set() if eos is None else {eos}

    # --- weights ----------------------------------------------------------------------------

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        return self.gate.update(end.left)

    def flush(self) -> None:
        self.gate.flush()

    def update_weights_from_disk(self, model_path: str, **told: Any) -> None:
        super().update_weights_from_disk(model_path, **told)
        self.model_path = model_path

    def update_weights_from_tensor(self, serialized_named_tensors: list[str], **told: Any) -> str:
        """As `update`, of one worker's payload in base64."""
        if not serialized_named_tensors:
            raise InvalidArgumentError("serialized_named_tensors is empty, one worker needs 1")
        try:
            data = base64.b64decode(serialized_named_tensors[0], validate=True)
        except ValueError as error:
            raise InvalidArgumentError(f"serialized_named_tensors: {error}") from error
        return self.update(data, **told)

    def update_weight_version(self, new_version: str, *, end: Deadline) -> str:
        """Calls the weights something else.  StateError where they are not those of one update."""
        with self.exclusive(end):
            self.updates.check_whole()
            self.updates.rename(new_version)
        return f"Weight version updated to {new_version}"

    def checksums(self) -> dict[str, str]:
        """A 64-bit checksum in hex of the bytes of every parameter and persistent buffer; names
        that stand for one tensor (a tied head) give one entry, under the first.  Waits for an
        update that is under way."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict()
        with self.gate.update(REQUEST_SECONDS):
            return {names[0]: checksum(state[names[0]]) for names in aliases(state)}

    def model_info(self) -> dict[str, Any]:
        config = self.model.config
        trouble = self.updates.trouble  # before the version: see UpdateState
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "tokenizer_path": str(getattr(self.tokenizer, "name_or_path", "")),
            "is_generation": True,
            "weight_version": self.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures or [type(self.model).__name__],
            "consistent": not trouble,
            "reason": trouble,
            "instance": self.instance,
        }


def create_app(model: Any, *, api_key: str | None = None, **options: Any) -> "FastAPI":
    """An ASGI application around a transformers causal language model.

    api_key: asked for as a bearer key everywhere but on /health.  options: as of Engine, which is
    at `app.state.engine`.
    """
    from wsync.demo.engines.app import build_app

    return build_app(Engine(model, **options), api_key=api_key)


def _pick(logits: torch.Tensor, temperature: float) -> tuple[int, float]:
    logprobs = logits.float().log_softmax(-1)
    if temperature < _GREEDY_TEMPERATURE:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial((logits.float() / temperature).softmax(-1), 1))
    return token, float(logprobs[token])


def checksum(tensor: torch.Tensor) -> str:
    """64 bits of a tensor's bytes, in hex."""
    return f"{checksum_of(tensor):016x}"


if __name__ == "__main__":
    from wsync.demo.engines.serve import main

    main()
