"""wsync as a backend of vLLM's own weight transfer, under the name "wsync".

vLLM's workers use it with `--weight-transfer-config '{"backend": "wsync"}'`, if wsync is installed
beside vLLM.  A trainer gives vLLM's factory a TrainerInitInfo:

    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory)
    from wsync.vllm.weight_transfer_engine import TrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0, workers=2),
        client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model))
    engine.send_weights()

The source's whole tensors go through wsync's ring to each worker, which loads them as
WorkerExtension does.  If a source makes its tensors, each tensor needs memory of its own.  A source
that fills the same memory again is refused.  As with vLLM's other backends, the caller pauses
generation, empties caches and resumes.  If a trainer dies within an update, call the engine's
finish_weight_update before another trainer begins an update.  Otherwise the workers refuse that
update, and vLLM's executor is one answer behind from then on.  Not supported: several engines
behind one client, data-parallel engines, and draft models.

Made against vLLM 0.32.0 (vllm/distributed/weight_transfer/base.py).  This backend has run with an
LLM, and with the HTTP server and vLLM's client for it, from one trainer rank and from two.  vLLM's
client for Ray has not been run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo as VllmTrainerInitInfo
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import wsync
from wsync.engine.receiver import Receiver
from wsync.machine.daemon_threads import result, start
from wsync.machine.deadline import Deadline
from wsync.vllm import VllmLoader, engine_of, obstacle, register

_log = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The first message to workers: the number of workers that the trainer expects."""

    workers: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A control message for each worker.  version: the new weight version, in a closing message."""

    messages: list[str]
    version: str | None = None


@dataclass
class TrainerInitInfo(VllmTrainerInitInfo):  # type: ignore[misc]
    """The settings of a trainer rank.

    rank: this process's rank in torch.distributed's default group, which has all trainer ranks.
    workers: number of the engine's workers (tensor parallel x pipeline parallel).
    options: the options that wsync.connect gets.
    """

    backend: ClassVar[str] = "wsync"
    workers: int = field(kw_only=True)
    options: wsync.Options | None = field(kw_only=True, default=None)


class WorkerEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A worker's part in a weight transfer.

    The worker itself tells the trainer of a failed update, if they are connected.  Here only the
    last worker raises, and the others log their errors.  If another worker raised, vLLM's executor
    would take the remaining answers for those of its next call.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = int(self.parallel_config.rank)
        loader = VllmLoader(model, vllm_config, vllm_config.model_config, device)
        self._receiver = Receiver(loader, worker=self._rank)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Raises UnsupportedError if the engine cannot be updated, and ValueError if the trainer
        expects another number of workers or if its client reaches several engines."""
        parallel = self.parallel_config
        if why := obstacle(parallel):
            self._tell(wsync.UnsupportedError(why))
        alone = getattr(parallel, "data_parallel_external_lb", False)
        engines = max(parallel.data_parallel_size, 1 if alone else engine_of(parallel) + 1)
        if (engines, parallel.world_size) != (1, init_info.workers):
            self._tell(
                ValueError(
                    f"workers={init_info.workers}: the engine has {parallel.world_size} workers "
                    f"and data_parallel_size {engines} (only 1 is supported)"
                )
            )

    def _tell(self, error: Exception) -> None:
        if self._rank == self.parallel_config.world_size - 1:
            raise error
        _log.error("worker %d: %s", self._rank, error)

    def start_weight_update(self) -> None:
        """Does nothing, because an update begins with its opening message."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises RemoteError if an update has failed, for example because the same client serves
        another engine."""
        message = update_info.messages[self._rank].encode()
        good, text = self._receiver.handle(message, version=update_info.version)
        if not good:
            self._tell(wsync.RemoteError(text))

    def finish_weight_update(self) -> None:
        if trouble := self._receiver.trouble:
            _log.error("worker %d: %s", self._rank, trouble)

    def shutdown(self) -> None:
        self._receiver.close()


class TrainerEngine(TrainerWeightTransferEngine[TrainerInitInfo]):  # type: ignore[misc]
    """A trainer rank's part: wsync's connection over vLLM's client.

    All ranks make a `TrainerEngine` and call send_weights.  Each rank sends its share of its
    source's tensors, which are all in memory at once.  A module's tensors are read in place;
    gathered tensors (FSDP) are whole.
    """

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._options = init_info.options or wsync.Options()
        self._engine = _Engine(client, init_info.workers)
        self._weights: dict[str, torch.Tensor] = {}  # the source's, during an update
        self._sync: wsync.Sync | None = None
        self._failed = False  # whether the last update failed
        self._version = 0  # of the last connection

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: Any, source: Any | None = None
    ) -> Self:
        """Tells the workers how many of them the trainer expects; send_weights moves the bytes."""
        if source is None:
            raise ValueError("wsync's weight transfer needs a WeightSource")
        if len(handles := getattr(client, "handles", ())) > 1:
            raise wsync.UnsupportedError(
                f"{type(client).__name__} has {len(handles)} engines: wsync's weight transfer "
                "updates one engine per client"
            )
        if init_info.is_sender:
            timeout = (init_info.options or wsync.Options()).deadline
            name, told = "init_weight_transfer_engine", {"workers": init_info.workers}
            _within(timeout, name, lambda: client.init_weight_transfer_engine(told))
        return cls(init_info, client=client, source=source)

    def send_weights(self, weight_version: str | None = None) -> wsync.Report:
        """Replaces all weights of the engine with the source's; called on every trainer rank.

        weight_version: the version that the engine reports afterwards; None: the number of this
        call.

        Raises:
            LayoutError: a tensor's name, shape or dtype differs from the last call's; the next
                call connects anew and accepts it.  Or the source has overwritten a tensor that it
                had given before, or gives two tensors of one name.
            WsyncError: the same on all ranks, except for errors of one rank's source, and of
                finish_weight_update, which only the rank with the client raises.  The engine stays
                as it is, and must not answer until another call has succeeded.
        """
        try:
            report = self._connected().update(version=weight_version)
        except BaseException:
            self._failed = True
            with contextlib.suppress(Exception):  # the update's own error says more
                self._engine.finish(None, self._options.deadline)
            raise
        finally:
            self._weights.clear()  # they may have been gathered only for this update
        self._engine.finish(str(report.version), self._options.deadline)
        return report

    def _connected(self) -> wsync.Sync:
        """Returns the connection of the last update if that succeeded, else a new one, which goes
        on counting versions."""
        self._weights |= self._from_source()
        former = self._sync
        if former is not None and not self._failed:
            return former
        self._sync, self._failed = None, False
        if former is not None:
            self._version = former.version
            former.close()
        self._sync = wsync.connect(self._weights, [self._engine], options=self._options)
        self._sync.version = self._version
        return self._sync

    def _from_source(self) -> dict[str, torch.Tensor]:
        # in vLLM 0.32 the source itself is iterated
        pairs = self.source.iter_full() if hasattr(self.source, "iter_full") else self.source
        given = [(name, tensor.detach()) for name, tensor in pairs if tensor is not None]
        weights = dict(given)
        if len(weights) < len(given):
            name, _ = Counter(name for name, _ in given).most_common(1)[0]
            raise wsync.LayoutError(f"{name}: the source gives two tensors of this name")
        return weights

    def shutdown(self) -> None:
        if self._sync is not None:
            self._sync.close()


class _Engine:
    """Makes vLLM's client an engine with collective_rpc (wsync.handles.vllm).  The client returns
    no answers, so the engine has as many workers as the trainer was told."""

    def __init__(self, client: Any, workers: int) -> None:
        self.name = f"vLLM behind {type(client).__name__}"
        self._client, self._workers = client, workers
        self._started = False
        self._facts = {
            "workers": workers,
            "engine": 0,
            "engines": 1,
            "weight_version": None,
            "instance": secrets.token_hex(8),  # stands for a worker that keeps its weights
        }

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        ranks = range(self._workers)
        if method == "wsync_describe":
            return [json.dumps({"rank": rank, **self._facts}) for rank in ranks]
        messages, version, _ = args
        if not self._started:
            self._start()
        self._client.update_weights({"messages": messages, "version": version})
        if version is not None:
            self._facts["weight_version"] = version
        return [[True, ""] for _ in ranks]

    def _start(self) -> None:
        self._started = True
        try:
            self._client.start_weight_update()
        except Exception:
            # an earlier update may not have ended: its answer was lost, or its trainer has died
            self._client.finish_weight_update(None)
            self._client.start_weight_update()

    def finish(self, version: str | None, timeout: float) -> None:
        """Ends the update that was started, if any.  vLLM's clients themselves have no deadline."""
        if self._started:
            self._started = False
            name = "finish_weight_update"
            try:
                _within(timeout, name, lambda: self._client.finish_weight_update(version))
            except wsync.WsyncError:
                raise
            except Exception as error:
                raise wsync.RemoteError(f"engine {self.name}: {name}: {error!r}") from error


def _within(timeout: float, name: str, call: Callable[[], object]) -> None:
    """Makes a call of vLLM's client; DeadlineError if it does not return in time."""
    result(start(f"wsync-{name}", call), Deadline(timeout), bool, f"vLLM's {name} has not returned")


register()
