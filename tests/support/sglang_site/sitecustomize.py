"""In front on PYTHONPATH, this has SGLang's server run on a CPU, in each of its processes.

What its kernels and a few packages give has stand-ins, when sglang is imported; nothing of SGLang's
own is changed.  A server ends with the process that WSYNC_TEST_PARENT names.
"""

import ctypes
import importlib.abc
import os
import signal
import sys

_ABSENT = (
    *("IPython", "gguf", "interegular", "llguidance", "openai", "openai_harmony", "outlines"),
    *(
        "partial_json_parser",
        "scipy",
        "sentencepiece",
        "soundfile",
        "tiktoken",
        "torch_memory_saver",
        "torchao",
    ),
    *("torchaudio", "torchvision", "triton", "tvm_ffi", "watchfiles", "xgrammar"),
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class _BeforeSglang(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            from wsync.demo.sglang_cpu import stand_in

            stand_in(_ABSENT)


sys.meta_path.insert(0, _BeforeSglang())
if os.environ.get("WSYNC_TEST_PARENT") == str(os.getppid()):
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
