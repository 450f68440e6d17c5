"""Run as a script: a trainer that is killed before a phase of its update.

    python server_trainer.py URL FOLDER WAY PHASE [SECONDS]

FOLDER: the checkpoint of what it delivers; WAY: Options.delivery.  With SECONDS it says the phase
and waits for so long instead.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from support.server_phases import before

import wsync


def main() -> None:
    url, folder, way, phase, *seconds = sys.argv[1:]

    def act() -> None:
        if not seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        print(phase, flush=True)
        time.sleep(float(seconds[0]))

    weights = load_file(Path(folder, "model.safetensors"))
    options = wsync.Options(delivery=way, progress=False, bucket_nbytes=1 << 16)
    with before(phase, act):
        with wsync.connect(weights, engines=[url], options=options) as sync:
            sync.update(version="killed")


if __name__ == "__main__":
    main()
