"""SGLang's server on a CPU.

`python -m wsync.demo.sglang_cpu ARGUMENTS` runs `python -m sglang.launch_server ARGUMENTS` without
SGLang's kernels, and without the CUDA packages that SGLang depends on.  Stand-ins replace them;
SGLang's own code stays as it is.  The server's other processes also import this module before
SGLang, because multiprocessing imports the main module in each process.
"""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from wsync.demo import stand_ins

# packages that SGLang's server imports, but that no process of it calls on a CPU
NEEDED_BY_NO_SERVER = (
    *("IPython", "gguf", "interegular", "llguidance", "openai", "openai_harmony", "outlines"),
    *("partial_json_parser", "scipy", "sentencepiece", "soundfile", "tiktoken"),
    *("torch_memory_saver", "torchao", "torchaudio", "torchvision", "triton", "tvm_ffi"),
    *("watchfiles", "xgrammar"),
)


def stand_in(missing: Iterable[str]) -> None:
    """Makes `import sglang` work without its kernels and without the packages in `missing`.

    Call this before that import.  If a package in `missing` is installed, it is used."""
    from torch.utils import _triton

    # torch caches these answers, so it does not take the stand-in for triton
    _triton.has_triton_package()
    _triton.has_triton()
    stand_ins.install(missing, always=["sgl_kernel"])
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore
    known = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        (lambda f: f) if str(op).startswith("sgl_kernel::") else known(op, *a, **k)
    )
    registrar: Any = types.ModuleType("sglang.srt.configs.utils")
    registrar.register_image_processor = registrar.register_processor = lambda *_, **__: None
    sys.modules[registrar.__name__] = registrar
    from transformers.models.auto import configuration_auto

    mapping: Any = type(configuration_auto.CONFIG_MAPPING)
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(
        self, key, value, exist_ok=True
    )


if __name__ in ("__main__", "__mp_main__"):
    stand_in(NEEDED_BY_NO_SERVER)
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
