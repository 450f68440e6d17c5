"""tidy.py CLANG_TIDY BUILD PASSED FILE...: clang-tidy over files, two at a time; run in the root.

A file that has passed is not looked at again while all that its result depends on stays as it was:
clang-tidy's version and settings, the command line, and the bytes of every file that it includes.
PASSED: a folder of the digests of those, each an empty file.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SETTINGS = ".clang-tidy"


def dependencies(entry: dict[str, str]) -> list[Path]:
    """The files that a compilation reads, from the command line in compile_commands.json."""
    words = shlex.split(entry["command"])
    output = words.index("-o")
    del words[output : output + 2]
    done = subprocess.run(
        [*words, "-M"], cwd=entry["directory"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{entry['file']}: {done.stderr}")
    names = done.stdout.replace("\\\n", " ").partition(":")[2].split()
    return sorted({Path(entry["directory"], name).resolve() for name in names})


def digest(path: Path, entries: list[dict[str, str]], version: str) -> str:
    """What a file's result depends on, wherever the root and the build tree lie."""

    def placeless(text: str) -> str:
        return text.replace(entry["directory"], "BUILD").replace(os.getcwd(), "ROOT")

    found = hashlib.sha256(version.encode())
    for folder in path.parents:
        if (folder / SETTINGS).exists():
            found.update((folder / SETTINGS).read_bytes())
    for entry in entries:
        found.update(placeless(entry["command"]).encode())
        for other in dependencies(entry):
            content = hashlib.sha256(other.read_bytes()).hexdigest()
            found.update(f"{placeless(str(other))} {content}\n".encode())
    return found.hexdigest()


def look_at(
    tool: str,
    build: str,
    passed: Path,
    known: dict[Path, list[dict[str, str]]],
    version: str,
    file: str,
) -> str:
    """What is wrong with a file, "" for nothing; "known" where it has passed before."""
    path = Path(file).resolve()
    place = passed / digest(path, known[path], version)
    if place.exists():
        return "known"
    done = subprocess.run(
        [tool, "-p", build, "--quiet", file], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        place.touch()
        return ""
    return f"{file}: exit {done.returncode}\n{done.stdout}{done.stderr}"


def main() -> int:
    tool, build, passed, *files = sys.argv[1:]
    known: dict[Path, list[dict[str, str]]] = {}
    for entry in json.loads(Path(build, "compile_commands.json").read_text()):
        known.setdefault(Path(entry["file"]).resolve(), []).append(entry)
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    os.makedirs(passed, exist_ok=True)
    look = partial(look_at, tool, build, Path(passed), known, version)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(look, files))
    for text in found:
        if text not in ("", "known"):
            print(text)
    before = found.count("known")
    print(f"checked: {len(files)} files, {before} of which had passed as they are")
    return 1 if len(files) > before + found.count("") else 0


if __name__ == "__main__":
    sys.exit(main())
