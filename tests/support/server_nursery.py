"""Run as a script in the environment of an engine's server: forks servers that have imported what
they need, and whose own processes are forked, too.

    python server_nursery.py KIND

Each line of the input is a JSON list: the file for what a server writes, the module that Python
runs, its arguments.  It is answered with the process's number.  Nobody asks for their statuses.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "wsync.sglang",
)
_VLLM = (
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "wsync.vllm",
)
_NEEDED = {"sglang": _SGLANG, "vllm": _VLLM}
_HOLD = "WSYNC_TEST_HOLD"  # a file beside the server's log; see hold_until_paused
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    for name in _NEEDED[sys.argv[1]]:
        importlib.import_module(name)
    if sys.argv[1] == "sglang":
        name_kernels()
        name_what_others_do()
        rest_while_paused()
    else:
        hold_until_paused()
        rest_between_messages()
    gc.freeze()  # see preloaded
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        log, module, *arguments = json.loads(line)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            serve(log, module, arguments, theirs)
        os.close(theirs)
        os.read(ours, 1)  # until it has its session, or has ended
        os.close(ours)
        print(child, flush=True)


def name_kernels() -> None:
    """SGLang looks these up when it starts with a model that drafts.  No test has them called."""
    import torch

    for name in ("decode_attention_cpu", "extend_attention_cpu"):
        setattr(torch.ops.sgl_kernel, name, None)


def name_what_others_do() -> None:
    """Two things of parallel workers that SGLang has kernels for, and no arithmetic on a CPU: the
    length of sequences that fill a batch up where attention is data-parallel, and experts of other
    workers, which are number -1."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1

    def forward_own(layer: Any, x: Any, chosen: Any, _: object) -> Any:
        weights = chosen.topk_weights * (chosen.topk_ids >= 0)
        given = SimpleNamespace(hidden_states=x, topk_output=chosen._replace(topk_weights=weights))
        return fused_moe_native.fused_moe_forward_native(layer, given).hidden_states

    fused_moe_native.moe_forward_native = forward_own


def rest_while_paused() -> None:
    """A paused scheduler asks for requests without a break, and takes the time of two processors
    from the trainer; with this, it waits for them as one that is idle does.

    The method is that of SGLang 0.5.17 and newer."""
    from sglang.srt.managers.scheduler import Scheduler

    name = "_record_scheduler_state_for_paused_engine"
    record = getattr(Scheduler, name, None)
    if record is None:
        return

    def record_and_wait(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    setattr(Scheduler, name, record_and_wait)


def rest_between_messages() -> None:
    """For a second after each message a process of vLLM's asks for the next one without a break;
    with this, for a hundredth, except in its first second, when it may miss that there is one."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(self: Any) -> None:
        self.last_read = max(self.last_read, time.monotonic() - self.busy_loop_s + 0.01)

    SpinCondition.record_read = record_read


def hold_until_paused() -> None:
    """While there is a file with a number in it, an engine of vLLM makes no more tokens once a
    request has so many.  It removes the file when it is told to pause."""
    from vllm.v1.engine.core import EngineCoreProc

    step, pause = EngineCoreProc._process_engine_step, EngineCoreProc.pause_scheduler

    def step_if_not_held(self: Any) -> bool:
        hold = Path(os.environ[_HOLD])
        if hold.exists():
            count = int(hold.read_text())
            if any(len(request.output_token_ids) >= count for request in self.scheduler.running):
                time.sleep(0.005)
                return False
        found: bool = step(self)
        return found

    def pause_and_let_go(self: Any, *arguments: Any, **named: Any) -> Any:
        Path(os.environ[_HOLD]).unlink(missing_ok=True)
        return pause(self, *arguments, **named)

    EngineCoreProc._process_engine_step = step_if_not_held
    EngineCoreProc.pause_scheduler = pause_and_let_go


def serve(log: str, module: str, arguments: list[str], begun: int) -> None:
    """The rest of a server's life."""
    status = 1
    try:
        os.setsid()
        os.environ[_HOLD] = log + ".hold"
        os.write(begun, b"y")
        os.closerange(3, 1 << 10)  # the pipes of this and of the nursery
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
            os.dup2(opened, number)
        if "--tp-size" in arguments:
            sizes = [name for name in ("--tp-size", "--pp-size") if name in arguments]
            workers = math.prod(int(arguments[arguments.index(name) + 1]) for name in sizes)
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
        fork_processes()
        sys.modules.pop(module, None)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_processes() -> None:
    """Has the server's own processes forked, whatever it chooses."""
    chosen, context = multiprocessing.set_start_method, multiprocessing.get_context
    multiprocessing.set_start_method = lambda *_, **__: chosen("fork", force=True)
    multiprocessing.get_context = lambda *_: context("fork")
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # it starts a Python to look at a model's class
        registry._run_in_subprocess = lambda function: function()


if __name__ == "__main__":
    main()
