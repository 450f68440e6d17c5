"""vLLM's side: `--worker-extension-cls wsync.vllm.WorkerExtension`.

vLLM mixes the class into its workers, which learn what they keep of a model from its own
load_weights.  `wsync.handle(llm)` calls them through collective_rpc.

For programs that are written for vLLM's own weight transfer (start_weight_update, update_weights,
finish_weight_update) wsync is a backend of that: `--weight-transfer-config
'{"backend": "wsync"}'`; see wsync.vllm.transfer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch

from wsync._core import Layout, LayoutError, UnsupportedError
from wsync.checkpoints.hub_cache import folder_of
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.learn.replay import LearntModule
from wsync.engine.post_load import run_in_place
from wsync.engine.receiver import Receiver, refused
from wsync.engine.ring_loaders import CallingLoader, ChoosingLoader, OnWeightsLost, Receipt
from wsync.messages.control import WHOLE
from wsync.module_tensors import checksum_of, same_bytes
from wsync.module_tensors.names import listed, without_scales
from wsync.quantise.config import facts_of
from wsync.trainer.checkpoint_check import check_room
from wsync.vllm.model_hook import run_hook_anew
from wsync.vllm.reload_rehearsal import Rehearsal

_RECEIVER: Final = "_wsync_receiver"  # where a model keeps it


def register() -> None:
    """Makes wsync a backend of vLLM's weight transfer.  vLLM calls this in each of its processes,
    as a plugin (entry point vllm.general_plugins); one that has no such registry is left alone."""
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
            factory.register_engine("wsync", "wsync.vllm.transfer", name)


class WorkerExtension:
    """Methods that vLLM's workers get.  None of them raises: an executor that meets an exception
    leaves the other workers' answers in its queues.

    >>> llm = LLM("DIR", worker_extension_cls="wsync.vllm.WorkerExtension")
    >>> with wsync.connect(weights, engines=[llm]) as sync:
    ...     report = sync.update(version=7)
    >>> wsync.handle(llm).model_info(10)["weight_version"]
    '7'

    Of a server, started with VLLM_SERVER_DEV_MODE=1 in its environment, wsync takes the URL
    "vllm+http://127.0.0.1:8000":

        vllm serve DIR --port 8000 --worker-extension-cls wsync.vllm.WorkerExtension
    """

    # of vLLM's Worker
    model_runner: Any
    model_config: Any
    parallel_config: Any
    vllm_config: Any
    device: Any
    rank: int

    def wsync_describe(self) -> str:
        """Which worker this is of how many, the version of its weights (none where they are not
        those of one update), what else keeps what they have computed, and whether layers of the
        model draft tokens, as JSON."""
        parallel = self.parallel_config
        alone = getattr(parallel, "data_parallel_external_lb", False)
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
                "engines": 1 if alone else parallel.data_parallel_size,
                "weight_version": version,
                "prefix_cache": bool(getattr(cache, "enable_prefix_caching", False)),
                "kv_connector": bool(getattr(self.vllm_config, "kv_transfer_config", None)),
                "drafts": drafts == "mtp",
                "multimodal": bool(getattr(self.model_config, "is_multimodal_model", False)),
                "instance": f"{os.getpid()}.{id(model)}",
            }
        )

    def wsync_update(self, messages: list[str], version: str | None = None) -> list[Any]:
        """Takes part in an update as the control message of this worker says, of one for each;
        [success, text].  version: what the weights are called if a closing message succeeds."""
        try:
            if not 0 <= self.rank < len(messages):
                return [False, f"worker {self.rank}: {len(messages)} control messages"]
            receiver = self._wsync_receiver()
            return list(receiver.handle(messages[self.rank].encode(), version=version))
        except Exception as error:
            return list(refused(self.rank, error))

    def _wsync_receiver(self) -> Receiver:
        model = self.model_runner.get_model()
        if _RECEIVER not in vars(model):
            loader = VllmLoader(model, self.vllm_config, self.model_config, self.device)
            vars(model)[_RECEIVER] = Receiver(loader, worker=self.rank)
        receiver: Receiver = vars(model)[_RECEIVER]
        return receiver


class VllmLoader(ChoosingLoader):
    """Learns from load_weights, and runs vLLM's process_weights_after_loading after each update.

    Where that changes what load_weights has written (packed, quantised or shuffled weights), all
    tensors go through vLLM's own layerwise reload instead; `reason` says why.

    Parameters that the trainer does not deliver are refused by name, unless the environment
    variable WSYNC_KEEP of vLLM's workers names them: "visual.*" for a trainer of a language model
    without its vision tower.
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
        return self.recorded.blob()  # whatever a session that lives has chosen

    def learn(self, model: Layout, on_weights_lost: OnWeightsLost) -> bytes:
        self._chosen = self.recorded
        if self.config.parallel_config.enable_eplb:
            raise UnsupportedError(
                "vLLM balances experts (enable_eplb): its load_weights puts them where they were "
                "when it started"
            )
        chosen = self.model_config
        check_room(facts_of(model), folder_of(chosen.model, chosen.revision))
        self.reason = rewritten(self.model) or processed_once(self.model)
        for path, method in packed_when_made(self.model):
            kernel = type(method.moe_kernel.fused_experts).__name__
            self.reason = f"{path}: {kernel} packs its weights once, when it is made"
            if self._device.type != "cpu":  # nobody has seen what it makes of them
                raise UnsupportedError(f"{self.reason}; vLLM cannot load it a second time")
        if not self.reason:
            on_weights_lost()
            self.reason = self._process_kept()  # from here on there is all that it makes
        if not self.reason:
            blob = self.recorded.learn(model, on_weights_lost)
            learnt = self.recorded.learnt
            if learnt is not None and learnt is not self._tried[0]:
                self._tried = (learnt, self._changes(learnt))
            self.reason = "" if learnt is None else self._tried[1]
            if not self.reason:
                return blob
        names = (model.tensor(index)[:2] for index in range(model.tensor_count))
        if missing := without_scales(names):
            # a layer that is made anew is processed with whatever memory it has for them
            raise LayoutError(f"{listed(missing)}: codes that the trainer delivers no scales for")
        reloader = _Reloader(self)
        self.recorded.check_delivered(reloader.rehearse(model))
        if half := sorted(filter(self.recorded.is_named, reloader.half_loaded)):
            raise UnsupportedError(
                f"{listed(half)}: to stay as it is, but vLLM's layerwise reload, which is needed "
                f"({self.reason}), makes all of its layer anew for what is loaded there"
            )
        self._chosen = reloader
        return WHOLE

    @property
    def own_loading(self) -> str:
        if self._chosen is self.recorded:
            return self.recorded.own_loading
        return f"all tensors, by vLLM's layerwise reload: {self.reason}"

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
            run_in_place(self.model, lambda: process_weights_after_loading(*given))
            run_hook_anew(self.model)

    def _process_kept(self) -> str:
        """Which parameter that is to stay as it is processing changes once more, or "": a reload
        processes no layer that nothing is loaded to."""
        kept = {
            path: (tensor.detach(), tensor.detach().to("cpu", copy=True))
            for path, tensor in self.model.named_parameters()
            if self.recorded.stays(path)
        }
        self._process()
        changed = [path for path, (data, copy) in kept.items() if not same_bytes(data.cpu(), copy)]
        for path in changed:
            data, copy = kept[path]
            data.copy_(copy)
        return f"{changed[0]} is changed by process_weights_after_loading" if changed else ""

    def _changes(self, learnt: LearntModule) -> str:
        """What processing changes of that which load_weights has written just now, or ""."""
        places = learnt.does.written
        tensors = learnt.memory.tensors() or []
        before = [checksum_of(place.view(tensors)) for place in places]
        self._process()
        tensors = learnt.memory.tensors() or []
        for place, sum in zip(places, before, strict=True):
            if checksum_of(place.view(tensors)) != sum:
                path = learnt.memory.targets[place.target].path
                return f"{path} is changed by process_weights_after_loading"
        return ""


class _Recorded(RecordedLoader):
    """Does not ask for what attention makes of other weights each time that it is processed."""

    def is_named(self, path: str) -> bool:
        """Whether a parameter is to stay as it is because somebody has said so."""
        return super().stays(path)

    def stays(self, path: str) -> bool:
        return _made_by_attention(self._module, path) or super().stays(path)


def is_attention(layer: torch.nn.Module) -> bool:
    """Whether vLLM processes a layer after all others, because it is made of what these have."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(layer))


def _made_by_attention(model: torch.nn.Module, path: str) -> bool:
    """Whether a layer of attention has made a parameter when it was processed: DeepSeek's W_UV and
    W_UK_T, of kv_b_proj.  It makes them anew whenever vLLM processes weights."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    prefix, _, name = path.rpartition(".")
    layer = model.get_submodule(prefix)
    made, _ = get_layerwise_info(layer).restore_metadata
    return is_attention(layer) and name not in made


def processed_once(model: torch.nn.Module) -> str:
    """Which layer's weights are processed the first time alone, or "": vLLM's own reload knows how
    to have that done again."""
    for path, layer in model.named_modules():
        done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if done and layer._parameters:  # what only holds such a layer says it, too
            method = type(getattr(layer, "quant_method", layer)).__name__
            return f"{path}: {method} processes its weights once"
    return ""


def packed_when_made(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Layers of experts whose weights are packed the first time alone that they are processed, by
    path, and their methods.

    vLLM's unquantised mixture-of-experts method asks its kernel to pack them when it makes the
    kernel, and not when it is given weights again (0.32.0 and 0.33.0, vLLM on CPUs): after vLLM's
    own reload the kernel takes plain weights for packed ones.
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
def packing_again(model: torch.nn.Module) -> Iterator[None]:
    """Within it weights of such experts are packed whenever they are processed."""
    methods = [method for _, method in packed_when_made(model)]
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
    """Gives Mamba 2's layers their convolutions as they are loaded: these read `conv_weights`, a
    view of conv1d.weight as it was made.  Where vLLM packs that on CPUs it gets other memory, and
    vLLM's own reload (0.33.0) leaves the view as it is."""
    for layer in model.modules():
        kept = layer._buffers.get("conv_weights")
        loaded = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if kept is not None and loaded is not None:
            kept.copy_(loaded)


def rewritten(model: torch.nn.Module) -> str:
    """Which parameter or persistent buffer is not what load_weights fills any more, or "".  Others
    are forward's own: it casts tables of positions."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for prefix, layer in model.named_modules():
        if is_attention(layer):  # scales are taken from it
            continue
        parameters, buffers = get_layerwise_info(layer).restore_metadata
        for name, made in {**parameters, **buffers}.items():
            if name in layer._non_persistent_buffers_set:
                continue
            now = getattr(layer, name, None)
            if now is None or now.dtype != made.dtype or now.shape != made.shape:
                is_now = "gone" if now is None else f"{now.dtype} {tuple(now.shape)}"
                return (
                    f"{prefix}.{name} was made as {made.dtype} {tuple(made.shape)} and is {is_now}"
                )
    return ""


class _Reloader(CallingLoader):
    """Whole tensors through vLLM's own reload: layers are made anew, loaded and processed, and
    copied to where they were.

    half_loaded: parameters that lack bytes, of layers that have others.
    """

    def __init__(self, owner: VllmLoader) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._owner = owner
        self._layerwise = layerwise
        self.half_loaded: set[str] = set()
        super().__init__(owner.model, self._load)

    def _load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        with self._configured():
            self._module.load_weights(pairs)  # type: ignore[operator]

    def rehearse(self, model: Layout) -> dict[str, int]:
        """Parameters that lack bytes, and how many.  Nothing is loaded: no layer is ever complete.

        Raises NotTakenError, by name, where the layers do not take tensors of these dtypes and
        shapes, and UnsupportedError where the reload would not load a parameter.
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
        """The bytes of parameters that nothing was loaded to.  A layer that is loaded in part is
        processed with whatever memory it has for the rest; one that nothing is loaded to stays as
        it is, which is right where others loaded its tensors: a tied head.  Layers of attention
        are left out, whose scales may be missing."""
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
                anew = name in info.restore_metadata[0]  # by a reload: not so biases
                if anew and written and name not in {known for known, _ in info.loaded_weights}:
                    raise UnsupportedError(
                        f"{path}: {type(self._module).__name__} loads it without its "
                        "weight_loader, and vLLM's layerwise reload, which is needed "
                        f"({self._owner.reason}), leaves it as it is"
                    )
                own, rest = id(kept.get(name, parameter)), parameter.numel() - written
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
        """vLLM's own reload ends without the model's hook, which its first load ends with, and
        processes no layer that nothing is loaded to."""
        receipt = super().finish(timeout)
        with self._configured():
            tied = self._tied()
            self._layerwise.finalize_layerwise_reload(self._module, self._owner.model_config)
            for layer in tied:
                layer.quant_method.process_weights_after_loading(layer)
            refill_unpacked(self._module)
            run_hook_anew(self._module)
        return receipt

    def abandon(self) -> None:
        """Gives the layers that wait for more the tensors back that they had: to process what has
        come of them may fail again, and has no values for the rest."""
        super().abandon()
        self._put_back()

    def _put_back(self) -> None:
        with self._configured():
            for layer in self._module.modules():
                info = self._layerwise.get_layerwise_info(layer)
                if info.kernel_tensors is not None:
                    self._layerwise._place_kernel_tensors(layer, info)
                info.reset()

    def _tied(self) -> list[Any]:
        """Layers that nothing was loaded to, and whose parameters others have, to which it was: a
        tied head, of which vLLM's kernels for CPUs keep what they have made."""
        idle, loaded = list[tuple[Any, set[int]]](), set[int]()
        for layer in self._module.modules():
            info = self._layerwise.get_layerwise_info(layer)
            waits = info.kernel_tensors is not None
            own = info.kernel_tensors[0] if waits else layer._parameters
            places = {id(parameter) for parameter in own.values()}
            if not waits or info.load_numel > 0:
                loaded |= places
            elif hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
                idle.append((layer, places))
        return [layer for layer, places in idle if not places.isdisjoint(loaded)]

    @contextlib.contextmanager
    def _configured(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with (
            set_current_vllm_config(self._owner.config),
            torch.no_grad(),
            packing_again(self._module),
        ):
            yield
