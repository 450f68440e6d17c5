"""To be imported last by a process that others are forked from: what most ranks of tests need, as
far as it can be imported.  What is there by then is not looked at for garbage any more.

Modules that tests need are a million objects, which each full collection would walk through, and
whose pages each forked process would then copy.
"""

import contextlib
import gc
import importlib
import warnings

_MODULES = (
    *("transformers.models.qwen3", "transformers.models.qwen3_moe", "torch.distributed"),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model"),
    *("wsync.megatron", "support.megatron_cpu"),
)

# megatron-core says in many words that it has neither TransformerEngine nor a GPU here
warnings.filterwarnings("ignore", module=r"megatron\.")
for _name in _MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()
