"""packages.py ROOT: wsync/ imports downwards, and a public name means one thing.

A storey may import those below it and itself.  Both kinds of import count, at the top of a module
and inside a function.  What wsync/__init__.py hands on is counted where it is defined.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

# From the ground up.  Names in one storey do not import each other.
STOREYS = (
    ("_core",),
    ("boxes", "machine", "pages"),
    ("options", "module_tensors"),
    ("probing", "report"),
    ("families",),
    ("layout", "bucket", "checkpoints"),
    ("quantise",),
    ("messages",),
    ("handles",),
    ("exchange",),
    ("trainer",),
    ("sync", "disk"),
    ("engine",),
    ("megatron", "fsdp"),
    ("slime", "inspection", "copying"),
    ("sglang", "vllm"),
    ("doctor", "verl"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(STOREYS) for name in names}
FACE = "__init__"


def modules(package: Path) -> dict[str, Path]:
    """Every module by its name under the package, "" for the package itself."""
    found = {}
    for path in sorted(package.rglob("*.py*")):
        if path.suffix in (".py", ".pyi"):
            parts = path.relative_to(package).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == FACE else parts)] = path
    return found


def homes(face: Path) -> dict[str, str]:
    """Which module defines each name that wsync/__init__.py hands on."""
    return {
        alias.name: node.module.removeprefix("wsync").lstrip(".") or alias.name
        for node in ast.walk(ast.parse(face.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wsync")
        for alias in node.names
    }


def imported(tree: ast.Module, known: dict[str, Path], home: dict[str, str]) -> set[str]:
    """The modules of the package that a module imports, by their names under it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name[len("wsync.") :] for a in node.names if a.name.startswith("wsync.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wsync":
            base = (node.module or "").removeprefix("wsync").lstrip(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".lstrip(".")
                found.add(whole if whole in known else base or home[alias.name])
    return found


def main() -> int:
    package = Path(sys.argv[1]) / "wsync"
    known = modules(package)
    home = homes(known.pop(""))
    wrong, arrows, defined = [], set(), defaultdict(list)
    for name, path in known.items():
        room = name.split(".")[0]
        if room not in HEIGHT:
            wrong.append(f"{path}: {room} is in no storey of .ci/packages.py")
            continue
        tree = ast.parse(path.read_text())
        for other in sorted(imported(tree, known, home)):
            below = other.split(".")[0]
            if below != room:
                arrows.add((room, below))
                if HEIGHT.get(below, -1) >= HEIGHT[room]:
                    wrong.append(f"{path}: imports wsync.{other}, which is not below {room}")
        for node in tree.body if path.suffix == ".py" else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path))
    wrong += [f"{name}: defined in {' and '.join(w)}" for name, w in defined.items() if len(w) > 1]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(arrows)} arrows between {len(HEIGHT)} rooms")
    print(f"checked: {len(known)} modules")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
