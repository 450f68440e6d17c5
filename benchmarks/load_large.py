"""Run as a script by benchmarks.load: one worker of 32 learns Qwen3-30B-A3B in its real shapes.

python load_large.py TREE PACKAGES
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[2])
sys.path.append(str(Path(__file__).parent.parent))  # last: it has an unbuilt wsync
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

import torch
from support import sglang_host, tiny_models

from benchmarks.plan_shapes import qwen3_moe
from wsync._core import LayoutBuilder
from wsync.engine.learn.made_up import MadeUpTensors
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.probing.lines import raw
from wsync.probing.numbering import Source

SIZES = {
    **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128},
    **{"num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768},
    **{"intermediate_size": 6144, "vocab_size": 151936},
}
WORKERS, WORKER = 32, 3


def peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    torch.set_num_threads(1)
    sglang_host.load(Path(sys.argv[1]))
    sglang_host.host(tp=WORKERS, ep=WORKERS, rank=WORKER)
    model = sglang_host.build("qwen3_moe", tiny_models.config("qwen3_moe", **SIZES))
    parameters = list(model.parameters())
    for parameter in parameters:
        raw(parameter).zero_()  # so that their memory is there
    sources = [Source(each.name, torch.bfloat16, each.shape) for each in qwen3_moe()]
    builder = LayoutBuilder()
    for source in sources:
        builder.add_tensor(source.name, "bfloat16", source.shape)
    calls, load = list[float](), model.load_weights

    def counted(pairs: Any) -> Any:
        start = time.process_time()
        try:
            return load(pairs)
        finally:
            calls.append(time.process_time() - start)

    loader, before = RecordedLoader(model, counted), peak_nbytes()
    start = time.process_time()
    loader.learn(builder.build())
    seconds, memory = time.process_time() - start, peak_nbytes() - before
    learnt, called = loader.learnt, len(calls)
    others = MadeUpTensors({}, 2)
    counted((source.name, others.of(source)) for source in sources)
    known = {source.name: source for source in sources}
    assert learnt is not None, loader.reason
    targets = learnt.memory.tensors()
    verified = all(
        torch.equal(raw(piece.view(targets)), raw(piece.of(others.of(known[piece.name]))))
        for piece in learnt.does.pieces
    )
    result = {"seconds": seconds, "peer_seconds": calls[-1], "calls": called, "memory": memory}
    result |= {"bytes": sum(source.nbytes for source in sources), "tensors": len(sources)}
    result |= {"kept": sum(parameter.nbytes for parameter in parameters)}
    result["verified"] = verified and loader.facts()["kept_nbytes"] == result["kept"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
