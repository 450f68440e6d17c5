"""oldest.py PYPROJECT: the lowest versions that it allows where it names no single one, for pip."""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("engine", "demo", "delta")


def main() -> int:
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    wrong = 0
    for requirement in sorted(set(wanted)):
        name, relation, version = re.fullmatch(r"([^=<>]+)([=<>]*)(.*)", requirement).groups()
        if relation == ">=":
            print(f"{name}=={version}")
        elif relation != "==" and not name.startswith(f"{project['name']}["):
            print(f"{requirement}: neither pinned nor a lower bound", file=sys.stderr)
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
