"""What workers of the demo's SGLang engine are forked with: SGLang, made importable once."""

import importlib
import os

import wsync.demo.engines.worker_processes
import wsync.demo.sglang_cpu_engine  # noqa: F401
from wsync.demo import sglang_cpu

_before = dict(os.environ)
sglang_cpu.load()
for _name in ("qwen3", "qwen3_moe"):
    importlib.import_module(f"sglang.srt.models.{_name}")
_settings = {name: value for name, value in os.environ.items() if _before.get(name) != value}
sglang_cpu.load = lambda *_: os.environ.update(_settings)
