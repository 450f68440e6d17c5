"""In front on PYTHONPATH, this has SGLang's server run on a CPU, in each of its processes.

What its kernels and a few packages give has stand-ins, when sglang is imported; nothing of SGLang's
own is changed.  A server ends with the process that WSYNC_TEST_PARENT names.
"""

import ctypes
import importlib.abc
import os
import signal
import sys

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class _BeforeSglang(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            from wsync.demo import sglang_cpu

            sglang_cpu.stand_in(sglang_cpu.NEEDED_BY_NO_SERVER)


sys.meta_path.insert(0, _BeforeSglang())
if os.environ.get("WSYNC_TEST_PARENT") == str(os.getppid()):
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
