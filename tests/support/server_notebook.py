"""Run as a script: a notebook's update of a server, with the transformers that it finds.

    python server_notebook.py URL FOLDER WAY SOURCE

FOLDER: the checkpoint of what it delivers; WAY: Options.delivery; SOURCE: "dict" of the model's
parameters, its "state", or its "layout".  Prints the version of transformers, the names that hold
experts, and what the model says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from support.server_models import PATIENCE, Checkpoint

import wsync


def main() -> None:
    url, folder, way, source = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given: Any = {
        "dict": lambda: dict(model.named_parameters()),
        "state": model.state_dict,
        "layout": lambda: wsync.fsdp.layout(model),
    }[source]()
    options = wsync.Options(delivery=way, progress=False, deadline=PATIENCE)
    with wsync.connect(given, engines=[url], options=options) as sync:
        sync.update(version=f"{way}-{source}")
    experts = {name.rpartition(".")[2] for name, _ in model.named_parameters() if "experts" in name}
    said = Checkpoint(Path(folder), model, {}).tokens(12)
    print(json.dumps([transformers.__version__, sorted(experts), said]))


if __name__ == "__main__":
    main()
