"""`python -m wsync.demo.sglang_cpu ARGUMENTS` is `python -m sglang.launch_server ARGUMENTS` on a
CPU, without SGLang's kernels and the CUDA packages that it depends on.

What these give has stand-ins; nothing of SGLang's own is changed.  The server's other processes
import this module, too, before anything of SGLang: multiprocessing has them import the one that
Python was started with.
"""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from wsync.demo import stand_ins

# imported by its server, and called by none of its own processes on a CPU
NEEDED_BY_NO_SERVER = (
    *("IPython", "gguf", "interegular", "llguidance", "openai", "openai_harmony", "outlines"),
    *("partial_json_parser", "scipy", "sentencepiece", "soundfile", "tiktoken"),
    *("torch_memory_saver", "torchao", "torchaudio", "torchvision", "triton", "tvm_ffi"),
    *("watchfiles", "xgrammar"),
)


def stand_in(missing: Iterable[str]) -> None:
    """Lets sglang be imported without its kernels, and without those of the packages in `missing`
    that are not installed; before its import."""
    from torch.utils import _triton

    _triton.has_triton_package()  # remembered: torch must not take the stub for triton
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
