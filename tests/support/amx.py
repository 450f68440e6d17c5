"""Run as a script: runs another one on a processor that says it has AMX tiles.

    python amx.py SCRIPT ARGUMENTS...

Only torch's answer about the processor is changed: its instructions are not there.
"""

import runpy
import sys

import torch


def main() -> None:
    found = torch._C._cpu._get_cpu_capability()
    tiles = dict.fromkeys(("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"), True)
    torch._C._cpu._get_cpu_capability = lambda: {**found, **tiles}
    assert torch.cpu._is_amx_tile_supported()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
