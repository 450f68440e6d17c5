"""dist.py ROOT SDIST WHEEL: the archive is complete, and the wheel holds the package only."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

SDIST_FOLDERS = ("csrc", "wsync", "tests", "benchmarks")
LICENCE = "csrc/LICENSE"
SDIST_FILES = ("CMakeLists.txt", "pyproject.toml", "README.md")


def tracked(root: Path, *paths: str) -> set[str]:
    done = subprocess.run(
        ["git", "-C", root, "ls-files", "--", *paths], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def main() -> int:
    root, sdist, wheel = (Path(word) for word in sys.argv[1:4])
    with tarfile.open(sdist) as archive:
        packed = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        installed = {name for name in names if ".dist-info/" not in name}
        licences = [archive.read(n) for n in names if n.endswith(f".dist-info/licenses/{LICENCE}")]
    wrong = []
    missing = tracked(root, *SDIST_FOLDERS, *SDIST_FILES) - packed
    if missing:
        wrong.append(f"{sdist.name} lacks {sorted(missing)}")
    stray = packed - tracked(root, ".") - {"PKG-INFO"}
    if stray:
        wrong.append(f"{sdist.name} holds untracked {sorted(stray)}")
    guide = tracked(root, "wsync/guide")
    expected = tracked(root, "wsync") - guide | {"wsync/_core.abi3.so"}
    if installed != expected:
        wrong.append(f"{wheel.name}: lacks {sorted(expected - installed)}")
        wrong.append(f"{wheel.name}: has also {sorted(installed - expected)}")
    if licences != [(root / LICENCE).read_bytes()]:
        wrong.append(f"{wheel.name}: not with {LICENCE}")
    if "-cp311-abi3-" not in wheel.name:
        wrong.append(f"{wheel.name}: not one wheel for Python 3.11 and newer")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"checked: {len(packed) + len(installed)} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
