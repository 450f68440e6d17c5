"""One worker of an engine: its weights, and the requests that write to them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from wsync._core import InvalidArgumentError, LayoutError, RemoteError
from wsync.bucket import FlattenedTensorBucket
from wsync.checkpoints.safetensors_layout import State
from wsync.engine import checkpoint_loader
from wsync.engine.destination import (
    Destination,
    LoadTarget,
    Snapshot,
    aliases,
    check_owned,
    state_of,
)
from wsync.engine.receiver import Receiver
from wsync.engine.ring_loaders import Loader, ModuleLoader
from wsync.engine.update_groups import BROADCAST_SECONDS, Named, UpdateGroups
from wsync.machine.deadline import Deadline
from wsync.messages import control, payload
from wsync.module_tensors import same_bytes
from wsync.module_tensors.names_in_messages import unfused

Facts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_CASTS: Final = ({torch.float32, torch.bfloat16}, {torch.float32, torch.float16})


class ModelWorker:
    """What every engine's worker does.  Subclasses say how tensors get into their model.

    `end` is when whoever asks waits no longer; `update_id` that of the update that a request
    belongs to, or ""; `weight_version` what the weights are called once all of it have come, or
    None.  `request` stands for the last two and flush_cache.
    """

    threads = 1
    broadcast_seconds = BROADCAST_SECONDS

    def __init__(self, loader: Loader, *, rank: int = 0, weight_version: str = "default") -> None:
        self.rank = rank
        self.receiver = Receiver(loader, worker=rank, told=True)
        self.updates = self.receiver.state
        self.updates.weight_version = weight_version
        self._groups = UpdateGroups(rank)

    # --- what subclasses say ----------------------------------------------------------------

    def names(self) -> Iterable[str]:
        """What an update in an engine's own payloads has to bring this worker."""
        raise InvalidArgumentError(f"worker {self.rank} takes wsync's control messages only")

    def load_weights(self, weights: Named) -> None:
        """Takes named tensors from an engine's own payloads: what a stock engine does."""
        raise NotImplementedError

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> LoadTarget:
        """Where a checkpoint's tensors go, or the worker's parts of them."""
        raise InvalidArgumentError(f"worker {self.rank} takes no checkpoints")

    def exclusive(self, end: Deadline) -> AbstractContextManager[None]:
        """Around what writes to the weights."""
        return nullcontext()

    def flush(self) -> None:
        """Forgets what was computed with the weights; StateError while that is in use."""

    # --- questions of a process --------------------------------------------------------------

    def answer(self, what: str, argument: Any) -> Any:
        """The answer to one question: what the method of that name returns."""
        return getattr(self, what)(**(argument or {}))

    def ping(self) -> None:
        """Nothing: that there is an answer is all."""

    def state(self) -> tuple[str, int, str]:
        updates = self.updates
        return updates.trouble, updates.weights, updates.weight_version

    def begin(self, update_id: str) -> None:
        """The engine is paused."""
        self.updates.begin(update_id)

    def go_on(self, update_id: str) -> bool:
        """The engine is to continue; False if it has before."""
        return self.updates.go_on(update_id)

    # --- requests ----------------------------------------------------------------------------

    def update(self, data: bytes, *, load_format: str | None, end: Deadline, **request: Any) -> str:
        """A control message, or a bucket in a stock engine's payload; a text about it."""
        content: Any = payload.load(data)
        if load_format == control.LOAD_FORMAT:
            version, update_id = request.get("weight_version"), request.get("update_id", "")
            with self.exclusive(end):
                success, text = self.receiver.answer(content, version=version, update_id=update_id)
            if not success:
                raise RemoteError(text)
            return text
        with self._request(end, **request):
            self.take(_tensors(content, load_format))
        return "Success"

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        end: Deadline,
        load_format: str | None = None,
        state: State | None = None,
        **request: Any,
    ) -> None:
        """A checkpoint folder.  One that is not whole or does not fit, or whose files are others
        than other workers', is refused before anything is loaded."""
        if load_format not in (None, "auto", "safetensors"):
            raise InvalidArgumentError(f"load_format {load_format!r}: only safetensors here")
        with self._request(end, **request):
            checkpoint_loader.load(
                model_path,
                self.targets,
                self.receiver,
                threads=self.threads,
                state=state,
                timeout=end.left,
            )

    def init_weights_update_group(
        self, *, end: Deadline, update_id: str = "", timeout: float | None = None, **group: Any
    ) -> None:
        """Joins a process group for updates; see wsync.engine.update_groups.  timeout: seconds that
        a broadcast may take; None: broadcast_seconds."""
        self.updates.regroup(update_id)
        timeout = self.broadcast_seconds if timeout is None else timeout
        self._groups.init(meeting=end.left, timeout=timeout, **group)

    def destroy_weights_update_group(
        self, *, group_name: str, end: Deadline, update_id: str = ""
    ) -> None:
        self.updates.regroup(update_id)
        self._groups.destroy(group_name)

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        group_name: str,
        end: Deadline,
        weight_version: str | None = None,
        update_id: str = "",
        flush_cache: bool = False,
        **what: Any,
    ) -> None:
        """Takes what a trainer broadcasts."""
        request = self._request(end, update_id, weight_version, flush_cache)
        with self._groups.announced(group_name) as (receive, origin), request:
            # before the broadcast, which would be another request's
            self.updates.admit(names, self.wanted(), origin)
            self.take(receive(timeout=end.left, names=names, group_name=group_name, **what), origin)

    @contextmanager
    def _request(
        self,
        end: Deadline,
        update_id: str = "",
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> Iterator[None]:
        """Around one request's weights."""
        with self.exclusive(end), self.updates.serving(update_id, weight_version):
            if flush_cache:
                self.flush()
            yield

    def wanted(self) -> dict[str, str]:
        """The tensor that each name stands for, of all that an update has to bring."""
        return {name: name for name in self.names()}

    def take(self, weights: Named, origin: str = "") -> None:
        """One bucket of an update."""
        names = [name for name, _ in weights]
        with self.updates.loading(names, self.wanted(), origin):
            self.load_weights(weights)


class ModuleWorker(ModelWorker):
    """Whole tensors go to the parameters and persistent buffers of their names; see
    wsync.engine.ring_loaders.ModuleLoader.

    ignore: tensor names that an update may lack, or bring although the module does not have them.
    threads: copy threads.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        ignore: Iterable[str] = (),
        threads: int = 1,
        weight_version: str = "default",
    ) -> None:
        self.ignore = frozenset(ignore)
        super().__init__(
            ModuleLoader(module, ignore=self.ignore, threads=threads), weight_version=weight_version
        )
        self.module = module
        self.threads = threads

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> LoadTarget:
        return Destination.of(self.module, shapes, self.ignore)

    def wanted(self) -> dict[str, str]:
        first = _first_names(state_of(self.module))
        ignored = {first.get(name) for name in self.ignore}
        return {name: chosen for name, chosen in first.items() if chosen not in ignored}

    def take(self, weights: Named, origin: str = "") -> None:
        """Copies a bucket by name.  What fits is checked before the first byte is written."""
        snapshot = Snapshot(self.module)
        state = state_of(self.module)
        weights = [(name, t) for name, t in weights if name in state or name not in self.ignore]
        facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        check_fit(weights, facts, type(self.module).__name__)
        first = _first_names(state)
        wanted = self.wanted()
        names = [name for name, _ in weights]
        filled = sorted({*wanted.values(), *(first[name] for name in names if name in first)})
        target = Destination(filled, [state[name] for name in filled], snapshot=snapshot)
        check_owned(self.module, filled, target.tensors)
        target.layout().check_apart(target.buffers())
        with self.updates.loading(names, wanted, origin) as came, torch.no_grad():
            for name, tensor in _once(weights, state, first, came):
                state[name].copy_(tensor)
            target.check_places()


def _first_names(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first name of each tensor that has elements, by all its names."""
    groups = [group for group in aliases(state) if state[group[0]].numel()]
    return {name: group[0] for group in groups for name in group}


def check_fit(weights: Named, facts: Facts, who: str) -> None:
    """Refuses what cannot be written as it is, by name.  facts: shape and dtype of all that may
    be delivered.

    Raises:
        LayoutError: an unknown name, another shape, or a dtype that is not cast.
    """
    for name, tensor in weights:
        if name not in facts:
            raise LayoutError(f"{name}: not in {who}{unfused([name])}")
        shape, dtype = facts[name]
        if tensor.shape != shape:
            raise LayoutError(f"{name}: shape {tuple(tensor.shape)} delivered, {shape} in {who}")
        if tensor.dtype != dtype and {tensor.dtype, dtype} not in _CASTS:
            raise LayoutError(f"{name}: {tensor.dtype} delivered, {dtype} in {who}")


def _once(
    weights: Named,
    state: Mapping[str, torch.Tensor],
    first: Mapping[str, str],
    came: Collection[str],
) -> Named:
    """What of a bucket is to be written: of several names of one tensor, one.  first: the name
    that each stands for; came: what the update has brought before.  LayoutError where another
    name of a tensor brings other values."""
    values = {first[name]: (name, state[name]) for name in came if name in first}
    found = []
    for name, tensor in weights:
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


def _tensors(content: Any, load_format: str | None) -> Named:
    """(name, tensor) of a stock engine's payload, which may be anything that could be read."""
    if load_format == control.FLATTENED_BUCKET:
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
    if load_format not in (None, "direct"):
        raise InvalidArgumentError(f"unknown load_format {load_format!r}")
    try:
        pairs = [(name, tensor) for name, tensor in content]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    if not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in pairs):
        raise InvalidArgumentError("payload: not a list of (name, tensor)")
    return pairs
