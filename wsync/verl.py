"""verl's checkpoint engine "wsync": verl's trainers update its SGLang and vLLM servers directly.

verl loads it if the configuration says so, under `actor_rollout_ref.rollout`:

```yaml
checkpoint_engine:
  backend: wsync
  custom_backend_module: wsync.verl
  engine_kwargs: {wsync: {deadline: 300}}
engine_kwargs:
  sglang: {custom_weight_loader: [wsync.sglang.load_weights]}
  vllm: {worker_extension_cls: wsync.verl.WorkerExtension}
```

`engine_kwargs.wsync` takes the fields of `wsync.Options`, and `timeout` (see
WsyncCheckpointEngine).

Each trainer rank keeps its share of the whole tensors that verl gathers, and the ranks update the
servers with one `wsync.Sync`.  verl's rollout workers, through which verl's own engines send, only
wait.  The trainer tells them when every server has the weights, or why a server lacks them.

Made against verl 0.9.1.  It depends on verl's base class, on its actors' names, and on what its
rollouts do with an update that gives them no tensors (`wire_format`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import wsync
from wsync.handles.sglang_http import HttpHandle
from wsync.handles.vllm import VllmHandle, VllmServer
from wsync.layout import ADAPTERS
from wsync.messages.tcp_channel import Channel, Frame, Listener

_WHERE: Final = "checkpoint_engine.engine_kwargs.wsync"
_MEETING_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Member:
    """What a process reports before an update: its Ray actor, its node, its GPU ("" for none), and
    the address where it listens.  The first trainer rank does not listen."""

    actor: Any
    node: str
    gpu: str
    address: str = ""


@dataclass(frozen=True)
class Server:
    """One of verl's servers: its kind, "sglang" or "vllm", and its URL."""

    kind: str
    url: str

    def handle(self, timeout: float) -> wsync.EngineHandle:
        if self.kind == "sglang":
            return _SglangServer(self.url, timeout=timeout)
        return _VllmServer(VllmServer(self.url), timeout=timeout)


class _SglangServer(HttpHandle):
    """An SGLang server.  It stays paused after an update, because verl resumes it once its KV cache
    has memory again."""

    def resume(self, timeout: float) -> None:
        self._end(timeout)


class _VllmServer(VllmHandle):
    """A vLLM server, which verl itself pauses and resumes."""

    def pause(self, mode: str, timeout: float) -> None:
        self._mode = mode

    def resume(self, timeout: float) -> None:
        """Left to verl."""


@CheckpointEngineRegistry.register("wsync")
class WsyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One process's part in verl's updates; the process is a trainer rank or a rollout worker.

    Args:
        bucket_size: bytes of a bucket, for servers that run without wsync's loader.  It comes from
            verl's update_weights_bucket_megabytes.
        is_master: whether this is the first trainer rank.
        timeout: seconds that a rollout worker waits for the trainer to begin, and then again for
            the servers to have the weights.  The wait ends at once if the trainer fails or ends.
        options: fields of `wsync.Options`, by name.

    Raises:
        InvalidArgumentError: an unknown option, or a value that an option cannot have.
    """

    # For an update that yields no flush, verl's rollouts record the step and do nothing else.
    wire_format = "delta_flush"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        timeout: float = 3600.0,
        **options: Any,
    ) -> None:
        # verl continues all servers after an update
        chosen: dict[str, Any] = {"bucket_nbytes": bucket_size, "lost": "raise"}
        chosen |= wsync.Options.named(_WHERE, options)
        self._options = wsync.Options(**chosen)
        self._timeout = timeout
        self._is_master = is_master
        self._listener: Listener | None = None
        self._channels: list[Channel] = []  # the master's: to all rollout workers; theirs: to it
        self._servers: list[Server] = []
        self._offsets: list[int] | None = None
        self._kept: dict[str, torch.Tensor] = {}  # this rank's share of whole tensors
        self._gather_seconds = 0.0  # of the last step
        self._sync: wsync.Sync | None = None
        self._made_for: object = None
        self._version = 0  # the last connection's, for steps without a number

    def prepare(self) -> Member:
        """Begins an update; returns what `build_topology` needs to know of this process."""
        self.finalize()  # ends an earlier update that has failed
        context = ray.get_runtime_context()
        address = ""
        if not self._is_master:
            host = ray.util.get_node_ip_address().strip("[]")
            self._listener = Listener(host, "the trainer")
            address = self._listener.address
        return Member(context.current_actor, context.get_node_id(), _gpu(), address)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Finds the servers of all replicas; returns the arguments for each process.

        Raises:
            UnsupportedError: a replica has no server that can be updated.
        """
        ranks, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        lacking = [w for w in rollouts if not hasattr(w.actor, "get_replica_rank")]
        if lacking:
            raise wsync.UnsupportedError(
                f"{lacking[0].actor!r}: a rollout in the trainer's own process already has its "
                "weights: set checkpoint_engine.backend=naive"
            )
        numbers = ray.get(
            [rollout.actor.get_replica_rank.remote() for rollout in rollouts],
            timeout=_MEETING_SECONDS,
        )
        replicas: dict[int, list[Member]] = {}
        for number, rollout in zip(numbers, rollouts, strict=True):
            replicas.setdefault(number, []).append(rollout)
        servers = [_server(number) for number in replicas]
        offsets = _offsets(ranks, list(replicas.values()))
        addresses = [rollout.address for rollout in rollouts]
        trainer: dict[str, list[Any]] = {
            "rollouts": [addresses, *([[]] * (actor_wg_world_size - 1))],
            "servers": [servers] * actor_wg_world_size,
            "offsets": [offsets] * actor_wg_world_size,
        }
        return trainer, {"servers": [None] * rollout_world_size}

    def init_process_group(
        self,
        *,
        servers: Sequence[Server] | None,
        offsets: Sequence[int] | None = None,
        rollouts: Sequence[str] = (),
    ) -> None:
        """Connects the first trainer rank with the rollout workers, which get servers=None.

        Raises:
            DeadlineError, PeerClosedError: they did not connect.
        """
        if servers is None:
            assert self._listener is not None
            self._channels = [self._listener.accept(_MEETING_SECONDS)]
        else:
            self._servers = list(servers)
            self._offsets = None if offsets is None else list(offsets)
            for address in rollouts:
                channel = Channel.connect(address, _MEETING_SECONDS, peer="rollout worker")
                self._channels.append(channel)
        self._stop_listening()

    def finalize(self) -> None:
        """Ends an update: frees the memory of whole tensors and closes the connections."""
        self._stop_listening()
        for channel in self._channels:
            channel.close()
        self._channels = []
        self._kept.clear()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Updates all servers; every trainer rank calls it with the same step.

        Args:
            weights: whole tensors under their Hugging Face names.  All ranks get all tensors, in
                the same order.
            global_steps: the weight version that servers report afterwards.  None counts up.

        Returns:
            Metrics for verl's trainer, on the first rank only, because verl keeps one rank's: the
            seconds of the update; the seconds that verl took to gather tensors before it; the
            megabytes delivered to all servers' workers; and the part of `wsync.Report.metrics`
            whose names begin with "wsync/".

        Raises:
            UnsupportedError: adapters that were not merged.
            WsyncError: see `wsync.Sync.update`; rollout workers raise its text.
        """
        try:
            report = self._update(weights, global_steps)
            self._say(Frame.COMMIT)
        except BaseException as error:
            for channel in self._channels:
                channel.fail(error)
            raise
        if not self._is_master:
            return {}
        metrics = report.metrics()
        return {
            "checkpoint_engine/seconds": report.seconds,
            "checkpoint_engine/gather_seconds": self._gather_seconds,
            "checkpoint_engine/payload_mbytes": report.delivered_nbytes / (1 << 20),
            **{name: value for name, value in metrics.items() if name.startswith("wsync/")},
        }

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Any]:
        """Yields nothing; the servers have the weights when it ends.

        Raises:
            RemoteError: the trainer has failed, with this error.
            PeerClosedError, DeadlineError: the trainer has ended, or took longer than `timeout`
            seconds.
        """
        (trainer,) = self._channels
        trainer.wait((Frame.BEGIN,), self._timeout)
        trainer.wait((Frame.COMMIT,), self._timeout)
        yield from ()

    def _say(self, kind: Frame) -> None:
        for channel in self._channels:
            channel.look()
            channel.send(kind, b"", self._options.deadline)

    def _update(
        self, weights: Iterable[tuple[str, torch.Tensor]], step: int | None
    ) -> wsync.Report:
        """Makes a step's update.  If the update fails on any rank, the next update connects anew,
        because the tensors may differ, or another rank may have closed its connection."""
        given = iter(weights)
        try:
            try:
                self._say(Frame.BEGIN)
                sync = self._connected(given)
            except Exception:
                # the other ranks go on gathering, and would wait for this one
                with contextlib.suppress(Exception):
                    collections.deque(given, maxlen=0)
                raise
            return sync.update(version=step)
        except BaseException:
            self._made_for = None
            raise

    def _keep(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[object]:
        """Keeps this rank's share; returns the names and forms of all tensors.  The ranks gather
        together, so all see the same order; each tensor stays on the rank with the fewest bytes."""
        rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        nbytes = [0] * count
        forms = dict[str, object]()
        self._kept.clear()
        for name, tensor in weights:
            if name in forms:
                raise wsync.LayoutError(f"{name}: verl gives two tensors of this name")
            if not ADAPTERS.isdisjoint(name.split(".")):
                raise wsync.UnsupportedError(
                    f"{name}: adapters must be merged: set model.lora.merge=True"
                )
            home = nbytes.index(min(nbytes))
            nbytes[home] += tensor.nbytes
            forms[name] = tensor.dtype, tensor.shape, tensor.device.type
            if home == rank:
                self._kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return list(forms.items())

    def _connected(self, weights: Iterable[tuple[str, torch.Tensor]]) -> wsync.Sync:
        """Returns the connection to the current servers for these tensors.  It is made anew only if
        servers or tensors have changed."""
        start = time.perf_counter()
        wanted = (self._servers, self._offsets, self._keep(weights))
        self._gather_seconds = time.perf_counter() - start
        if self._sync is not None and self._made_for == wanted:
            return self._sync
        if self._sync is not None:
            former, self._sync = self._sync, None
            self._version = former.version
            former.close()
        deadline = self._options.deadline
        self._sync = wsync.Sync(
            self._kept,
            lambda: [server.handle(deadline) for server in self._servers],
            engine_gpu_offsets=self._offsets,
            options=self._options,
        )
        self._sync.version, self._made_for = self._version, wanted
        return self._sync


def _gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _server(replica: int) -> Server:
    """Finds the server of a replica by the name that verl gives its actor."""
    for kind in ("sglang", "vllm"):
        actor = _actor(f"{kind}_server_{replica}_0")
        if actor is None:
            continue
        if _actor(f"{kind}_server_decode_{replica}_0") is not None:
            raise wsync.UnsupportedError(
                f"replica {replica}: has a prefill and a decode server (disaggregation), but only "
                "the first one would be updated"
            )
        host, port = ray.get(actor.get_server_address.remote(), timeout=_MEETING_SECONDS)
        return Server(kind, f"http://{f'[{host}]' if ':' in host else host}:{port}")
    raise wsync.UnsupportedError(
        f"replica {replica}: no actor sglang_server_{replica}_0 or vllm_server_{replica}_0: "
        "set rollout.name to sglang or vllm"
    )


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _offsets(ranks: Sequence[Member], replicas: Sequence[Sequence[Member]]) -> list[int] | None:
    """engine_gpu_offsets: the first of the trainer ranks whose GPUs a replica shares, or a number
    beyond all ranks, which makes the replica remote.  None if all are on one node without GPUs."""
    first = (ranks[0].node, "")
    if {(p.node, p.gpu) for p in (*ranks, *itertools.chain(*replicas))} == {first}:
        return None
    places, found = [(p.node, p.gpu) for p in ranks], []
    for workers in replicas:
        mine = [(worker.node, worker.gpu) for worker in workers]
        starts = [s for s in range(len(places)) if places[s : s + len(mine)] == mine]
        found.append(starts[0] if starts else len(places))
    return found


def __getattr__(name: str) -> Any:
    """Makes `WorkerExtension`, the class for vLLM's workers: verl's own, which verl's server calls,
    joined with wsync's.  It is made on demand, because it needs vLLM."""
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from wsync import vllm

    made = type(name, (vLLMColocateWorkerExtension, vllm.WorkerExtension), {"__module__": __name__})
    globals()[name] = made
    return made
