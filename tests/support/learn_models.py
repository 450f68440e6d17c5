"""Run as a script: updates an engine's own model classes, rank by rank.

    python learn_models.py ENGINE TREE PACKAGES CASES

ENGINE: sglang or vllm; TREE: its unpacked wheel; PACKAGES: a folder of what it imports; CASES: a
JSON list of {"family", "tp", "ep", "ranks", "modes", "dp_attention", "config", "fp8", "draft",
"refused"}.  A draft is the class that computes a model's layers of multi-token prediction; refused:
the engine cannot build it, or wsync not update it.  For every
case and rank (all of tp, if not said) a model is updated twice through wsync, in the modes `needed`
and `full` if not said, or `stock`, in buckets for its load_weights, and compared with a model whose
own load_weights got the same tensors.
Prints a JSON list of what was found.
"""

from __future__ import annotations

import base64
import copy
import functools
import gc
import importlib
import json
import sys
import unittest.mock
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[3])
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import draft_models, tiny_models
from support.call_cases import Engine
from support.digests import everything
from support.workers import ThreadEngine

import wsync
from wsync.engine.drafts import with_drafts
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.messages import payload
from wsync.sglang import SglangLoader

HOST: Any = importlib.import_module(
    {"sglang": "support.sglang_host", "vllm": "support.vllm_host"}[sys.argv[1]]
)
LOADER = SglangLoader if sys.argv[1] == "sglang" else RecordedLoader
# scales of vLLM's cache of keys and values that a checkpoint may lack: a running engine has none
# of these parameters any more, its process_weights_after_loading deletes them
CACHE_SCALES = ("*.attn.[qkv]_scale", "*.attn.prob_scale")
MODES = ("needed", "full")
OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=1 << 15, ring_nbytes=1 << 16)


def held(model: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of everything that a model holds, plain attributes too."""
    return {
        path: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for path, tensor in everything(model).items()
    }


def update(
    model: torch.nn.Module, shapes: tiny_models.Shapes, needed: bool, draft: bool
) -> dict[str, Any]:
    ignore = () if sys.argv[1] == "sglang" else CACHE_SCALES
    loader = LOADER(model, needed=needed, ignore=ignore + (draft_models.SHARED if draft else ()))
    engine = ThreadEngine([loader])
    # the process group is the engine's: the trainer has one rank and none
    with unittest.mock.patch("torch.distributed.is_initialized", return_value=False):
        sync = wsync.connect(tiny_models.tensors(shapes, 0), engines=[engine], options=OPTIONS)
    with sync:
        for seed in (1, 2):
            report = sync.update(tiny_models.tensors(shapes, seed))
    return {
        "reason": loader.reason,
        "fallback": loader.computed(),
        "unwritten": [path for path, _ in loader.facts().get("unwritten", ())],
        "delivered": report.delivered_nbytes,
        "redundancy": report.redundancy,
        "model": report.model_nbytes,
    }


class Stock(Engine):
    """Gives buckets to a model's own load_weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.names, self.largest = model, set[str](), 0

    def update_weights_from_tensor(self, **given: Any) -> tuple[bool, str]:
        bucket = payload.load(base64.b64decode(given["serialized_named_tensors"][0]))
        flat, parts = bucket["flattened_tensor"], bucket["metadata"]
        self.largest = max(self.largest, flat.numel())
        self.names |= {part.name for part in parts}
        self.model.load_weights(
            [(p.name, flat[p.start_idx : p.end_idx].view(p.dtype).reshape(p.shape)) for p in parts]
        )
        return True, ""


def update_stock(model: torch.nn.Module, shapes: tiny_models.Shapes) -> dict[str, Any]:
    engine = Stock(model)
    options = wsync.Options(deadline=60, progress=False, delivery="stock", bucket_nbytes=1 << 12)
    with unittest.mock.patch("torch.distributed.is_initialized", return_value=False):
        sync = wsync.connect(tiny_models.tensors(shapes, 0), engines=[engine], options=options)
    with sync:
        for seed in (1, 2):
            sync.update(tiny_models.tensors(shapes, seed))
    return {"names": sorted(engine.names), "largest": engine.largest}


def blockwise_fp8(config: Any) -> list[Any]:
    """What the engine's `build` takes besides a config for an FP8 checkpoint in blocks."""
    if sys.argv[1] == "vllm":
        HOST.quantize(config)
        return []
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return [
        Fp8Config.from_config(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
        )
    ]


@functools.cache
def model_of(family: str, changes: str, draft: bool) -> tuple[Any, tiny_models.Shapes]:
    """A configuration and the checkpoint; changes: of its fields, as JSON.  To be called before
    there is an engine, which changes classes of transformers when it is imported."""
    like = draft_models.LIKE.get(family, family)
    config = tiny_models.config(like, **json.loads(changes))
    shapes = tiny_models.checkpoint(like, config)
    if draft:
        return draft_models.extended(family, config, shapes)
    return tiny_models.published(config), shapes


def build(family: str, draft: bool, config: Any, options: list[Any]) -> torch.nn.Module:
    like, (own, given) = draft_models.LIKE.get(family, family), map(copy.deepcopy, [config] * 2)
    alone = draft and family.endswith("_text")  # engines have no class for the model
    model = torch.nn.Module() if alone else HOST.build(like, own, *options)  # first, as engines do
    if not draft:
        return model
    sglang = sys.argv[1] == "sglang"
    made = draft_models.build(HOST, family, given) if sglang else HOST.build_draft(given)
    draft_models.share(made)
    return made if alone else with_drafts(model, {"draft": made})


def run(case: dict[str, Any], rank: int, config: Any, shapes: tiny_models.Shapes) -> dict[str, Any]:
    family, draft = case["family"], case.get("draft", False)
    dp = case.get("dp_attention", False)
    HOST.host(tp=case["tp"], ep=case["ep"], rank=rank, dp_attention=dp)
    options: list[Any] = []
    if case.get("fp8"):
        shapes = tiny_models.blockwise_fp8(shapes)
        options = blockwise_fp8(config)
    elif sys.argv[1] == "sglang" and (draft or family in tiny_models.SAVED + tiny_models.UNKNOWN):
        config = HOST.configure(config)
    if case.get("refused"):
        try:
            update(build(family, draft, config, options), shapes, True, draft)
        except Exception as error:
            return {"case": case, "refused": str(error)}
    own = build(family, draft, config, options)
    own.load_weights(list(tiny_models.tensors(shapes, 1).items()))
    own.load_weights(list(tiny_models.tensors(shapes, 2).items()))
    wanted = held(own)
    result: dict[str, Any] = {"case": case, "rank": rank, "held": len(wanted)}
    if draft:
        result["names"] = sorted(shapes)
    for mode in case.get("modes", MODES):
        model = build(family, draft, config, options)
        if mode == "stock":
            facts = update_stock(model, shapes)
        else:
            facts = update(model, shapes, mode == "needed", draft)
        found = held(model)
        facts["differing"] = [n for n in wanted.keys() | found if wanted.get(n) != found.get(n)]
        result[mode] = facts
    return result


def main() -> None:
    tree, cases = Path(sys.argv[2]), json.loads(sys.argv[4])
    models = [
        model_of(case["family"], json.dumps(case.get("config", {})), case.get("draft", False))
        for case in cases
    ]
    HOST.load(tree)
    gc.freeze()  # learning collects garbage, for which all that is imported would be looked at
    results = [
        run(case, rank, copy.deepcopy(config), shapes)
        for case, (config, shapes) in zip(cases, models, strict=True)
        for rank in case.get("ranks", range(case["tp"]))
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
