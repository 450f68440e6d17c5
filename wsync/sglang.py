"""SGLang's side: `--custom-weight-loader wsync.sglang.load_weights`.

SGLang imports the function in every worker process.  It calls the function with that process's
model and the tensors of each update request whose load_format is the function's name.
"""

import fnmatch
import importlib
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from wsync._core import Layout, StateError, UnsupportedError
from wsync.engine.comparison import Comparison
from wsync.engine.drafts import with_drafts
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.receiver import Receiver, refuse
from wsync.engine.ring_loaders import Held, OnWeightsLost, ignore_loss
from wsync.machine.daemon_threads import WorkerThread, result
from wsync.machine.deadline import Deadline
from wsync.messages import payload
from wsync.messages.control import Control

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_CACHE_SCALES: Final = ("*.attn*.[kv]_scale",)
# copies of MXFP8's scales, in the order that a kernel needs
_DERIVED: Final = ("_scale_inv_swizzled", "_scale_inv_deepgemm", "_scale_inv_shuffled")
_UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater"
_UE8M0: Final = (torch.uint8, torch.int32)  # scales of MXFP8; of DeepGEMM, four in a word
_RECEIVER: Final = "_wsync_receiver"  # attributes of a model
_LOADER: Final = "_wsync_loader"
_THREAD: Final = "_wsync_thread"  # attribute of a pipeline stage's model
# SGLang's names of models that only draft tokens
_DRAFT: Final = re.compile(r"(NextN|MTP|Eagle\d*)$")
_drafts: Final[list[Any]] = []  # these models of this process, in SGLang's order


def load_weights(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Takes part in an update.  It learns from the model's own load_weights where tensors go, and
    calls it for tensors that cannot simply be copied.

    Never raises, because SGLang ends the server when a loader raises.  Errors are logged and sent
    to the trainer through the session; SGLang ignores a loader's result.

    A parameter that the trainer does not deliver is refused by name, unless the environment
    variable WSYNC_KEEP of SGLang's processes names it.  For example, "visual.*" suits a trainer of
    a language model without its vision tower.

        python -m sglang.launch_server --model-path DIR --port 30000 \\
            --custom-weight-loader wsync.sglang.load_weights

    >>> with wsync.connect(weights, engines=["http://127.0.0.1:30000"]) as sync:
    ...     report = sync.update(version=7)
    >>> wsync.handle("http://127.0.0.1:30000").model_info(10)["weight_version"]
    '7'
    """
    control = None
    try:
        place = WorkerPlace.find()
        with _lock:
            if _DRAFT.search(type(model).__name__):
                # SGLang also calls this for drafts; the main model's session is theirs, too
                if model not in _drafts:
                    _drafts.append(model)
                return
            if not named_tensors:
                return  # a request of `show_drafts`
            own = named_tensors[place.stage : place.stage + 1]
            control = payload.control_bytes(own)
            if len(named_tensors) != place.stages:
                raise UnsupportedError(
                    f"pp_size {place.stages}: the trainer has sent {len(named_tensors)} messages, "
                    "because its handle of this engine does not report pp_size in server_info"
                )
            message = None if control is None else Control.from_bytes(control)
            receiver = vars(model).get(_RECEIVER)
            if receiver is None:
                vars(model)[_LOADER] = SglangLoader(model)
                receiver = Receiver(vars(model)[_LOADER], worker=place.worker)
                vars(model)[_RECEIVER] = receiver
            if message is not None and message.op == "open":
                vars(model)[_LOADER].include(model, _drafts_for(message))
        if place.stages == 1 or message is None:
            _answer(receiver, own)
        else:
            _answer_in_thread(model, receiver, own, message)
    except Exception as error:
        _log.exception("an update failed before this worker could connect to the trainer")
        refuse(control, error)


def _drafts_for(message: Control) -> Mapping[str, Any]:
    """The drafts that an update delivers, by the names that SGLang's checksums have."""
    if not message.drafts:
        return {}
    if message.drafts != len(_drafts):
        raise UnsupportedError(
            f"drafts with layers of the model: {message.drafts} by the engine's arguments, but "
            f"SGLang gives weights to {len(_drafts)}"
        )
    names = [f"draft_step_{step}" for step in range(message.drafts)]
    return dict(zip(names if message.drafts > 1 else ["draft"], _drafts, strict=True))


def _answer(receiver: Receiver, own: list[tuple[str, Any]]) -> None:
    success, text = receiver.answer(own)
    _forget_images()
    if not success:
        _log.error("%s", text)


def _answer_in_thread(
    model: Any, receiver: Receiver, own: list[tuple[str, Any]], message: Control
) -> None:
    """Answers in a pipeline stage, which passes a request on when this returns.  All stages take
    part in an update or a copy together, so this returns at once from a message that begins one."""
    with _lock:
        thread = vars(model).get(_THREAD)
        if thread is None:
            thread = vars(model)[_THREAD] = WorkerThread("wsync-stage")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def answer() -> None:
        modes = torch.inference_mode(inference), torch.set_grad_enabled(grad)
        with torch.cuda.device(gpu), modes[0], modes[1]:
            _answer(receiver, own)

    answered = thread.submit(answer)
    if message.op not in ("open", "send"):
        late = f"update {message.update} of this connection has not ended"
        result(answered, Deadline(message.deadline), bool, late)


class WorkerPlace(NamedTuple):
    """A worker's place in its engine."""

    stage: int = 0
    stages: int = 1
    worker: int = 0

    @staticmethod
    def find() -> "WorkerPlace":
        module = sys.modules.get("sglang.srt.distributed.parallel_state")
        (stage, stages), (rank, ranks) = (
            (getattr(group, "rank_in_group", 0), getattr(group, "world_size", 1))
            for group in (getattr(module, "_PP", None), getattr(module, "_TP", None))
        )
        return WorkerPlace(stage, stages, stage * ranks + rank)


def _forget_images() -> None:
    """Drops SGLang's cache of image embeddings, which the vision tower's old weights made.
    /flush_cache does not drop it (SGLang 0.5.17 to 0.5.23)."""
    for name in ("mm_utils", "mm_schedule"):
        module = sys.modules.get(f"sglang.srt.managers.{name}")
        cache = getattr(module, "embedding_cache", None)
        if cache is not None:
            cache.clear()


class SglangLoader(RecordedLoader):
    """Learns from load_weights where tensors go; refuses weights that SGLang rewrites after it has
    loaded them.

    Scales of the KV cache stay as they are if the trainer delivers none, and so does a draft if the
    trainer has none of its layers.
    """

    _drafts: Mapping[str, torch.nn.Module] = MappingProxyType({})

    def include(self, model: torch.nn.Module, drafts: Mapping[str, torch.nn.Module]) -> None:
        """Makes further updates load a model together with these drafts, by name."""
        if {**drafts} != {**self._drafts}:
            self._drafts = drafts
            self._module = with_drafts(model, drafts) if drafts else model
            self._model = []  # learns it anew

    def learn(self, model: Layout, on_weights_lost: OnWeightsLost = ignore_loss) -> bytes:
        reason = rewritten(self._module)
        if reason:
            raise UnsupportedError(f"{reason}; SGLang cannot load it a second time")
        packed = packed_scales(self._module)
        if packed and not _delivers_packed(model):
            raise UnsupportedError(
                f"{packed[0]}: its scales are packed as UE8M0, but the trainer's are not; "
                'set "transform_ue8m0": True in the trainer\'s quantization_config'
            )
        if cut := _cut_word(self._module, packed):
            raise UnsupportedError(cut)
        return super().learn(model, on_weights_lost)

    def comparison(self, timeout: float) -> Comparison:
        """Only in a weight-update session are weights in the form that load_weights fills.  Without
        one, rewritten weights are not compared, nor are places where experts were."""
        if reason := rewritten(self._module) or self.stale():
            raise StateError(reason)
        return super().comparison(timeout)

    def held(self) -> Held:
        if reason := rewritten(self._module):  # as in `comparison`
            raise StateError(reason)
        return super().held()

    def check_delivered(self, lacking: Mapping[str, int], unused: Sequence[str] = ()) -> None:
        for name in self._drafts:
            begin = f"{name}."
            own = {p: t.nbytes for p, t in self._module.named_parameters() if p.startswith(begin)}
            if own.items() <= lacking.items():
                _log.warning("%s stays as it is: the trainer has none of its layers", name)
                lacking = {path: nbytes for path, nbytes in lacking.items() if path not in own}
        super().check_delivered(lacking, unused)

    def stays(self, path: str) -> bool:
        cache = any(fnmatch.fnmatchcase(path, pattern) for pattern in _CACHE_SCALES)
        stays = cache or made_anew(path) or super().stays(path)
        if stays and undone(self._module, path):
            _log.error("%s cannot stay as it is: SGLang packs it again after each load", path)
            return False
        return stays

    def depends_on(self) -> object:
        """Returns which expert is at which place, because load balancing moves experts."""
        module = sys.modules.get("sglang.srt.eplb.expert_location")
        metadata = None if module is None else module.get_global_expert_location_metadata()
        if metadata is None:
            return None
        return metadata.physical_to_logical_map.cpu().numpy().tobytes()


def undone(model: Any, path: str) -> bool:
    """Whether a parameter gets its first shape back, but no values, when a weight-update session
    begins: INT4 experts, which a kernel keeps in another order (SGLang 0.5.23, and slime's)."""
    prefix, _, name = path.rpartition(".")
    return name in getattr(model.get_submodule(prefix), "_original_shapes", ())


def made_anew(path: str) -> bool:
    """Whether SGLang computes a parameter from another one when a weight-update session ends
    (0.5.21 and newer, which take tensors only in sessions)."""
    if not path.endswith(_DERIVED):
        return False
    try:
        updater = importlib.import_module(_UPDATER).WeightUpdater
    except (ImportError, AttributeError):
        return False
    return hasattr(updater, "end_weight_update")


def rewritten(model: Any) -> str:
    """Says which weights no longer have the form that load_weights fills, and why; or "".

    Inside a weight-update session, SGLang 0.5.23 has already undone what it can undo.
    """
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None:
            continue
        if getattr(layer, "use_intel_amx_backend", False):
            return f"{path}: its weights are packed for AMX"
        if getattr(layer, "is_marlin_converted", False):  # a session undoes it
            return f"{path}: its weights are packed for Marlin"
        if getattr(method, "w13_swiglu_interleaved", False):
            return (
                f"{path}: its gate and up rows are interleaved (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"
            )
        for name, tensor in layer.named_parameters(recurse=False):
            # MXFP8's scales have this format from the beginning
            if getattr(tensor, "format_ue8m0", False) and tensor.dtype not in _UE8M0:
                return f"{path}.{name}: its scales are packed as UE8M0"
            if not tensor.numel() or made_anew(f"{path}.{name}"):
                continue
            if "weight" in name and not hasattr(tensor, "weight_loader"):
                return f"{path}.{name}: {type(method).__name__} has replaced it after loading"
        if getattr(method, "use_flashinfer_trtllm_moe", False) and not _restored(layer, method):
            return (
                f"{path}: its weights are stored in blocks for flashinfer_trtllm (start SGLang "
                "with another --moe-runner-backend, for example triton)"
            )
    return ""


def packed_scales(model: Any) -> list[str]:
    """Finds the parameters whose scales SGLang has packed for DeepGEMM, as it does after loading
    FP8 blocks on Blackwell.  From then on, its loaders take packed scales."""
    return [
        path
        for path, tensor in model.named_parameters()
        if getattr(tensor, "format_ue8m0", False) and tensor.dtype == torch.int32
    ]


def _cut_word(model: Any, packed: Sequence[str]) -> str:
    """Says which of these parameters has columns that begin inside a word of the trainer's scales;
    "" for none.  The loader takes whole words, so it would load scales of other columns."""
    for path in packed:
        name, _, last = path.rpartition(".")
        layer = model.get_submodule(name)
        columns = getattr(layer, last.removesuffix("_scale_inv")).shape[-1]
        parts = getattr(layer, "moe_tp_size", 1) if last.startswith("w2") else 1
        if hasattr(layer, "input_size_per_partition"):
            parts = layer.input_size // layer.input_size_per_partition
        if parts > 1 and columns % 512:
            return (
                f"{path}: each tensor-parallel rank has {columns} columns, but a word of packed "
                "scales covers 512"
            )
    return ""


def _delivers_packed(model: Layout) -> bool:
    """Whether a trainer delivers packed scales."""
    facts = (model.tensor(index) for index in range(model.tensor_count))
    return any(dtype == "int32" and name.endswith("_scale_inv") for name, dtype, _, _ in facts)


def _restored(layer: Any, method: Any) -> bool:
    """Whether weights in blocks have been made plain matrices again."""
    return hasattr(method, "restore_weights_before_loading") and layer.w13_weight.dim() == 3
