"""What all trainer processes of the demo need: imported once, by the process that they are forked
from.  What cannot be imported is left out: who needs it says so."""

from __future__ import annotations

import contextlib
import importlib
import signal
import warnings

_MODULES = (
    *("transformers.models.qwen3", "transformers.models.qwen3_moe", "wsync.demo.trainer"),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model"),
    *("wsync.megatron", "wsync.demo.megatron_cpu"),
)

# Ctrl-C ends this process, and those that are forked from it, without a traceback
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
# megatron-core says in many words that it has neither TransformerEngine nor a GPU here
warnings.filterwarnings("ignore", module=r"megatron\.")
for _name in _MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
