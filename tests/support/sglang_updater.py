"""Run as a script: one worker process of an SGLang engine, as far as weights are concerned.

    python sglang_updater.py TREE PACKAGES TP RANK

The request's payload goes through SGLang's own unpickler and its own
WeightUpdater.update_weights_from_tensor, whose custom weight loader is wsync's.  That also begins
and ends sessions.  An exception that leaves it ends the process, as it ends a server.  A line in is
a JSON list [method, arguments...], a line out what it returns.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import draft_models, quantised_models, sglang_host, tiny_models
from support.digests import digests

from wsync import sglang
from wsync.sglang import SglangLoader

LOADER = "wsync.sglang.load_weights"


class Worker:
    """What a line in may call."""

    def __init__(self, tp: int, rank: int) -> None:
        self._place = self._tp, self._rank = tp, rank
        self._method: quantised_models.Method | None = None
        self._selected: Any = None  # what a request is for
        self._updater = self._make_updater()
        sglang.SglangLoader = self._make_loader  # type: ignore[misc, assignment]

    def prepare(
        self,
        family: str,
        ep: int,
        changes: dict[str, Any],
        method: Sequence[Any] = (),
        alone: bool = False,
        drafts: int = 0,
    ) -> dict[str, Any]:
        """Another model in place of the one that is there; the tensors of its checkpoint.

        method: the fields of the quantised_models.Method that it is quantised by; it is then loaded
        and processed as SGLang does when it starts.  alone: this worker is a whole engine.  drafts:
        so many models draft with its checkpoint's layer for that.
        """
        self._tp, self._rank = (1, 0) if alone else self._place
        self._updater = self._make_updater()
        sglang_host.host(tp=self._tp, ep=ep, rank=self._rank)
        self._family = family
        self._config = tiny_models.config(family, **changes)
        self._checkpoint = tiny_models.checkpoint(family, self._config)
        if drafts:
            extended = draft_models.extended(family, self._config, self._checkpoint)
            self._config, self._checkpoint = extended
        self._method = None
        if method:
            sglang_host.stand_in_for_kernels()
            sglang_host.take_kv_apart_as_on_a_gpu()
            self._method = quantised_models.Method(*method)
            self._checkpoint = self._method.shapes(self._checkpoint)
        self._model, *self._drafts = self._build_all(drafts)
        sglang._drafts.clear()  # of another model
        if method:
            self._load(self._model, 0)
        self._fault = 0
        load = self._model.load_weights

        def faulty(pairs: Any) -> Any:
            pairs = list(pairs)
            if self._fault and len(pairs) > self._fault:
                load(pairs[: self._fault])
                raise KeyError("half way")
            return load(pairs)

        self._model.load_weights = faulty
        return {
            name: [list(shape), str(dtype).removeprefix("torch.")]
            for name, (shape, dtype) in self._checkpoint.items()
        }

    def _build(self) -> Any:
        if self._method is None:
            return sglang_host.build(self._family, self._config)
        given = copy.deepcopy(self._config)
        return sglang_host.build(self._family, given, sglang_host.quantization(self._method, given))

    def _build_all(self, drafts: int) -> list[Any]:
        """The model and its drafts, which have the model's embedding and head."""
        model = self._build()
        made = [draft_models.build(sglang_host, self._family, self._config) for _ in range(drafts)]
        for draft in made:
            draft.model.embed_tokens.weight = model.model.embed_tokens.weight
            draft.lm_head.weight = model.lm_head.weight
        return [model, *made]

    def _load(self, model: Any, given: int | str) -> None:
        """As SGLang does when it starts."""
        model.load_weights(list(tiny_models.weights(self._checkpoint, given).items()))
        if self._method is not None:
            sglang_host.process(model)

    def _make_updater(self) -> Any:
        from sglang.srt.model_executor.model_runner_components import weight_updater

        # what belongs to GPUs and to a whole server
        weight_updater.monkey_patch_torch_reductions = lambda: None
        arguments = types.SimpleNamespace(weight_cache_mode="off")
        runner = types.SimpleNamespace(server_args=arguments)
        weight_updater.get_model = lambda: arguments
        weight_updater.get_parallel = lambda: types.SimpleNamespace(tp_rank=self._rank)
        device = types.SimpleNamespace(current_device=lambda: "cpu")
        torch.get_device_module = lambda *_: device  # type: ignore[assignment]
        return weight_updater.WeightUpdater(
            **{"tp_rank": self._rank, "device": "cpu", "gpu_id": 0, "model_config": None},
            custom_weight_loaders=[LOADER],
            get_model=lambda: self._selected,
            update_model_fields=lambda *_: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )

    def _make_loader(self, model: Any) -> SglangLoader:
        self.loader = SglangLoader(model)
        return self.loader

    def fallback(self) -> list[str]:
        """Tensors that go through load_weights itself."""
        return sorted(self.loader.computed())

    def reason(self) -> str:
        """Why load_weights could not be replaced."""
        return self.loader.reason

    def update(self, payload: str, load_format: str) -> list[Any]:
        """A request.  SGLang up to 0.5.20 gives it to the draft first, newer versions last."""
        from sglang.srt.utils import MultiprocessingSerializer

        named = MultiprocessingSerializer.deserialize(payload)
        models = [self._model, *self._drafts]
        for model in models if hasattr(self._updater, "end_weight_update") else models[::-1]:
            self._selected = model
            answer = list(self._updater.update_weights_from_tensor(named, load_format))
        return answer

    def begin(self) -> None:
        """Begins a session."""
        self._selected = self._model
        self._updater.begin_weight_update()

    def end(self) -> None:
        self._updater.end_weight_update(run_post_load=False)

    def found(self) -> dict[str, str]:
        return _digests([self._model, *self._drafts])

    def expected(self, given: int | str) -> dict[str, str]:
        """What the model has to hold after an update with these tensors."""
        models = self._build_all(len(self._drafts))
        for model in models:
            self._load(model, given)
        return _digests(models)

    def set_fault(self, count: int) -> None:
        """Has load_weights raise after so many tensors; 0: no more."""
        self._fault = count

    def transpose(self, path: str) -> None:
        """Leaves a layer as SGLang does that has rewritten its weights."""
        layer = self._model.get_submodule(path)
        layer.weight = torch.nn.Parameter(layer.weight.detach().t(), requires_grad=False)


def _digests(models: Sequence[Any]) -> dict[str, str]:
    named = enumerate(map(digests, models))
    return {f"{number}.{path}": d for number, found in named for path, d in found.items()}


def main() -> None:
    tree = Path(sys.argv[1])
    tp, rank = int(sys.argv[3]), int(sys.argv[4])
    answers = sys.stdout
    sys.stdout = sys.stderr
    sglang_host.load(tree)
    sglang_host.host(tp=tp, ep=1, rank=rank)
    gc.freeze()  # see learn_models.py
    worker = Worker(tp, rank)
    for line in sys.stdin:
        method, *given = json.loads(line)
        print(json.dumps(getattr(worker, method)(*given)), file=answers, flush=True)


if __name__ == "__main__":
    main()
