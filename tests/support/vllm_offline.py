"""Run as a module where vLLM is: has an engine of this process updated, and says what it answers.

    python -m support.vllm_offline KIND OUT FIRST SECOND

KIND: "llm", "async" (an AsyncLLM) or "transfer" (vLLM's own weight transfer, with wsync's backend,
to an LLM of two workers); OUT: the file for a JSON list of steps; FIRST: the folder of the
checkpoint that the engine starts with; SECOND: of what it is updated to, and back.
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
    if kind == "async":
        found = asyncio.run(online(first, second))
    else:
        found = {"llm": offline, "transfer": transfer}[kind](first, second)
    Path(out).write_text(json.dumps(found))


class Client:
    """vLLM's trainer-side stub of an engine, for an LLM of this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self._llm.finish_weight_update(weight_version)


def transfer(first: Path, second: Path) -> list[Step]:
    """An LLM before vLLM's own update, after one that lacks a tensor and the next, after one that
    fails, and after one back."""
    from vllm.distributed.weight_transfer import (
        ParamMeta,
        WeightSource,
        WeightTransferTrainerFactory,
    )

    from wsync.vllm.weight_transfer_engine import TrainerInitInfo

    class Source(WeightSource):
        tensors = weights(second)

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

        def __iter__(self) -> Any:
            return iter(self.tensors.items())

    chosen = {"weight_transfer_config": {"backend": "wsync"}, "tensor_parallel_size": 2}
    llm = LLM(**arguments(first, **chosen))

    def step() -> Step:
        llm.reset_prefix_cache()
        prompt = {"prompt_token_ids": PROMPT}
        output = llm.generate([prompt], greedy(TOKENS), use_tqdm=False)[0]
        found = describe(output, llm.collective_rpc("held"), llm.get_weight_version())
        return {**found, "calls": list(client.calls)}

    client, source = Client(llm), Source()
    steps = [step()]
    told = TrainerInitInfo(rank=0, workers=2, options=OPTIONS)
    engine = WeightTransferTrainerFactory.trainer_init(told, client=client, source=source)
    lacking = source.tensors.popitem()
    try:
        engine.send_weights()
    except wsync.WsyncError as error:
        steps.append({"error": str(error), "lacking": lacking[0]})
    source.tensors |= dict([lacking])
    client.calls.clear()
    engine.send_weights()
    steps.append(step())
    source.tensors = weights(first)
    llm.collective_rpc("set_fault", args=(True,))
    try:
        engine.send_weights("bad")
    except wsync.WsyncError as error:
        steps.append({"error": str(error), "version": llm.get_weight_version()})
    llm.collective_rpc("set_fault", args=(False,))
    engine.send_weights("first")
    steps.append(step())
    engine.shutdown()
    return steps


if __name__ == "__main__":
    main()
