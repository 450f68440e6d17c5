"""Run as a module where vLLM is: has an engine of this process updated, and says what it answers.

    python -m support.vllm_offline KIND OUT FIRST SECOND

KIND: "llm" or "async" (an AsyncLLM); OUT: the file for a JSON list of steps; FIRST: the folder of
the checkpoint that the engine starts with; SECOND: of what it is updated to, and back.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support.server_models import PROMPT
from support.vllm_server import KV_CACHE_NBYTES, PROBE
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import wsync

TOKENS = 12
OPTIONS = wsync.Options(progress=False, deadline=240.0)
Step = dict[str, Any]


def arguments(model: Path, **further: Any) -> dict[str, Any]:
    return {
        **{"model": str(model), "dtype": "float32", "skip_tokenizer_init": True},
        **{"enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_NBYTES, "max_num_seqs": 4},
        **{"worker_extension_cls": PROBE, **further},
    }


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def describe(output: Any, held: Any, said: str) -> Step:
    spans = [[span.version, span.start, span.end] for span in output.outputs[0].weight_versions]
    return {
        **{"tokens": list(output.outputs[0].token_ids), "spans": spans},
        **{"held": held, "version": said},
    }


def offline(first: Path, second: Path) -> list[Step]:
    """An LLM before an update, after it, and after one back."""
    llm = LLM(**arguments(first))

    def step() -> Step:
        prompt = {"prompt_token_ids": PROMPT}
        output = llm.generate([prompt], greedy(TOKENS), use_tqdm=False)[0]
        return describe(output, llm.collective_rpc("held"), llm.get_weight_version())

    return [step(), *updates(llm, first, second, step)]


def updates(engine: Any, first: Path, second: Path, step: Callable[[], Step]) -> list[Step]:
    steps = []
    with wsync.connect(weights(second), engines=[engine], options=OPTIONS) as sync:
        for version, folder in (("second", second), ("first", first)):
            sync.update(weights(folder), version=version)
            steps.append(step())
    return steps


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


async def online(first: Path, second: Path) -> list[Step]:
    """The same of an AsyncLLM."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(first)))
    loop = asyncio.get_running_loop()

    async def answer() -> Step:
        prompt = {"prompt_token_ids": PROMPT}
        async for output in engine.generate(prompt, greedy(TOKENS), request_id="one"):
            last = output
        held = await engine.collective_rpc("held")
        return describe(last, held, await engine.get_weight_version())

    def step() -> Step:
        return asyncio.run_coroutine_threadsafe(answer(), loop).result()

    before = await answer()
    steps = await asyncio.to_thread(updates, engine, first, second, step)
    engine.shutdown()
    return [before, *steps]


def main() -> None:
    kind, out, *folders = sys.argv[1:]
    first, second = map(Path, folders)
    found = asyncio.run(online(first, second)) if kind == "async" else offline(first, second)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
