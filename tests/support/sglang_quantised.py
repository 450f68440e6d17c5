"""Run as a script: updates SGLang's own model classes with quantised checkpoints.

    python sglang_quantised.py sglang TREE PACKAGES CASES

CASES: a JSON list of {"family", "method", "path", "trainer", "gpu"}.  method: the fields of the
quantised_models.Method that the engine expects, null for none; trainer: of what it is sent, if that
is another, with "drop": a pattern of tensors that it is not sent.  path: how tensors get there.

    learnt      a model that was only loaded, by what was learnt of it
    session     one that SGLang has processed, as its servers do, in a weight-update session
    bucket      SGLang's own buckets, in a session
    disk        a checkpoint that DiskSync has written, of which SGLang does the same

gpu: DeepSeek's kv_b_proj is taken apart as on a GPU.  An engine of fp8_packed is one on Blackwell:
it has packed the scales of the checkpoint that it was started from.  Every model is updated twice
and compared each time with one that was loaded, and processed, as SGLang does it.  Prints a JSON
list.
"""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[3])
    sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import deep_gemm_stub, learn_models, quantised_models, sglang_host, tiny_models
from support.workers import ThreadEngine

import wsync
from wsync.sglang import SglangLoader

OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=1 << 19, ring_nbytes=1 << 20)
PROCESSED = ("session", "bucket", "disk")


class Case:
    """One row; `shapes` and `config` are made before SGLang is there."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        family, sizes = facts["family"], quantised_models.SIZES[facts["family"]]
        kinds = [fields and fields[0] for fields in (facts["method"], facts.get("trainer"))]
        if "fp8_packed" in kinds:
            sizes = sizes | quantised_models.WIDE
        self.config = tiny_models.config(family, **sizes)
        self.plain = tiny_models.checkpoint(family, self.config)

    def published(self, seed: int, method: Sequence[Any] | None) -> quantised_models.Tensors:
        """A checkpoint, quantised by a method."""
        made, chosen = tiny_models.tensors(self.plain, seed), method_of(method)
        return made if chosen is None else chosen.quantise(made)

    def data(self, seed: int) -> quantised_models.Tensors:
        """What the trainer has."""
        drop = self.facts.get("drop", "^$")
        found = self.published(seed, self.facts.get("trainer", self.facts["method"]))
        return {name: tensor for name, tensor in found.items() if not re.search(drop, name)}

    def build(self) -> torch.nn.Module:
        method, config = method_of(self.facts["method"]), copy.deepcopy(self.config)
        options = [] if method is None else [sglang_host.quantization(method, config)]
        return sglang_host.build(self.facts["family"], config, *options)

    def own(self, seed: int) -> torch.nn.Module:
        """A model that SGLang's own loading has filled."""
        model: Any = self.build()
        method = method_of(self.facts["method"])
        if method is not None and method.kind == "fp8_packed":
            model.load_weights(list(self.published(seed, ["fp8_block"]).items()))
            sglang_host.process(model)
            pack_scales(model)
        model.load_weights(list(self.published(seed, self.facts["method"]).items()))
        if self.facts["path"] in PROCESSED:
            sglang_host.process(model)
        return model  # type: ignore[no-any-return]


def method_of(fields: Sequence[Any] | None) -> quantised_models.Method | None:
    return None if fields is None else quantised_models.Method(*fields)


def pack_scales(model: torch.nn.Module) -> None:
    """What SGLang does of FP8 blocks where DeepGEMM runs them on Blackwell, by its own functions
    and its copies of DeepGEMM's."""
    from sglang.srt.layers.quantization import fp8_utils

    stubs = deep_gemm_stub.modules(
        fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    )
    needed = "sglang.srt.model_loader.utils.should_deepgemm_weight_requant_ue8m0"
    packed = 0
    with (
        unittest.mock.patch.dict(sys.modules, stubs),
        unittest.mock.patch(needed, lambda **_: True),
    ):
        for module in model.modules():
            for name, scale in list(module.named_parameters(recurse=False)):
                if name.endswith("_scale_inv"):
                    weight = getattr(module, name.removesuffix("_scale_inv"))
                    packed += fp8_utils.requant_block_scale_ue8m0_for_deepgemm(
                        weight, scale, [128, 128], True
                    )
    assert packed


class Session(ThreadEngine):
    """A worker that takes tensors as SGLang does: begin_weight_update, updates, end."""

    def __init__(self, model: torch.nn.Module, loader: SglangLoader) -> None:
        super().__init__([loader])
        self._model, self._open = model, False

    def update_weights(self, payloads: Sequence[bytes], **how: Any) -> None:
        if not self._open:
            sglang_host.restore(self._model)
            self._open = True
        self._load(payloads, **how)

    def _load(self, payloads: Sequence[bytes], **how: Any) -> None:
        super().update_weights(payloads, **how)

    def resume(self, timeout: float) -> None:
        sglang_host.process(self._model)
        self._open = False


class Stock(Session):
    """One without wsync."""

    load_formats = ()

    def _load(self, payloads: Sequence[bytes], **how: Any) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.utils import MultiprocessingSerializer

        assert how["load_format"] == "flattened_bucket"
        WeightUpdater._update_weights_from_flattened_bucket(
            SimpleNamespace(get_model=lambda: self._model),
            flattened_tensor_bucket_dict=MultiprocessingSerializer.deserialize(payloads[0]),
        )
        self.version = how["weight_version"]


def run(case: Case) -> dict[str, Any]:
    path, model = (
        case.facts["path"],
        case.own(7) if case.facts["path"] in PROCESSED else case.build(),
    )
    loader = SglangLoader(model, ignore=["*.input_scale"])  # of NVFP4, which no trainer has
    engines = {"session": Session, "bucket": Stock}
    kind = engines.get(path, lambda _, loader: ThreadEngine([loader]))
    if path == "disk":
        return through_disk(case, model)
    with unittest.mock.patch("torch.distributed.is_initialized", return_value=False):
        sync = wsync.connect(case.data(0), engines=[kind(model, loader)], options=OPTIONS)
    differing = []
    with sync:
        for seed in (1, 2):
            report = sync.update(case.data(seed))
            differing.append(difference(case, model, seed))
    return {
        "differing": differing,
        "reason": loader.reason,
        "redundancy": report.redundancy,
        "fallback": sorted(loader.computed()),
        "same_place": len(loader.facts().get("same_place", ())),
    }


def through_disk(case: Case, model: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    differing = []
    options = wsync.Options(deadline=60, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        with unittest.mock.patch("torch.distributed.is_initialized", return_value=False):
            sync = wsync.DiskSync(case.data(0), folder=folder, options=options)
        with sync:
            for seed in (1, 2):
                sync.update(case.data(seed))
                files = sorted(wsync.disk.newest(folder).glob("*.safetensors"))
                sglang_host.restore(model)
                model.load_weights([pair for file in files for pair in load_file(file).items()])
                sglang_host.process(model)
                differing.append(difference(case, model, seed))
    return {"differing": differing}


def difference(case: Case, model: torch.nn.Module, seed: int) -> list[str]:
    wanted, found = learn_models.held(case.own(seed)), learn_models.held(model)
    assert len(wanted) > 10
    return sorted(n for n in wanted.keys() | found if wanted.get(n) != found.get(n))


def try_to(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    cases = [Case(facts) for facts in json.loads(sys.argv[4])]
    sglang_host.load(Path(sys.argv[2]))
    sglang_host.host(tp=1, ep=1, rank=0)
    sglang_host.stand_in_for_kernels()
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    gc.freeze()  # see learn_models.py
    found = []
    for case in cases:
        gpu = case.facts.get("gpu", False)
        with unittest.mock.patch.object(deepseek_weight_loader, "_is_cuda", gpu):
            found.append(try_to(lambda case=case: run(case)))  # type: ignore[misc]
    print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
