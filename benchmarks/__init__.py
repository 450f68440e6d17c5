"""Benchmarks of the installed wsync; see README.md in this folder."""

import sys
import warnings
from pathlib import Path

# `python -m benchmarks` puts the repository root first on sys.path, where the source folder would
# hide the installed package; child processes inherit this order.
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [*(entry for entry in sys.path if entry not in ("", _ROOT)), _ROOT]

# in every process that imports a benchmark; what wsync and the benchmarks warn of is shown
warnings.filterwarnings("ignore", module=r"(mbridge|megatron|sglang|torch|transformers)(\.|$)")
