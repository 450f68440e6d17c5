"""SGLang's side: `--custom-weight-loader wsync.sglang.load_weights`.

SGLang imports the function in every worker process and calls it with the model of that process
and the tensors of each update request whose load_format is this function's name.
"""

import fnmatch
import importlib
import logging
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from wsync._core import Layout, UnsupportedError
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.receiver import Receiver, refuse
from wsync.engine.ring_loaders import OnWeightsLost, ignore_loss
from wsync.messages import payload

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_CACHE_SCALES: Final = ("*.attn*.[kv]_scale",)
# copies of MXFP8's scales in the order of a kernel
_DERIVED: Final = ("_scale_inv_swizzled", "_scale_inv_deepgemm", "_scale_inv_shuffled")
_UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater"
_UE8M0: Final = (torch.uint8, torch.int32)  # MXFP8's, and DeepGEMM's four in a word
_RECEIVER: Final = "_wsync_receiver"  # where a model keeps it
# what models that only draft tokens are called there
_DRAFT: Final = re.compile(r"(NextN|MTP|Eagle\d*)$")


def load_weights(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Takes part in an update.  The model's own load_weights is learnt from, and is used itself
    where it cannot be replaced.

    Never raises: SGLang ends the server when a loader does.  What fails is told to the trainer
    through the session, and is logged; SGLang itself ignores what a loader returns.

    Parameters that the trainer does not deliver are refused by name, unless the environment
    variable WSYNC_KEEP of SGLang's processes names them: "visual.*" for a trainer of a language
    model without its vision tower.

        python -m sglang.launch_server --model-path DIR --port 30000 \\
            --custom-weight-loader wsync.sglang.load_weights

    >>> with wsync.connect(weights, engines=["http://127.0.0.1:30000"]) as sync:
    ...     report = sync.update(version=7)
    >>> wsync.handle("http://127.0.0.1:30000").model_info(10)["weight_version"]
    '7'
    """
    control, receiver = None, None
    try:
        if _DRAFT.search(type(model).__name__):
            # SGLang calls for the draft and for the model; the session is the model's
            _log.warning("%s is not updated: it drafts", type(model).__name__)
            return
        with _lock:
            control = payload.control_bytes(named_tensors)
            receiver = vars(model).get(_RECEIVER)
            if receiver is None:
                receiver = vars(model)[_RECEIVER] = Receiver(SglangLoader(model))
        success, text = receiver.answer(named_tensors)
        _forget_images()
        if not success:
            _log.error("%s", text)
    except Exception as error:
        _log.exception("an update failed before its session was there")
        refuse(control, error)


def _forget_images() -> None:
    """Drops what a vision tower has made of images, which SGLang's /flush_cache leaves: it is kept
    by the images' hashes (SGLang 0.5.17 to 0.5.23)."""
    for name in ("mm_utils", "mm_schedule"):
        module = sys.modules.get(f"sglang.srt.managers.{name}")
        cache = getattr(module, "embedding_cache", None)
        if cache is not None:
            cache.clear()


class SglangLoader(RecordedLoader):
    """Learns from load_weights; refuses weights that SGLang rewrites after it has loaded them.

    Scales of the cache of keys and values stay as they are where the trainer delivers none.
    """

    def learn(self, model: Layout, on_weights_lost: OnWeightsLost = ignore_loss) -> bytes:
        if (stages := _pipeline_stages()) > 1:
            raise UnsupportedError(
                f"pp_size {stages}: SGLang gives every pipeline stage the messages of its "
                "tensor-parallel rank, and one stage alone can follow them"
            )
        reason = rewritten(self._module)
        if reason:
            raise UnsupportedError(f"{reason}; SGLang cannot load it a second time")
        packed = packed_scales(self._module)
        if packed and not _delivers_packed(model):
            raise UnsupportedError(
                f"{packed[0]}: its scales are packed as UE8M0, and the trainer's are not: "
                '"transform_ue8m0": True in its quantization_config packs them'
            )
        if cut := _cut_word(self._module, packed):
            raise UnsupportedError(cut)
        return super().learn(model, on_weights_lost)

    def stays(self, path: str) -> bool:
        cache = any(fnmatch.fnmatchcase(path, pattern) for pattern in _CACHE_SCALES)
        stays = cache or made_anew(path) or super().stays(path)
        if stays and undone(self._module, path):
            _log.error("%s cannot stay as it is: SGLang packs it again from what is loaded", path)
            return False
        return stays

    def depends_on(self) -> object:
        """Which expert lies in which place: load balancing deals them out anew."""
        module = sys.modules.get("sglang.srt.eplb.expert_location")
        metadata = None if module is None else module.get_global_expert_location_metadata()
        if metadata is None:
            return None
        return metadata.physical_to_logical_map.cpu().numpy().tobytes()


def _pipeline_stages() -> int:
    """How many this SGLang has; whoever made the trainer's handle may not have asked."""
    module = sys.modules.get("sglang.srt.distributed.parallel_state")
    return int(getattr(getattr(module, "_PP", None), "world_size", 1))


def undone(model: Any, path: str) -> bool:
    """Whether a parameter gets its first shape back when a weight-update session begins, but no
    values: experts in INT4, which a kernel has in another order (SGLang 0.5.23, and slime's)."""
    prefix, _, name = path.rpartition(".")
    return name in getattr(model.get_submodule(prefix), "_original_shapes", ())


def made_anew(path: str) -> bool:
    """Whether a parameter is made of another one when a weight-update session ends (SGLang 0.5.21
    and newer, which take tensors in sessions only)."""
    if not path.endswith(_DERIVED):
        return False
    try:
        updater = importlib.import_module(_UPDATER).WeightUpdater
    except (ImportError, AttributeError):
        return False
    return hasattr(updater, "end_weight_update")


def rewritten(model: Any) -> str:
    """Which weights are not what load_weights fills any more, and why; or "".

    Inside a weight-update session SGLang 0.5.23 has undone what it can undo.
    """
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is None:
            continue
        if getattr(layer, "use_intel_amx_backend", False):
            return f"{path}: its weights are packed for AMX"
        if getattr(layer, "is_marlin_converted", False):  # until a session begins
            return f"{path}: its weights are packed for Marlin"
        if getattr(method, "w13_swiglu_interleaved", False):
            return (
                f"{path}: its gate and up rows are interleaved (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"
            )
        for name, tensor in layer.named_parameters(recurse=False):
            # scales of MXFP8 are bytes of this format from the beginning
            if getattr(tensor, "format_ue8m0", False) and tensor.dtype not in _UE8M0:
                return f"{path}.{name}: its scales are packed as UE8M0"
            if not tensor.numel() or made_anew(f"{path}.{name}"):
                continue
            if "weight" in name and not hasattr(tensor, "weight_loader"):
                return f"{path}.{name}: {type(method).__name__} has replaced it after loading"
        if getattr(method, "use_flashinfer_trtllm_moe", False) and not _restored(layer, method):
            return (
                f"{path}: its weights lie in blocks for flashinfer_trtllm (another "
                "--moe-runner-backend, triton for example, leaves them as they are)"
            )
    return ""


def packed_scales(model: Any) -> list[str]:
    """The parameters whose scales SGLang has packed for DeepGEMM, as it does when it has loaded FP8
    blocks on Blackwell.  Loaders take such ones from then on."""
    return [
        path
        for path, tensor in model.named_parameters()
        if getattr(tensor, "format_ue8m0", False) and tensor.dtype == torch.int32
    ]


def _cut_word(model: Any, packed: Sequence[str]) -> str:
    """Which parameter of these has scales of columns that begin inside a word of the trainer's;
    "": none.  The loader takes whole words, so that other columns' scales would be there."""
    for path in packed:
        name, _, last = path.rpartition(".")
        layer = model.get_submodule(name)
        columns = getattr(layer, last.removesuffix("_scale_inv")).shape[-1]
        parts = getattr(layer, "moe_tp_size", 1) if last.startswith("w2") else 1
        if hasattr(layer, "input_size_per_partition"):
            parts = layer.input_size // layer.input_size_per_partition
        if parts > 1 and columns % 512:
            return (
                f"{path}: tensor-parallel ranks have {columns} columns each, and words of packed "
                "scales are for 512"
            )
    return ""


def _delivers_packed(model: Layout) -> bool:
    """Whether a trainer has scales in that form."""
    facts = (model.tensor(index) for index in range(model.tensor_count))
    return any(dtype == "int32" and name.endswith("_scale_inv") for name, dtype, _, _ in facts)


def _restored(layer: Any, method: Any) -> bool:
    """Whether weights in blocks have become plain matrices again."""
    return hasattr(method, "restore_weights_before_loading") and layer.w13_weight.dim() == 3
