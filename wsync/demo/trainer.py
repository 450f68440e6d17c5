"""One trainer process of the demo: train, update the engines, compare every byte."""

from __future__ import annotations

import contextlib
import datetime
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import requests
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from tqdm import tqdm

import wsync
from wsync import pages
from wsync.demo.cli import traces
from wsync.demo.engines.serve import ServerProcess, serve_in_process
from wsync.demo.engines.transformers import checksum
from wsync.demo.megatron_cpu import CpuTrainer, build, exported, on_cpu

SENTENCE = "Fresh weights reach every engine, byte for byte, before the next token is due. "
PROMPT_LENGTH = 18
NEW_TOKENS = 40
_STEPS = 12  # before each update; eight times as many before the last, to learn the text
_TOLERANCE = 1e-3  # of logits
_MODEL = {
    "vocab_size": 256,  # bytes
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_EXPERTS = {
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_http = requests.Session()
_http.trust_env = False


def train(rank: int, chosen: Any, folder: str) -> None:
    """Runs one rank.  Rank 0 starts the engines, prints, and exits with 1 if a byte is wrong."""
    torch.set_num_threads(1)
    tempfile.tempdir = folder  # the demo removes it, also after Ctrl-C
    sizes = _MODEL if chosen.model == "qwen3" else {**_MODEL, **_EXPERTS}
    config = transformers.AutoConfig.for_model(chosen.model.replace("-", "_"), **sizes)
    with contextlib.ExitStack() as stack:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=chosen.ranks,
            timeout=datetime.timedelta(seconds=300),
        )
        stack.callback(dist.destroy_process_group)
        stack.enter_context(on_cpu())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=chosen.tp,
            pipeline_model_parallel_size=chosen.pp,
            expert_model_parallel_size=chosen.ep,
            expert_tensor_parallel_size=1 if chosen.ep > 1 else None,
            create_gloo_process_groups=False,  # the default group is gloo
        )
        trainer = build(config)
        servers = []
        if rank == 0:
            print("starting the engines", flush=True)
            for seed in (1, 2):
                server = serve_in_process(config, dtype="float32", seed=seed)
                servers.append(stack.enter_context(server))
                print(f"engine {seed} at {server.url} says {_said(server.url)!r}", flush=True)
        _update(trainer, servers, chosen, folder)


def _update(
    trainer: CpuTrainer, servers: Sequence[ServerProcess], chosen: Any, folder: str
) -> None:
    """Trains and updates in turn.  Every rank takes part; rank 0 compares and reports."""
    ids = torch.tensor([list(SENTENCE.encode())], device="cpu")
    hidden = None if servers else True  # for tqdm: rank 0 shows bars if stderr is a terminal
    problems: list[str] = []
    urls = [server.url for server in servers]
    with _connected(trainer, urls, chosen, folder) as sync:
        for number in range(1, chosen.updates + 1):
            steps = _STEPS * (8 if number == chosen.updates > 1 else 1)
            text = f"training before update {number}"
            for _ in tqdm(range(steps), text, unit="step", leave=False, disable=hidden):
                trainer.step(ids)
            report = sync.update(version=number)
            expected = exported(trainer)
            logits = trainer.logits(ids)[0]
            found = [each for url in urls for each in _wrong(url, report, expected, ids, logits)]
            if servers:
                print(f"update {number} of {chosen.updates}: {report}", flush=True)
            problems += found
        proof = sync.verify() if isinstance(sync, wsync.Sync) else None
    if not servers:
        return
    for number, url in enumerate(urls, 1):
        print(f"engine {number}, weights by {report.paths[url]}, says {_said(url)!r}")
    if proof is not None:
        print(f"sync.verify(): {proof!r}")
        problems += [] if proof else [repr(proof)]
    if chosen.report:
        shown = "NOT VERIFIED" if problems else "verified"
        records = traces(folder, {s.pid: f"engine {n}" for n, s in enumerate(servers, 1)})
        parts = pages.tag("p", shown), *pages.update(report.facts(), records)
        page = pages.page(f"wsync demo: {chosen.model}", *parts)
        chosen.report.write_text(page, encoding="utf-8")
    if problems:
        print("NOT VERIFIED: " + "; ".join(problems))
        sys.exit(1)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    print(
        f"verified: {len(expected)} tensors, {nbytes:,} bytes, in every engine after every update"
    )


def _connected(
    trainer: CpuTrainer, urls: Sequence[str], chosen: Any, folder: str
) -> wsync.Sync | wsync.DiskSync:
    layout = wsync.megatron.layout(trainer.chunks, trainer.hf)
    if chosen.mode == "disk":
        return wsync.DiskSync(layout, urls, folder=f"{folder}/versions", base=trainer.hf)
    options = wsync.Options(round_nbytes=1 << 20)
    return wsync.connect(layout, urls, engine_gpu_offsets=chosen.offsets, options=options)


def _wrong(
    url: str,
    report: wsync.Report,
    expected: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    logits: torch.Tensor,
) -> list[str]:
    """Describes every error in an engine's version, bytes and logits after an update."""
    where = f"update {report.version}, {url}"
    version = _post(url, "/model_info")["weight_version"]
    problems = [f"{where}: version {version!r}"] if version != report.version else []
    sums = _post(url, "/weights_checker", action="checksum")["ranks"][0]["checksums"]
    right = {name: checksum(tensor) for name, tensor in expected.items()}
    names = sorted(sums.keys() | right.keys())
    problems += [f"{where}: {name}" for name in names if sums.get(name) != right.get(name)]
    found = torch.tensor(
        _post(url, "/wsync/logits", input_ids=ids[0].tolist())["logits"], device="cpu"
    )
    worst = float((found - logits).abs().max())
    if not worst <= _TOLERANCE:
        problems.append(f"{where}: logits differ by {worst:.2e}")
    return problems


def _said(url: str) -> str:
    """How an engine continues the beginning of the text.  If untrained, it gives random bytes."""
    prompt = list(SENTENCE[:PROMPT_LENGTH].encode())
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}
    ids = _post(url, "/generate", input_ids=prompt, sampling_params=sampling)["output_ids"]
    return "".join(chr(token) if 32 <= token < 127 else "?" for token in prompt + ids)


def _post(url: str, path: str, **body: Any) -> Any:
    answer = _http.post(url + path, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()
