"""vLLM's side: `--worker-extension-cls wsync.vllm.WorkerExtension`.

vLLM mixes the class into its workers.  Each worker learns from the model's own load_weights which
parts of the model it keeps.  `wsync.handle(llm)` calls these workers through vLLM's collective_rpc.

wsync is also a backend of vLLM's own weight transfer (start_weight_update, update_weights,
finish_weight_update), with `--weight-transfer-config '{"backend": "wsync"}'`; see
wsync.vllm.weight_transfer_engine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from wsync._core import Layout, RemoteError, StateError, UnsupportedError
from wsync.checkpoints.hub_cache import folder_of
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.learn.replay_loader import LearntModule
from wsync.engine.post_load import run_in_place
from wsync.engine.receiver import Receiver, refused
from wsync.engine.ring_loaders import CallingLoader, ChoosingLoader, Held, OnWeightsLost, Receipt
from wsync.messages.control import WHOLE
from wsync.module_tensors import checksum_of, same_bytes
from wsync.module_tensors.names import listed
from wsync.quantise.config import facts_of
from wsync.trainer.checkpoint_check import check_room, check_scales
from wsync.vllm.reload_rehearsal import Rehearsal

_RECEIVER: Final = "_wsync_receiver"  # attribute of a model


def register() -> None:
    """Makes wsync a backend of vLLM's weight transfer.  vLLM calls this as a plugin (entry point
    vllm.general_plugins) in each of its processes.  Does nothing if vLLM has no such registry."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:
        return
    for factory, name in (
        (WeightTransferEngineFactory, "WorkerEngine"),
        (WeightTransferTrainerFactory, "TrainerEngine"),
    ):
        with contextlib.suppress(ValueError):  # it is registered already
            factory.register_engine("wsync", "wsync.vllm.weight_transfer_engine", name)


class WorkerExtension:
    """Methods that vLLM's workers get.  They do not raise, because after an exception vLLM's
    executor leaves the other workers' answers in its queues.  Only the last worker of an engine may
    raise.

    >>> llm = LLM("DIR", worker_extension_cls="wsync.vllm.WorkerExtension")
    >>> with wsync.connect(weights, engines=[llm]) as sync:
    ...     report = sync.update(version=7)
    >>> wsync.handle(llm).model_info(10)["weight_version"]
    '7'

    A server needs VLLM_SERVER_DEV_MODE=1 in its environment.  The URL of this server, for wsync, is
    "vllm+http://127.0.0.1:8000":

        vllm serve DIR --port 8000 --worker-extension-cls wsync.vllm.WorkerExtension
    """

    # attributes of vLLM's Worker
    model_runner: Any
    model_config: Any
    parallel_config: Any
    vllm_config: Any
    device: Any
    rank: int

    def wsync_describe(self, only: int | None = None) -> str:
        """Describes this worker as JSON: its rank, the number of workers of its engine, the number
        of this engine, whether this engine's API reaches no other engine, why this engine cannot be
        updated, the version of its weights (null if they are not those of one update), which caches
        keep results of the weights, and whether layers of the model draft tokens.

        If `only` is given, raises UnsupportedError in every engine with another number."""
        parallel = self.parallel_config
        engine = engine_of(parallel)
        if only not in (None, engine) and self.rank == parallel.world_size - 1:
            raise UnsupportedError(f"engine {engine} shares its API with engine {only}")
        model = self.model_runner.get_model()
        receiver: Receiver | None = vars(model).get(_RECEIVER)
        whole = receiver is not None and not receiver.trouble
        version = receiver.state.weight_version if receiver and whole else None
        cache = getattr(self.vllm_config, "cache_config", None)
        drafts = getattr(getattr(self.vllm_config, "speculative_config", None), "method", None)
        return json.dumps(
            {
                "rank": self.rank,
                "workers": parallel.world_size,
                "engine": engine,
                "engines": parallel.data_parallel_size,  # 1 for a model without experts
                "alone": getattr(parallel, "data_parallel_external_lb", False),
                "obstacle": obstacle(parallel),
                "weight_version": version,
                "prefix_cache": bool(getattr(cache, "enable_prefix_caching", False)),
                "kv_connector": bool(getattr(self.vllm_config, "kv_transfer_config", None)),
                "drafts": drafts == "mtp",
                "multimodal": bool(getattr(self.model_config, "is_multimodal_model", False)),
                "instance": f"{os.getpid()}.{id(model)}",
            }
        )

    def wsync_update(
        self, messages: list[str], version: str | None = None, first: int = 0
    ) -> list[Any]:
        """Takes part in an update as this worker's control message says; returns [success, text].

        messages: one for each worker of all engines that the call reaches.  version: the new weight
        version, for a closing message.  first: the number of the first of these engines.

        Raises RemoteError in an engine that has none of the messages, because vLLM passes on only
        the first engine's answers."""
        parallel = self.parallel_config
        engine = engine_of(parallel)
        number = (engine - first) * parallel.world_size + self.rank
        good, text = False, f"worker {self.rank} of engine {engine} got none of the messages"
        if 0 <= number < len(messages):
            try:
                receiver = self._wsync_receiver(number)
                good, text = receiver.handle(messages[number].encode(), version=version)
            except Exception as error:
                good, text = refused(number, error)
        if not good and engine != first and self.rank == parallel.world_size - 1:
            raise RemoteError(text)
        return [good, text]

    def _wsync_receiver(self, number: int = 0) -> Receiver:
        model = self.model_runner.get_model()
        if _RECEIVER not in vars(model):
            loader = VllmLoader(model, self.vllm_config, self.model_config, self.device)
            vars(model)[_RECEIVER] = Receiver(loader, worker=number)
        receiver: Receiver = vars(model)[_RECEIVER]
        return receiver


def engine_of(parallel: Any) -> int:
    """Returns an engine's number among data-parallel ones.  Newer versions of vLLM set a dense
    model's data_parallel_size and data_parallel_rank back to those of a single engine."""
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def obstacle(parallel: Any) -> str:
    """Returns why an engine with this parallel_config cannot be updated; "" if it can."""
    if getattr(parallel, "enable_eplb", False):
        return (
            "it balances experts, but its load_weights puts experts at the places that they had "
            "at the start: start vLLM without enable_eplb"
        )
    if getattr(parallel, "data_parallel_hybrid_lb", False):
        return (
            "with data_parallel_hybrid_lb, vLLM does not tell how many engines one API reaches: "
            "start vLLM with one API for all engines, or with data_parallel_external_lb"
        )
    return ""


class VllmLoader(ChoosingLoader):
    """Learns from load_weights where tensors go, and runs vLLM's process_weights_after_loading
    after each update.

    If process_weights_after_loading packs, quantises or shuffles loaded weights, all tensors go
    through vLLM's own layerwise reload.  Then `reason` says why.  In both cases, a model's own hook
    runs once an update.  What the hook makes only once, it does not make again.

    A parameter that the trainer does not deliver is refused by name, unless the environment
    variable WSYNC_KEEP of vLLM's workers names it.  For example, "visual.*" suits a trainer of a
    language model without its vision tower.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: Any
    ) -> None:
        self.reason = ""
        self.model = model
        self.config = vllm_config
        self.model_config = model_config
        self._device = torch.device("cpu" if device is None else device)
        self.recorded = _Recorded(model, after=self._process)
        self._chosen = self.recorded
        self._tried: tuple[LearntModule | None, str] = (None, "")

    def blob(self) -> bytes:
        return self.recorded.blob()  # even if the current session has chosen the reload

    def learn(self, model: Layout, on_weights_lost: OnWeightsLost) -> bytes:
        self._chosen = self.recorded
        chosen = self.model_config
        check_room(facts_of(model), folder_of(chosen.model, chosen.revision))
        self.reason = rewritten(self.model)
        packed = packed_when_made(self.model)
        for path, method in packed:
            kernel = type(method.moe_kernel.fused_experts).__name__
            self.reason = f"{path}: {kernel} packs its weights only once, when it is made"
            if self._device.type != "cpu":  # on other devices packing again was never tried
                raise UnsupportedError(f"{self.reason}; vLLM cannot load it a second time")
        learnt = self.recorded.learnt
        if not self.reason and learnt is not None and learnt is self._tried[0]:
            self.reason = self._tried[1]
        elif not self.reason:
            on_weights_lost()
            self.reason = self._process_kept()  # after it, all tensors that processing makes exist
        if not self.reason:
            blob = self.recorded.learn(model, on_weights_lost)
            learnt = self.recorded.learnt
            if learnt is not None and learnt is not self._tried[0]:
                self._tried = (learnt, self._changes(learnt))
            self.reason = "" if learnt is None else self._tried[1]
            if not self.reason:
                return blob
        check_scales(model)  # the reload would process a layer with uninitialised scales
        reloader = _Reloader(self, [method for _, method in packed])
        self.recorded.check_delivered(reloader.rehearse(model))
        if half := sorted(filter(self.recorded.is_named, reloader.half_loaded)):
            raise UnsupportedError(
                f"{listed(half)}: cannot stay as it is (WSYNC_KEEP), because vLLM's layerwise "
                f"reload is needed ({self.reason}) and makes a layer anew if a part of it is loaded"
            )
        self._chosen = reloader
        return WHOLE

    @property
    def own_loading(self) -> str:
        if self._chosen is self.recorded:
            return self.recorded.own_loading
        return f"all tensors, by vLLM's layerwise reload: {self.reason}"

    def held(self) -> Held:
        if self._chosen is not self.recorded:
            raise StateError(f"load_weights gets {self.own_loading}")
        return super().held()

    def facts(self) -> dict[str, Any]:
        facts = self.recorded.facts()
        if self._chosen is self.recorded:
            return facts
        return {"module": facts["module"], "unlearnt": self.reason}

    def _process(self, _: object = None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        given = self.model, self.model_config, self._device
        with set_current_vllm_config(self.config):
            process_weights_after_loading(*given)

    def _process_kept(self) -> str:
        """Processes the weights, and restores the parameters that are to stay as they are.  Says
        which of these parameters has changed; "" if none has.  If one has changed, vLLM's reload is
        used, which does not process layers that nothing is loaded to."""
        kept = {
            path: (tensor.detach(), tensor.detach().to("cpu", copy=True))
            for path, tensor in self.model.named_parameters()
            if self.recorded.is_named(path)
        }
        run_in_place(self.model, self._process)
        changed = [path for path, (data, copy) in kept.items() if not same_bytes(data.cpu(), copy)]
        for path in changed:
            data, copy = kept[path]
            data.copy_(copy)
        return f"{changed[0]} is changed by process_weights_after_loading" if changed else ""

    def _changes(self, learnt: LearntModule) -> str:
        """Processes the weights.  Says which weight that load_weights wrote has changed; "" if none
        has."""
        places = learnt.does.written
        tensors = learnt.memory.tensors()
        before = [checksum_of(place.view(tensors)) for place in places]
        run_in_place(self.model, self._process)
        tensors = learnt.memory.tensors()
        for place, sum in zip(places, before, strict=True):
            if checksum_of(place.view(tensors)) != sum:
                path = learnt.memory.targets[place.target].path
                return f"{path} is changed by process_weights_after_loading"
        return ""


class _Recorded(RecordedLoader):
    """Does not require parameters that attention layers compute from other weights."""

    def is_named(self, path: str) -> bool:
        """Whether WSYNC_KEEP names a parameter, so that it stays as it is."""
        return super().stays(path)

    def stays(self, path: str) -> bool:
        return _made_by_attention(self._module, path) or super().stays(path)


def is_attention(layer: torch.nn.Module) -> bool:
    """Whether vLLM processes a layer after all others, because it uses their weights."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(layer))


def _made_by_attention(model: torch.nn.Module, path: str) -> bool:
    """Whether an attention layer makes a parameter whenever vLLM processes weights: DeepSeek's W_UV
    and W_UK_T, from kv_b_proj."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    prefix, _, name = path.rpartition(".")
    layer = model.get_submodule(prefix)
    made, _ = get_layerwise_info(layer).restore_metadata
    return is_attention(layer) and name not in made


def packed_when_made(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Finds expert layers whose weights vLLM packs only at the first processing.  Returns each
    layer's path and quantisation method.

    vLLM's unquantised mixture-of-experts method asks its kernel to pack weights when it makes the
    kernel, but not when it gets weights again (0.32.0 and 0.33.0, vLLM on CPUs).  After vLLM's own
    reload the kernel would take plain weights for packed ones.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is None or not hasattr(method, "unquantized_backend"):
            continue
        makers = [c for c in type(experts).__mro__ if "process_weights_after_loading" in vars(c)]
        if len(makers) > 1:  # one is the base class, whose method does nothing
            found[id(method)] = (path, method)
    return list(found.values())


@contextlib.contextmanager
def packing_again(methods: Sequence[Any]) -> Iterator[None]:
    """Within the block, these methods pack the weights of experts whenever they process them."""
    for method in methods:
        pack = method.moe_kernel.fused_experts.process_weights_after_loading
        steps = method.process_weights_after_loading, pack
        method.process_weights_after_loading = lambda layer, steps=steps: [s(layer) for s in steps]
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading


def refill_unpacked(model: torch.nn.Module) -> None:
    """Copies loaded convolutions to `conv_weights`, which Mamba 2's layers read: a view of the
    first conv1d.weight.  If vLLM packs that weight on a CPU, the weight gets other memory, and
    vLLM's own reload (0.33.0) does not update the view."""
    for layer in model.modules():
        kept = layer._buffers.get("conv_weights")
        loaded = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if kept is not None and loaded is not None:
            kept.copy_(loaded)


def rewritten(model: torch.nn.Module) -> str:
    """Says which parameter or persistent buffer no longer has the form that load_weights fills, or
    which layer processes its weights only the first time.  Returns "" if there is neither.  Other
    buffers may change, because forward casts tables of positions."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for prefix, layer in model.named_modules():
        done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if done and layer._parameters:  # layers that contain such a layer have the flag, too
            method = type(getattr(layer, "quant_method", layer)).__name__
            return f"{prefix}: {method} processes its weights only once"
        if is_attention(layer):  # processing removes its scales
            continue
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        for name, made in {**parameters, **buffers}.items():
            if name in layer._non_persistent_buffers_set:
                continue
            now = getattr(layer, name, None)
            if now is None or now.dtype != made.dtype or now.shape != made.shape:
                is_now = "gone" if now is None else f"{now.dtype} {tuple(now.shape)}"
                return (
                    f"{prefix}.{name} was made as {made.dtype} {tuple(made.shape)} and is now "
                    f"{is_now}"
                )
    return ""


def _processes(layer: torch.nn.Module) -> bool:
    """Whether a layer's method processes its weights after loading."""
    return hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading")


class _Reloader(CallingLoader):
    """Passes whole tensors to vLLM's own reload.  The reload makes layers anew, loads and processes
    them, and copies the results to the memory of the old layers.

    packing: methods that pack weights only when they process them for the first time.
    half_loaded: parameters that lack bytes, in layers that got others.
    """

    def __init__(self, owner: VllmLoader, packing: Sequence[Any]) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._owner = owner
        self._layerwise = layerwise
        self._packing = packing
        layers: dict[int, list[Any]] = {}  # by the parameters that they have
        for layer in owner.model.modules():
            for parameter in layer.parameters(recurse=False):
                layers.setdefault(id(parameter), []).append(layer)
        # as a tied head: vLLM's kernels for CPUs keep values that they computed from its weights
        tied = itertools.chain(*(those for those in layers.values() if len(those) > 1))
        self._tied = list(filter(_processes, tied))
        self.half_loaded: set[str] = set()
        super().__init__(owner.model, self._load)

    def _load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        with self._configured():
            self._module.load_weights(pairs)  # type: ignore[operator]

    def rehearse(self, model: Layout) -> dict[str, int]:
        """Returns the parameters that would lack bytes, and how many bytes.  Nothing is loaded,
        because no layer is ever complete.

        Raises NotTakenError, by name, if the layers do not take tensors of these dtypes and shapes,
        and UnsupportedError if the reload would not load a parameter.
        """
        size = self._layerwise.get_layer_size
        self._layerwise.get_layer_size = lambda _: sys.maxsize
        rehearsal = Rehearsal(model)
        try:
            with self._configured():
                self._layerwise.initialize_layerwise_reload(self._module)
                ended = rehearsal.run(self._module, self._module.load_weights)  # type: ignore[arg-type]
                lacking = self._lacking(rehearsal)
        finally:
            self._layerwise.get_layer_size = size
            self._put_back()
        return lacking if ended else {}

    def _lacking(self, rehearsal: Rehearsal) -> dict[str, int]:
        """Returns the missing bytes of each incomplete parameter.  The reload processes a partly
        loaded layer with uninitialised memory for the rest.  If nothing is loaded to a layer, the
        layer stays as it is.  That is right for a tied head, whose tensors another layer loads.
        Attention layers are left out, because their scales may be missing."""
        complete, idle, lacking = set[int](), dict[str, int](), dict[str, int]()
        for prefix, layer in self._module.named_modules():
            if is_attention(layer):
                continue
            info = self._layerwise.get_layerwise_info(layer)
            kept = info.kernel_tensors[0] if info.kernel_tensors is not None else {}
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                path, written = f"{prefix}.{name}", rehearsal.written(parameter)
                anew = name in info.restore_metadata[0]  # made by a reload; biases are not
                if anew and written:
                    why, waits = "", info.kernel_tensors is not None
                    if name not in {known for known, _ in info.loaded_weights}:
                        why = f"{type(self._module).__name__} loads it without its weight_loader"
                    elif waits and name not in kept and not _processes(layer):
                        # as experts that a model's own hook fuses into tensors of a kernel
                        why = f"{type(layer).__name__} has dropped it since it was loaded"
                    if why:
                        raise UnsupportedError(
                            f"{path}: vLLM's layerwise reload is needed ({self._owner.reason}), "
                            f"but would not load it, because {why}"
                        )
                # fewer than its elements if vLLM has padded it
                wanted: int = getattr(parameter, "weight_loader_numel", parameter.numel())
                own, rest = id(kept.get(name, parameter)), wanted - written
                if rest <= 0:
                    complete.add(own)
                    continue
                lacking[path] = rest * parameter.element_size()
                if info.load_numel == 0:
                    idle[path] = own
                elif anew:
                    self.half_loaded.add(path)
        tied = {path for path, own in idle.items() if own in complete}
        return {path: nbytes for path, nbytes in lacking.items() if path not in tied}

    def begin(self, rounds: int) -> None:
        super().begin(rounds)
        with self._configured():
            self._layerwise.initialize_layerwise_reload(self._module)

    def finish(self, timeout: float) -> Receipt:
        """Ends the reload, and adds what vLLM's reload lacks: the model's own hook, which ends a
        first load, and processing of tied layers, to which nothing was loaded."""
        receipt = super().finish(timeout)
        with self._configured():
            infos = [(layer, self._layerwise.get_layerwise_info(layer)) for layer in self._tied]
            idle = [layer for layer, info in infos if info.can_load() and not info.load_numel]
            self._layerwise.finalize_layerwise_reload(self._module, self._owner.model_config)
            for layer in idle:
                layer.quant_method.process_weights_after_loading(layer)
            refill_unpacked(self._module)
            if (hook := getattr(self._module, "process_weights_after_loading", None)) is not None:
                run_in_place(self._module, hook)
        return receipt

    def abandon(self) -> None:
        """Gives incomplete layers their former tensors back.  They are not processed, because some
        values are missing and processing may fail again."""
        super().abandon()
        self._put_back()

    def _put_back(self) -> None:
        with self._configured():
            for layer in self._module.modules():
                info = self._layerwise.get_layerwise_info(layer)
                if info.kernel_tensors is not None:
                    self._layerwise._place_kernel_tensors(layer, info)
                info.reset()

    @contextlib.contextmanager
    def _configured(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with (
            set_current_vllm_config(self._owner.config),
            torch.no_grad(),
            packing_again(self._packing),
        ):
            yield
