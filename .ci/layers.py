"""layers.py BUILD: each header compiles alone, and a layer sees only the layers it may use.

Takes the compiler command of every layer from the build itself and compiles one-line probes with
it: a header that a layer may use must compile, any other must not be found.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

MAY_USE = {
    "core": {"core"},
    "device": {"core", "device"},
    "ipc": {"core", "device", "ipc"},
    "comm": {"core", "device", "ipc", "comm"},
    "python": {"core", "device", "ipc", "comm", "python"},
}
PYTHON_ONLY = ("Python.h", "dlpack/dlpack.h")
NOT_FOUND = ("No such file or directory", "file not found")  # gcc, clang
CSRC = Path(__file__).resolve().parent.parent / "csrc"


def commands(build: Path) -> dict[str, list[str]]:
    """The compiler command of one source of each layer, without its input and output."""
    found: dict[str, list[str]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.is_relative_to(CSRC):
            words = shlex.split(entry["command"])
            for flag in ("-o", "-c"):
                where = words.index(flag)
                del words[where : where + 2]
            found.setdefault(source.relative_to(CSRC).parts[0], words)
    return found


def compiles(command: list[str], include: str, build: Path) -> tuple[bool, str]:
    probe = f"#include {include}\ntypedef int probe_t;\n"
    done = subprocess.run(
        [*command, "-fsyntax-only", "-x", "c", "-"],
        input=probe,
        capture_output=True,
        text=True,
        cwd=build,
        check=False,
    )
    return done.returncode == 0, done.stderr


def judge(layer: str, include: str, allowed: bool, result: tuple[bool, str]) -> str | None:
    """What is wrong with the outcome, or None."""
    good, text = result
    if allowed and not good:
        return f"{layer}: {include} does not compile alone:\n{text}"
    if not allowed and good:
        return f"{layer}: {include} compiles, but {layer} may not use it"
    if not allowed and not any(words in text for words in NOT_FOUND):
        return f"{layer}: {include} fails for another reason than not being found:\n{text}"
    return None


def escapes() -> tuple[list[str], int]:
    """Includes that would go round the include roots."""
    wrong, count = [], 0
    for path in sorted(path for layer in MAY_USE for path in (CSRC / layer).rglob("*.[ch]")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r"\s*#\s*include\s*(\S+)", line)
            if match is None:
                continue
            count += 1
            name = match.group(1)
            quoted = name.startswith('"')
            if ".." in name or name[1] == "/" or name.lower().startswith("<python3"):
                wrong.append(f"{path}:{number}: {name} goes round the include root")
            elif quoted and "/" not in name:
                wrong.append(f"{path}:{number}: {name} does not name its layer")
    return wrong, count


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    known = commands(build)
    wrong, checked = escapes()
    if set(known) != set(MAY_USE):
        wrong.append(f"layers in the build: {sorted(known)}, here: {sorted(MAY_USE)}")
    headers = sorted(path for layer in MAY_USE for path in (CSRC / layer).rglob("*.h"))
    for layer in sorted(known.keys() & MAY_USE):
        command = known[layer]
        names = [path.relative_to(CSRC) for path in headers]
        cases = [(f'"{name}"', name.parts[0] in MAY_USE[layer]) for name in names]
        cases += [(f"<{name}>", layer == "python") for name in PYTHON_ONLY]
        for include, allowed in cases:
            checked += 1
            complaint = judge(layer, include, allowed, compiles(command, include, build))
            if complaint:
                wrong.append(complaint)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"checked: {checked} includes ({len(headers)} headers, {len(known)} layers)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
