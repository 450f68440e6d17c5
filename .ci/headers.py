"""What wsync declares of a library that it never links, compared by the compiler with the
library's own headers."""

import subprocess
import tempfile
from pathlib import Path

COMPILE = ("gcc", "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only")
# What is planted: before, after, and what the compiler must then say.
Plant = tuple[str, str, str]


def compile(source: Path, folders: list[Path]) -> str:
    """What the compiler complains of."""
    words = [*COMPILE, *(f"-I{folder}" for folder in folders), source]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def planted(source: Path, folders: list[Path], header: str, plants: tuple[Plant, ...]) -> list[str]:
    """Every plant in the header, which is in the first folder, must be found."""
    text, wrong = (folders[0] / header).read_text(), []
    for before, after, words in plants:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / header
            copy.parent.mkdir(parents=True)
            copy.write_text(text.replace(before, after))
            said = compile(source, [Path(folder), *folders])
        if text.count(before) != 1 or words not in said:
            wrong.append(f"planted {after!r} in {text.count(before)} places: {said[:2000]}")
    return wrong
