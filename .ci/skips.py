"""skips.py LIST JUNIT...: the skipped tests must be the listed ones, for the listed reasons.

A line of LIST is `REGEX OF TEST :: REGEX OF REASON`; one that no skipped test matches is an error
too, so the list cannot outlive what it excuses.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main() -> int:
    cases = [case for junit in sys.argv[2:] for case in ElementTree.parse(junit).iter("testcase")]
    skipped = {
        f"{case.get('classname')}.{case.get('name')}": skip.get("message") or ""
        for case in cases
        for skip in case.iter("skipped")
    }
    lines = Path(sys.argv[1]).read_text().splitlines()
    listed = [tuple(line.split(" :: ", 1)) for line in lines if line and not line.startswith("#")]
    wrong, used = [], set()
    for name, reason in skipped.items():
        matches = {
            entry
            for entry in listed
            if re.fullmatch(entry[0], name) and re.search(entry[1], reason)
        }
        used |= matches
        if not matches:
            wrong.append(f"skipped, but not listed: {name} :: {reason}")
    wrong += [f"listed, but nothing was skipped: {' :: '.join(e)}" for e in listed if e not in used]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"skips: {len(skipped)}, all listed" if not wrong else f"skips: {len(skipped)}")
    print(f"checked: {len(cases)} tests")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
