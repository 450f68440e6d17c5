"""Benchmarks of the installed wsync; see README.md in this folder."""

import sys
import warnings
from pathlib import Path

# `python -m benchmarks` puts the repository root first on sys.path, where the source folder would
# hide the installed package; child processes inherit this order.
_ROOT = Path(__file__).resolve().parent.parent
_LAST = [str(_ROOT), str(_ROOT / "tests")]  # these have engines of bare weights
sys.path[:] = [*(entry for entry in sys.path if entry not in ("", *_LAST)), *_LAST]

# in every process that imports a benchmark; what wsync and the benchmarks warn of is shown
warnings.filterwarnings("ignore", module=r"(mbridge|megatron|sglang|torch|transformers)(\.|$)")
