"""`python -m wsync.demo.sglang_cpu_server ARGUMENTS` is `python -m sglang.launch_server ARGUMENTS`
on a CPU, without SGLang's kernels and the CUDA packages that it depends on.

What these give has stand-ins; nothing of SGLang's own is changed.  The server's other processes
import this module, too, before anything of SGLang: multiprocessing has them import the one that
Python was started with.
"""

import runpy

from wsync.demo import sglang_cpu

if __name__ in ("__main__", "__mp_main__"):
    sglang_cpu.stand_in(sglang_cpu.NEEDED_BY_NO_SERVER)
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
