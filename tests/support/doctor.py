"""One row of `wsync doctor`: all of them take seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_CODE = """
import sys
from wsync import doctor
row = sys.argv[1]
doctor._PROBES = tuple(probe for probe in doctor._PROBES if probe[0] == row)
doctor.main(["--json"])
"""


def finding(row: str, **environment: str) -> tuple[bool, str]:
    """Whether it has found something, and what it says, in an environment with these variables."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CODE, row],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["findings"]
    return found["found"], found["detail"]
