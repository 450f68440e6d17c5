"""Run as a script: one worker process of a vLLM engine, with vLLM's own worker base and models.

    python vllm_worker.py TREE PACKAGES TP RANK

vLLM's WorkerWrapperBase makes the worker and mixes wsync's extension into it.  A line in is a JSON
list [method, arguments...] of that worker, a line out {"answer": ...} or {"error": text}.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    sys.path.insert(1, str(Path(__file__).parent.parent))

from support import tiny_models, vllm_host

EXTENSION = "wsync.vllm.WorkerExtension"


def main() -> None:
    tree, tp, rank = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    vllm_host.load(tree)
    vllm_host.host(tp=tp, ep=1, rank=rank)
    from vllm.v1.worker import worker_base

    worker_base.worker_receiver_cache_from_config = lambda *_: None
    config = vllm_host.configure(tiny_models.config("qwen3"))
    config.parallel_config.worker_cls = "support.vllm_worker_class.Worker"
    config.parallel_config.worker_extension_cls = EXTENSION
    wrapper = worker_base.WorkerWrapperBase(rpc_rank=rank)
    arguments = {
        "vllm_config": config,
        "local_rank": rank,
        "rank": rank,
        "distributed_init_method": "",
    }
    wrapper.init_worker([arguments] * tp)
    wrapper.init_device()
    gc.freeze()  # see learn_models.py
    for line in sys.stdin:
        method, *given = json.loads(line)
        try:
            result = {"answer": getattr(wrapper, method)(*given)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
