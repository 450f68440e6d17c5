"""again.py JUNIT...: the failed tests of a run for pytest; exit 1 for none, or for too many."""

import sys
import xml.etree.ElementTree as ElementTree

MOST = 5


def main() -> int:
    failed = [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for junit in sys.argv[1:]
        for case in ElementTree.parse(junit).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed", file=sys.stderr)
        return 1
    print(*failed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
