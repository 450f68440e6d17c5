"""A small inference engine on a Hugging Face transformers model, with SGLang's endpoints.

For notebooks, demonstrations and tests: it generates text one token at a time and takes weight
updates the way SGLang does.  One worker, CPU.

    python -m wsync.demo.engines.transformers --model DIR --port 30000     # weights from DIR
    python -m wsync.demo.engines.transformers --config DIR --port 30000    # random weights

Without a tokenizer, text is token ids in decimal with spaces between them.

Weights go by the names of the model's runtime parameters.  transformers 4.57 keeps experts one
by one, as checkpoints do; 5 fuses them, so MoE updates need 4.57 here.
"""

import functools
import math
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from wsync._core import (
    InvalidArgumentError,
    LayoutError,
    StateError,
    WsyncError,
    checksum,
)
from wsync.demo.engines.gate import Gate
from wsync.engine import disk
from wsync.engine.destination import (
    Destination,
    Snapshot,
    aliases,
    check_owned,
    same_bytes,
    state_of,
)
from wsync.engine.groups import BROADCAST_SECONDS, UpdateGroups
from wsync.engine.loaders import ModuleLoader
from wsync.engine.receiver import Receiver
from wsync.exchange.groups import connection_of
from wsync.messages import payload
from wsync.messages.control import FLATTENED_BUCKET, LOAD_FORMAT

if TYPE_CHECKING:
    from fastapi import FastAPI

REQUEST_SECONDS = 600.0
_GREEDY_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to generate; a temperature below 1e-6 takes the likeliest token, as SGLang's does."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 0:
            raise InvalidArgumentError(f"max_new_tokens {self.max_new_tokens!r}: an integer >= 0")
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise InvalidArgumentError(f"temperature {self.temperature!r}: a number >= 0")


@dataclass(slots=True)
class Generation:
    """What came out: token ids, their log probabilities, why it ended, and the version of the
    weights that gave the last token."""

    rid: str
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=dict)
    weight_version: str = ""


class Engine:
    """The engine behind the endpoints: a model, its receiver, and who may run when."""

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        model_path: str = "",
        weight_version: str = "default",
        ignore: Sequence[str] = (),
        threads: int = 1,
        broadcast_seconds: float = BROADCAST_SECONDS,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.model_path = model_path or str(getattr(model.config, "name_or_path", ""))
        self.instance = uuid.uuid4().hex
        self.gate = Gate()
        self.receiver = Receiver(ModuleLoader(model, ignore=ignore, threads=threads))
        self.state = self.receiver.state
        self.state.weight_version = weight_version
        self._ignore = frozenset(ignore)
        self._threads = threads
        self._groups = UpdateGroups()
        self._broadcast_seconds = broadcast_seconds
        self._sampler = threading.local()

    @property
    def weight_version(self) -> str:
        return self.state.weight_version

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

    def generate(self, ids: Sequence[int], sampling: Sampling, rid: str = "") -> Generation:
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
                    self.check_consistent()
                    # not later: an update may follow as soon as the gate is left
                    result.weight_version = self.weight_version
                    if ticket.retracted:
                        cache, ticket.retracted = None, False
                    step = self.model(
                        input_ids=torch.tensor([tokens if cache is None else tokens[-1:]]),
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
        self._check_prompt(ids, Sampling(max_new_tokens=0))
        with (
            self.gate.request(uuid.uuid4().hex, REQUEST_SECONDS) as ticket,
            self.gate.step(ticket, REQUEST_SECONDS) as go,
            torch.no_grad(),
        ):
            if not go:
                raise StateError("aborted by a pause")
            self.check_consistent()
            logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        rows: list[list[float]] = logits.float().tolist()
        return rows

    def check_consistent(self) -> None:
        self.state.check_whole()

    def pause(self, mode: str, timeout: float, update: str = "") -> None:
        """As Gate.pause; what trainers begin an update with, and say its id."""
        self.gate.pause(mode, timeout, lambda: self.state.begin(update))

    def resume(self, timeout: float, update: str = "") -> None:
        """Refused while the weights are inconsistent or have no version yet, and to a trainer whose
        update has been ended by another one's."""
        if not self.state.consistent:
            self.state.check_whole()  # at once, whatever a bucket that does not come holds up
        self.gate.resume(timeout, lambda: self.state.go_on(update))

    def _check_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
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

    def update_weights(
        self,
        payloads: Sequence[bytes],
        *,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
        timeout: float = REQUEST_SECONDS,
        update: str = "",
    ) -> tuple[bool, str]:
        """One update request; (success, text).  The version is taken on once all weights of the
        update are here."""
        try:
            if not payloads:
                raise InvalidArgumentError("serialized_named_tensors is empty, one worker needs 1")
            # before the gate: the payload may name a process that does not answer
            content = payload.load(payloads[0], timeout=min(timeout, payload.PEER_SECONDS))
            if load_format == LOAD_FORMAT:
                control = payload.control_bytes(content)
                with self.gate.update(timeout):
                    return self.receiver.handle(control, version=weight_version, update=update)
            with self._turn(update, weight_version, flush_cache, timeout):
                self._load(content, load_format)
        except WsyncError as error:
            return False, str(error)
        except Exception as error:  # torch's, of a content that is none of a tensor's
            return False, f"Failed to update weights: {type(error).__name__}: {error}"
        return True, "Success"

    @contextmanager
    def _turn(
        self, update: str, weight_version: str | None, flush_cache: bool, timeout: float
    ) -> Iterator[None]:
        """Around one request's weights."""
        with self.gate.update(timeout), self.state.serving(update, weight_version):
            if flush_cache:
                self.gate.flush()
            yield

    def set_version(self, version: str, timeout: float, update: str = "") -> None:
        """Calls the weights something else.  StateError where they are not those of one update."""
        with self.gate.update(timeout):
            self.state.rename(version, update)

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
        timeout: float = REQUEST_SECONDS,
        update: str = "",
    ) -> tuple[bool, str]:
        """Loads a checkpoint folder; (success, text).  A folder that is not whole or does not
        fit is refused before anything is loaded."""
        try:
            if load_format not in (None, "auto", "safetensors"):
                raise InvalidArgumentError(f"load_format {load_format!r}: only safetensors here")
            with self._turn(update, weight_version, flush_cache, timeout):
                disk.load(
                    model_path,
                    self._targets,
                    self.receiver,
                    threads=self._threads,
                    timeout=timeout,
                )
                self.model_path = model_path
        except WsyncError as error:
            return False, f"Failed to update weights: {error}"
        return True, "Succeeded to update model weights."

    def _targets(self, shapes: Mapping[str, tuple[int, ...]]) -> Destination:
        """Where a checkpoint's tensors go."""
        return Destination.of(self.model, shapes, self._ignore)

    def init_weights_update_group(
        self, *, timeout: float = REQUEST_SECONDS, update: str = "", **group: Any
    ) -> tuple[bool, str]:
        """Joins a process group for updates; see wsync.engine.groups."""
        try:
            self.state.regroup(update)
            self._groups.init(meeting=timeout, timeout=self._broadcast_seconds, **group)
        except Exception as error:
            return False, f"Failed to initialize custom process group: {error}."
        return True, "Succeeded to initialize custom process group."

    def destroy_weights_update_group(self, group_name: str, update: str = "") -> tuple[bool, str]:
        try:
            self.state.regroup(update)
            self._groups.destroy(group_name)
        except WsyncError as error:
            return False, str(error)
        return True, "Succeeded to destroy custom process group."

    def update_weights_from_distributed(
        self,
        *,
        weight_version: str | None = None,
        flush_cache: bool = False,
        timeout: float = REQUEST_SECONDS,
        update: str = "",
        **what: Any,
    ) -> tuple[bool, str]:
        """Takes what a trainer broadcasts; (success, text)."""
        try:
            group = what["group_name"]
            with (
                self._groups.announced(group) as receive,
                self._turn(update, weight_version, flush_cache, timeout),
            ):
                # before the broadcast, which would be another request's
                self.state.admit(what["names"], self._wanted(), connection_of(group))
                self._copy(receive(**what), connection_of(group))
        except Exception as error:
            return False, f"Failed to update parameter online: {error}."
        return True, "Succeeded to update parameter online."

    def _load(self, content: Any, load_format: str | None) -> None:
        if load_format == FLATTENED_BUCKET:
            pairs = _bucket(content)
        elif load_format in (None, "direct"):
            pairs = _pairs(content)
        else:
            raise InvalidArgumentError(f"Unknown load_format={load_format}")
        self._copy(pairs)

    def _copy(self, pairs: Sequence[tuple[str, torch.Tensor]], origin: str = "") -> None:
        """Copies a bucket by name.  What fits is checked before the first byte is written."""
        snapshot = Snapshot(self.model)
        who, state = type(self.model).__name__, state_of(self.model)
        pairs = [(name, t) for name, t in pairs if name in state or name not in self._ignore]
        for name, tensor in pairs:
            if name not in state:
                raise LayoutError(f"{name}: not in {who}")
            if tensor.shape != state[name].shape:
                raise LayoutError(
                    f"{name}: shape {tuple(tensor.shape)} delivered, "
                    f"{tuple(state[name].shape)} in {who}"
                )
            if not _casts(tensor.dtype, state[name].dtype):
                raise LayoutError(f"{name}: {tensor.dtype} delivered, {state[name].dtype} in {who}")
        groups = [group for group in aliases(state) if state[group[0]].numel()]
        first = {name: group[0] for group in groups for name in group}
        wanted = self._wanted()
        names = [name for name, _ in pairs]
        filled = sorted({*wanted.values(), *(first[name] for name in names if name in first)})
        target = Destination(filled, [state[name] for name in filled], snapshot=snapshot)
        check_owned(self.model, filled, target.tensors)
        target.layout().check_apart(target.buffers())
        with self.state.loading(names, wanted, origin) as came, torch.no_grad():
            for name, tensor in _once(pairs, state, first, came):
                state[name].copy_(tensor)
            target.check_places()

    def _wanted(self) -> dict[str, str]:
        """The tensor that each name stands for, of all that an update has to bring."""
        state = state_of(self.model)
        return {
            name: group[0]
            for group in aliases(state)
            if state[group[0]].numel() and not self._ignore.intersection(group)
            for name in group
        }

    def checksums(self) -> dict[str, str]:
        """A 64-bit checksum in hex of the bytes of every parameter and persistent buffer; names
        that stand for one tensor (a tied head) give one entry, under the first.  Waits for an
        update that is under way."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict()
        with self.gate.update(REQUEST_SECONDS):
            return {names[0]: f"{_checksum(state[names[0]]):016x}" for names in aliases(state)}

    def model_info(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "tokenizer_path": str(getattr(self.tokenizer, "name_or_path", "")),
            "is_generation": True,
            "weight_version": self.weight_version,
            "model_type": config.model_type,
            "architectures": config.architectures or [type(self.model).__name__],
            "consistent": not self.state.trouble,
            "reason": self.state.trouble,
            "instance": self.instance,
        }


def create_app(
    model: Any,
    *,
    tokenizer: Any = None,
    api_key: str | None = None,
    model_path: str = "",
    weight_version: str = "default",
    ignore: Sequence[str] = (),
    threads: int = 1,
    broadcast_seconds: float = BROADCAST_SECONDS,
) -> "FastAPI":
    """An ASGI application around a transformers causal language model.

    api_key: asked for as a bearer key everywhere but on /health.  ignore: tensor names that an
    update may lack, or bring although the model does not have them.  threads: copy threads.
    broadcast_seconds: the most that one broadcast of a trainer may take; the engine then leaves
    that trainer's group.
    The Engine is at `app.state.engine`.
    """
    from wsync.demo.engines.app import build_app

    engine = Engine(
        model,
        tokenizer=tokenizer,
        model_path=model_path,
        weight_version=weight_version,
        ignore=ignore,
        threads=threads,
        broadcast_seconds=broadcast_seconds,
    )
    return build_app(engine, api_key=api_key)


def _pick(logits: torch.Tensor, temperature: float) -> tuple[int, float]:
    logprobs = logits.float().log_softmax(-1)
    if temperature < _GREEDY_TEMPERATURE:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial((logits.float() / temperature).softmax(-1), 1))
    return token, float(logprobs[token])


def _once(
    pairs: Sequence[tuple[str, torch.Tensor]],
    state: Mapping[str, torch.Tensor],
    first: Mapping[str, str],
    came: Collection[str],
) -> list[tuple[str, torch.Tensor]]:
    """What of a bucket is to be written: of several names of one tensor, one.  first: the name
    that each stands for; came: what the update has brought before.  LayoutError where another
    name of a tensor brings other values."""
    values = {first[name]: (name, state[name]) for name in came if name in first}
    found = []
    for name, tensor in pairs:
        if name not in first:
            continue  # it has no elements
        other, known = values.setdefault(first[name], (name, tensor))
        if known is tensor:
            found.append((name, tensor))
        elif not same_bytes(tensor.to(state[name].dtype), known.to(state[name].dtype)):
            raise LayoutError(
                f"{name} and {other} are one tensor of the module, and {name} brings other values"
            )
    return found


@functools.cache
def _casts(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether torch copies elements of one kind to another's place."""
    if source.is_complex and not destination.is_complex:  # it would drop the imaginary part
        return False
    try:
        torch.empty(1, dtype=destination).copy_(torch.empty(1, dtype=source))
    except RuntimeError:
        return False
    return True


def _pairs(content: Any) -> list[tuple[str, torch.Tensor]]:
    """[(name, tensor)] of an unpickled payload."""
    try:
        pairs = [(name, tensor) for name, tensor in content]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    for name, tensor in pairs:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError("payload: not a list of (name, tensor)")
    payload.check_names(name for name, _ in pairs)
    return pairs


def _bucket(content: Any) -> list[tuple[str, torch.Tensor]]:
    from wsync.bucket import FlattenedTensorBucket

    if not (
        isinstance(content, dict)
        and isinstance(content.get("flattened_tensor"), torch.Tensor)
        and isinstance(content.get("metadata"), list)
    ):
        raise InvalidArgumentError("payload: not a dict of flattened_tensor and metadata")
    bucket = FlattenedTensorBucket(
        flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
    )
    return bucket.reconstruct_tensors()


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return checksum(flat.numpy())


def main(arguments: Sequence[str] | None = None) -> None:
    from wsync.demo.engines.serve import main as serve

    serve(arguments)


if __name__ == "__main__":
    main()
