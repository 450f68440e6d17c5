"""In front on PYTHONPATH, this has vLLM run with what `.ci/servers` lists, in all its processes.

Packages that it imports and the tests do not use have stand-ins, when vllm is imported; nothing of
vLLM's own is changed.  An engine ends with the process that WSYNC_TEST_PARENT names.
"""

import ctypes
import importlib.abc
import os
import signal
import sys

_ABSENT = (
    *("cv2", "llguidance", "mistral_common"),
    *("openai_harmony", "sentencepiece", "torchvision", "watchfiles", "xgrammar"),
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class _BeforeVllm(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            sys.meta_path.remove(self)
            from wsync.demo import stand_ins

            stand_ins.install(_ABSENT)


sys.meta_path.insert(0, _BeforeVllm())
if os.environ.get("WSYNC_TEST_PARENT") == str(os.getppid()):
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
