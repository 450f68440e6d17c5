"""kernels.py ROOT CACHE PROGRAM: the kernels compile for every architecture, and in the machine
code nothing is spilled, as many blocks fit a multiprocessor as the host counts on, and memory is
read 16 bytes at a time.  PROGRAM (tests/c/compile_kernels.c) does the same with the real NVRTC, as
a process that finds a device would.  Needs no GPU; what is missing of the toolkit comes from PyPI
and is kept in CACHE."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = (80, 90, 100, 120)
REGISTERS = 65536  # of a multiprocessor
WHEELS = {
    "nvcc": ("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88",
             "nvidia-cuda-runtime==13.0.96"),
    "nvdisasm": ("nvidia-cuda-nvdisasm==13.4.92",),
    "libnvrtc.so.13": ("nvidia-cuda-nvrtc==13.0.88",),
}  # fmt: skip
PIP_INSTALL = (sys.executable, "-m", "pip", "install", "-qq", "--no-deps")
NVCC = ("--cubin", "-Werror", "all-warnings", "-Xptxas", "-v")
# Of each kernel: its constants, and what bytes it must store at a time.
KERNELS = {"wsync_copy": ("WSYNC_KERNEL", 128), "wsync_quantise": ("WSYNC_QUANTISE", 64)}
FILES = (
    "kernels.cu",
    "kernel_table.h",
    "quantise_kernels.cu",
    "quantise_math.h",
    "quantise_table.h",
)
# What is planted, and what must then be found.
PLANTS = (
    (
        "WSYNC_KERNEL_BLOCKS_PER_SM = 2,",
        "WSYNC_KERNEL_BLOCKS_PER_SM = 4,",
        ("wsync_copy: spills",),
    ),
    (
        "WSYNC_QUANTISE_BLOCKS_PER_SM = 3,",
        "WSYNC_QUANTISE_BLOCKS_PER_SM = 6,",
        ("wsync_quantise: spills",),
    ),
    (
        "ALIGNED(16)",
        "ALIGNED(4)",
        ("wsync_copy: no 16-byte stores", "wsync_quantise: no 16-byte loads"),
    ),
    ("ALIGNED(8)", "ALIGNED(4)", ("wsync_quantise: no 8-byte stores",)),
    (
        "#define GLOBAL(address) __cvta_global_to_generic(address)",
        "#define GLOBAL(address) (address)",
        ("wsync_copy: generic", "wsync_quantise: generic"),
    ),
)


def from_wheels(name: str, cache: Path) -> Path:
    """A file of NVIDIA's wheels, which are installed into a folder of their own."""
    folder = cache / WHEELS[name][0].replace("==", "-")
    with open(cache / "lock", "ab") as lock:  # as `locked` of .ci/run: others share the cache
        number = lock.fileno()
        subprocess.run(["flock", "-w", "900", str(number)], pass_fds=[number], check=True)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([*PIP_INSTALL, "--target", folder, *WHEELS[name]], check=True)
            (folder / "complete").touch()
    (found,) = folder.glob(f"nvidia/*/*/{name}")
    return found


def tool(name: str, cache: Path) -> Path:
    """A program of the CUDA toolkit: the machine's own, else the one of NVIDIA's wheels."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if found and not os.environ.get("WSYNC_CI_CUDA_WHEELS"):
        return Path(found)
    program = from_wheels(name, cache)
    program.chmod(0o755)
    return program


def constant(headers: str, name: str) -> int:
    match = re.search(rf"\b{name} = (\d+),", headers)
    assert match, f"no {name} in the headers"
    return int(match.group(1))


def compile_for(nvcc: Path, sources: Path, architecture: int, cubin: Path) -> str:
    """What the assembler says about the kernels."""
    kernels = sources / "device/kernels.cu"
    done = subprocess.run(
        [nvcc, f"-arch=sm_{architecture}", *NVCC, "-I", sources, "-o", cubin, kernels],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"sm_{architecture}: does not compile:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"no {pattern!r} in:\n{text}"
    return int(match.group(1))


def disassemble(nvdisasm: Path, cubin: Path) -> str:
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    return done.stdout


def parts(pattern: str, text: str) -> dict[str, str]:
    """What follows each match, up to the next, by the kernel that the match names."""
    words = re.split(pattern, text)
    found = dict(zip(words[1::2], words[2::2], strict=True))
    assert set(found) == set(KERNELS), f"kernels {sorted(found)} in:\n{text}"
    return found


def examine_code(code: str) -> tuple[list[str], dict[str, str]]:
    """What is wrong with the accesses to memory, and how many there are, by kernel."""
    wrong, figures = [], {}
    for name, part in parts(r"(?m)^\s+\.section\s+\.text\.(\w+),", code).items():
        complaints, figures[name] = examine_accesses(part, KERNELS[name][1])
        wrong += [f"{name}: {complaint}" for complaint in complaints]
    return wrong, figures


def examine_accesses(code: str, stored: int) -> tuple[list[str], str]:
    """Of one kernel, which stores so many bits at a time."""
    loads = len(re.findall(r"\bLDG\.E\.(?:[A-Z0-9]+\.)*128\b", code))
    stores = len(re.findall(rf"\bSTG\.E\.(?:[A-Z0-9]+\.)*{stored}\b", code))
    generic = len(re.findall(r"\b(?:LD|ST|ATOM)\.E\b", code))
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
    wrong = []
    if re.search(r"\b(?:LDL|STL)\b", code):
        wrong.append("spills: accesses to local memory")
    if not loads:
        wrong.append("no 16-byte loads")
    if not stores:
        wrong.append(f"no {stored // 8}-byte stores")
    if generic:
        wrong.append(f"generic accesses, {generic}: an address is not known to be global")
    figures = f"{instructions} instructions, 16-byte loads {loads}, {stored // 8}-byte stores"
    return wrong, f"{figures} {stores}"


def examine_registers(verbose: str, limit: int) -> tuple[list[str], str]:
    """Of one kernel."""
    registers = number(r"Used (\d+) registers", verbose)
    stack = number(r"(\d+) bytes stack frame", verbose)
    spilled = number(r"(\d+) bytes spill stores", verbose)
    wrong = []
    if registers > limit:
        wrong.append(f"{registers} registers, more than the {limit} of its blocks")
    if stack or spilled:
        wrong.append(f"spills: {spilled} bytes, {stack} bytes of stack")
    return wrong, f"{registers} registers"


def check(tools: tuple[Path, Path], sources: Path, architecture: int) -> tuple[list[str], str]:
    nvcc, nvdisasm = tools
    headers = "".join((sources / "device" / file).read_text() for file in FILES)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        verbose = compile_for(nvcc, sources, architecture, cubin)
        wrong, figures = examine_code(disassemble(nvdisasm, cubin))
    for name, part in parts(r"Compiling entry function '(\w+)'", verbose).items():
        prefix = KERNELS[name][0]
        threads = constant(headers, f"{prefix}_BLOCK") * constant(
            headers, f"{prefix}_BLOCKS_PER_SM"
        )
        complaints, used = examine_registers(part, REGISTERS // threads)
        wrong += [f"{name}: {complaint}" for complaint in complaints]
        figures[name] = f"{used}, {figures[name]}"
    return wrong, "; ".join(f"{name}: {figures[name]}" for name in KERNELS)


def compile_at_run_time(program: Path, library: Path, nvdisasm: Path, folder: Path) -> list[str]:
    """The first process compiles, the next one loads the same code from the disk."""
    wrong = []
    for architecture in ARCHITECTURES:
        images = [folder / f"{architecture}.{how}" for how in ("compiled", "cached")]
        for image in images:
            words = [program, library, folder / "cache", str(architecture), image]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0 or not done.stdout.startswith(image.suffix[1:]):
                return [*wrong, f"{image.name}: {done.stdout}{done.stderr}"]
        if images[0].read_bytes() != images[1].read_bytes():
            wrong.append(f"sm_{architecture}: the cache gives other code than NVRTC")
        complaints, figures = examine_code(disassemble(nvdisasm, images[1]))
        wrong += [f"sm_{architecture} by NVRTC: {complaint}" for complaint in complaints]
        text = "; ".join(f"{name}: {figures[name]}" for name in KERNELS)
        print(f"sm_{architecture} by NVRTC: {text}")
    return wrong


def planted(tools: tuple[Path, Path], sources: Path, folder: Path) -> list[str]:
    """Every plant must be found."""
    wrong = []
    for index, (before, after, names) in enumerate(PLANTS):
        copy = folder / f"plant-{index}" / "device"
        copy.mkdir(parents=True)
        places = 0
        for file in FILES:
            text = (sources / "device" / file).read_text()
            places += text.count(before)
            (copy / file).write_text(text.replace(before, after))
        complaints, _ = check(tools, copy.parent, 90)
        missed = [n for n in names if not any(c.startswith(n) for c in complaints)]
        if places != 1 or missed:
            wrong.append(f"planted {after!r} in {places} places: no {missed} in {complaints}")
    return wrong


def main() -> int:
    sources, cache = Path(sys.argv[1]) / "csrc", Path(sys.argv[2])
    tools = (tool("nvcc", cache), tool("nvdisasm", cache))
    wrong = []
    for architecture in ARCHITECTURES:
        complaints, figures = check(tools, sources, architecture)
        wrong += [f"sm_{architecture}: {complaint}" for complaint in complaints]
        print(f"sm_{architecture}: {figures}")
    library = from_wheels("libnvrtc.so.13", cache)
    with tempfile.TemporaryDirectory() as folder:
        wrong += planted(tools, sources, Path(folder))
        wrong += compile_at_run_time(Path(sys.argv[3]), library, tools[1], Path(folder))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"checked: {2 * len(ARCHITECTURES)} images and {len(PLANTS)} plants")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
