"""A small inference engine on a Hugging Face transformers model, with SGLang's endpoints.

For notebooks, demonstrations and tests: it generates text one token at a time and takes weight
updates the way SGLang does.  One worker, CPU.

    python -m wsync.demo.engines.transformers --model DIR --port 30000     # weights from DIR
    python -m wsync.demo.engines.transformers --config DIR --port 30000    # random weights

Weights go by the names of the model's checkpoint, also where transformers 5 has fused experts.
"""

import base64
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from wsync._core import InvalidArgumentError, __version__
from wsync.demo.engines.gate import REQUEST_SECONDS, Gate
from wsync.demo.engines.model_worker import ModuleWorker
from wsync.engine.destination import aliases
from wsync.machine.deadline import Deadline
from wsync.messages.control import LOAD_FORMAT
from wsync.module_tensors import checksum_of

_GREEDY_TEMPERATURE: Final = 1e-6  # below it the likeliest token is taken, as SGLang does


class Engine(ModuleWorker):
    """The engine behind the endpoints: a model, its receiver, and who may run when.

    worker: as of ModuleWorker.
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, model_path: str = "", **worker: Any
    ) -> None:
        super().__init__(model.eval(), **worker)
        self.model = model
        self.tokenizer = tokenizer
        self.model_path = model_path or str(getattr(model.config, "name_or_path", ""))
        self.instance = uuid.uuid4().hex
        self.gate = Gate()

    @property
    def weight_version(self) -> str:
        return self.updates.weight_version

    # --- generation -------------------------------------------------------------------------

    def generate(
        self,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continues one prompt.  Waits while the engine is paused; what runs when it is paused
        ends, starts over or goes on as the pause's mode says.  The version in the answer is that
        of the weights that gave the last token."""
        sampling = {"max_new_tokens": 128, "temperature": 1.0, **(sampling_params or {})}
        if (text is None) == (input_ids is None):
            raise InvalidArgumentError("give either text or input_ids")
        if text is not None and self.tokenizer is None:
            raise InvalidArgumentError("this model has no tokenizer: give input_ids")
        tokens = list(self.tokenizer.encode(text) if input_ids is None else input_ids)
        prompt, longest = len(tokens), len(tokens) + sampling["max_new_tokens"]
        self._check_prompt(tokens, longest)
        cache: Any = None
        stops = set() if sampling.get("ignore_eos") else self._eos()
        finish: dict[str, Any] = {"type": "length", "length": sampling["max_new_tokens"]}
        with self.gate.request() as ticket:
            version = self.weight_version
            while len(tokens) < longest and finish["type"] == "length":
                with self.gate.step(ticket), torch.no_grad():
                    if ticket.aborted:
                        finish = {"type": "abort", "message": "Aborted by a pause."}
                        break
                    self.updates.check_whole()
                    # not later: an update may follow as soon as the gate is left
                    version = self.weight_version
                    if ticket.retracted:
                        cache, ticket.retracted = None, False
                    ids = torch.tensor(
                        [tokens if cache is None else tokens[-1:]], device=self.model.device
                    )
                    step = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                tokens.append(_pick(step.logits[0, -1], sampling["temperature"]))
                if tokens[-1] in stops:
                    finish = {"type": "stop", "matched": tokens[-1]}
        output = tokens[prompt:]
        said = self.tokenizer and self.tokenizer.decode(output, skip_special_tokens=True)
        return {
            "text": said or "",
            "output_ids": output,
            "meta_info": {
                "finish_reason": finish,
                "prompt_tokens": prompt,
                "completion_tokens": len(output),
                "weight_version": version,
            },
        }

    def logits(self, input_ids: Sequence[int]) -> dict[str, list[list[float]]]:
        """fp32 logits [tokens, vocab] of one prompt, for comparisons."""
        self._check_prompt(input_ids, len(input_ids))
        with self.gate.request() as ticket, self.gate.step(ticket), torch.no_grad():
            self.updates.check_whole()
            ids = torch.tensor([list(input_ids)], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return {"logits": logits.float().tolist()}

    def continue_generation(self) -> None:
        """Refused while the weights are inconsistent or have no version yet."""
        self.updates.check_whole()
        self.gate.resume()

    def _check_prompt(self, ids: Sequence[int], longest: int) -> None:
        """longest: with all new tokens."""
        vocab = int(self.model.config.vocab_size)
        if not ids:
            raise InvalidArgumentError("the prompt is empty")
        for position, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise InvalidArgumentError(f"input_ids[{position}]: {token!r}, vocabulary {vocab}")
        most = getattr(self.model.config, "max_position_embeddings", longest)
        if longest > most:
            raise InvalidArgumentError(f"{longest} tokens with the new ones: at most {most}")

    def _eos(self) -> set[int]:
        eos = getattr(self.model.config, "eos_token_id", None)
        return set(eos) if isinstance(eos, list | tuple) else set() if eos is None else {eos}

    # --- weights ----------------------------------------------------------------------------

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        return self.gate.update(end.left)

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
        """As `update`, of one worker's payload in base64."""
        (payload,) = serialized_named_tensors
        data = base64.b64decode(payload, validate=True)
        return self.update(data, load_format=load_format, weight_version=weight_version, end=end)

    def checksums(self) -> dict[str, str]:
        """A 64-bit checksum in hex of the bytes of every parameter and persistent buffer; names
        that stand for one tensor (a tied head) give one entry, under the first.  Waits for an
        update that is under way."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict()
        with self.gate.update(REQUEST_SECONDS):
            return {names[0]: checksum(state[names[0]]) for names in aliases(state)}

    def server_info(self) -> dict[str, Any]:
        """How it was started, and what it takes."""
        return {
            "model_path": self.model_path,
            "tp_size": 1,
            "custom_weight_loader": [LOAD_FORMAT],
            "version": f"wsync {__version__}",
            "instance": self.instance,
        }

    def model_info(self) -> dict[str, Any]:
        config = self.model.config
        trouble = self.updates.trouble  # before the version: see UpdateState
        return {
            "model_path": self.model_path,
            "weight_version": self.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures or [type(self.model).__name__],
            "consistent": not trouble,
            "reason": trouble,
            "instance": self.instance,
        }


def _pick(logits: torch.Tensor, temperature: float) -> int:
    if temperature < _GREEDY_TEMPERATURE:
        return int(logits.argmax())
    return int(torch.multinomial((logits.float() / temperature).softmax(-1), 1))


def checksum(tensor: torch.Tensor) -> str:
    """64 bits of a tensor's bytes, in hex."""
    return f"{checksum_of(tensor):016x}"


if __name__ == "__main__":
    from wsync.demo.engines.serve import main

    main()
