"""Run as a script by benchmarks.needed: what every worker of an engine keeps, learnt one by one.

python needed_engine.py TREE PACKAGES FOLDER CASE

CASE: JSON of family, sizes, tp, ep, dp_attention.  Writes the layout of worker K to FOLDER/K and
that of the model to FOLDER/model, and prints a JSON list of facts, one a worker.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[2])
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

import torch
from support import sglang_host, tiny_models

from wsync._core import Layout, LayoutBuilder
from wsync.sglang import SglangLoader


def model_layout(shapes: tiny_models.Shapes) -> Layout:
    """Names, dtypes and shapes alone."""
    builder = LayoutBuilder()
    for name, (shape, dtype) in shapes.items():
        builder.add_tensor(name, str(dtype).removeprefix("torch."), list(shape))
    return builder.build()


def learn(case: dict[str, Any], rank: int, config: Any, model: Layout, folder: Path) -> Any:
    sglang_host.host(
        tp=case["tp"], ep=case["ep"], rank=rank, dp_attention=case.get("dp_attention", False)
    )
    module = sglang_host.build(case["family"], config)
    loader = SglangLoader(module)
    start = time.perf_counter()
    (folder / str(rank)).write_bytes(loader.learn(model))
    seconds = time.perf_counter() - start
    if loader.learnt is None:
        raise SystemExit(loader.reason)
    found, does = loader.facts(), loader.learnt.does
    tensors = loader.learnt.memory.tensors() or []
    # without wsync: what the parameters hold, less what no tensor fills
    parameters = {path: p.nbytes for path, p in module.named_parameters()}
    unfilled = sum(n for path, n in found["unwritten"] if path in parameters)
    unfilled += sum(piece.view(tensors).nbytes for piece in does.constants)
    return {
        "seconds": seconds,
        "parameters": sum(parameters.values()) - unfilled,
        "fallback": len(found["fallbacks"]),
        "skipped": len(found["skipped"]),
    }


def main() -> None:
    folder, case = Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    sglang_host.load(Path(sys.argv[1]))
    config = tiny_models.config(case["family"], **case["sizes"])
    model = model_layout(tiny_models.checkpoint(case["family"], config))
    (folder / "model").write_bytes(model.to_bytes())
    facts = [learn(case, rank, config, model, folder) for rank in range(case["tp"])]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
