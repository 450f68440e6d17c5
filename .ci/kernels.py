"""kernels.py ROOT CACHE PROGRAM: the real NVRTC compiles the kernels for every architecture, and
in the machine code nothing is spilled, as many blocks fit a multiprocessor as the host counts on,
memory is read 16 bytes at a time, and rows are copied without a look at the tables.  PROGRAM
(tests/c/compile_kernels.c) does what a process that finds a device does.

kernels.py figures CACHE CSRC...: the figures of each folder's kernels, a table for
benchmarks/README.md.

Needs no GPU; NVRTC and nvdisasm come from PyPI and are kept in CACHE.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import wheels

ARCHITECTURES = (80, 90, 100, 120)
REGISTERS = 65536  # of a multiprocessor
NVRTC = ("nvidia-cuda-nvrtc==13.0.88", "libnvrtc.so.13")
NVDISASM = ("nvidia-cuda-nvdisasm==13.4.92", "nvdisasm")
# Of each kernel: its constants, and what bits it must store at a time.
KERNELS = {"wsync_copy": ("WSYNC_KERNEL", 128), "wsync_quantise": ("WSYNC_QUANTISE", 64)}
FILES = (
    "kernels.cu",
    "kernel_table.h",
    "quantise_kernels.cu",
    "quantise_octets.cu",
    "quantise_math.h",
    "quantise_table.h",
)
DEPTH = 4  # 16-byte loads that a thread has under way
# Sets of plants: what is replaced, and what must then be found.
PLANTS = (
    {
        "WSYNC_KERNEL_BLOCKS_PER_SM = 2,": (
            "WSYNC_KERNEL_BLOCKS_PER_SM = 4,",
            ("wsync_copy: spills",),
        ),
        "WSYNC_QUANTISE_BLOCKS_PER_SM = 2,": (
            "WSYNC_QUANTISE_BLOCKS_PER_SM = 4,",
            ("wsync_quantise: spills",),
        ),
        "ALIGNED(16)": (
            "ALIGNED(4)",
            ("wsync_copy: no 16-byte stores", "wsync_quantise: no 16-byte loads"),
        ),
        "ALIGNED(8)": ("ALIGNED(4)", ("wsync_quantise: no 8-byte stores",)),
    },
    {
        "#define GLOBAL(address) __cvta_global_to_generic(address)": (
            "#define GLOBAL(address) (address)",
            ("wsync_copy: generic", "wsync_quantise: generic"),
        ),
    },
    {
        "} else if (make_lines(tile, &lines)) {": (
            "} else if (make_lines(tile, &lines) > 1) {",
            ("wsync_copy: rows",),
        ),
        "tile.row = divide(index, &segment->chunks);": (
            "tile.row = index / TABLE(segment->chunks.value);",
            ("wsync_copy: divides",),
        ),
    },
)


def from_wheel(wheel: tuple[str, str], cache: Path) -> Path:
    (found,) = wheels.install(wheel[0], cache).glob(f"nvidia/*/*/{wheel[1]}")
    found.chmod(0o755)
    return found


class Nvrtc:
    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        count = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(count))
        data = ctypes.create_string_buffer(count.value)
        getattr(self._library, f"nvrtcGet{what}")(program, data)
        return data.raw

    def compile(self, sources: Path, architecture: int) -> tuple[bytes, str]:
        """The image, and what the compiler says."""
        texts = [(sources / "device" / name).read_bytes() for name in FILES]
        names = [f"device/{name}".encode() for name in FILES]
        count = len(FILES) - 1
        strings = ctypes.c_char_p * count
        program = ctypes.c_void_p()
        headers = strings(*texts[1:]), strings(*names[1:])
        code = self._library.nvrtcCreateProgram(
            ctypes.byref(program), texts[0], names[0], count, *headers
        )
        assert code == 0, f"nvrtcCreateProgram: {code}"
        option = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{architecture}".encode())
        code = self._library.nvrtcCompileProgram(program, 1, option)
        said = self._read("ProgramLog", program).rstrip(b"\0").decode()
        if code != 0:
            sys.exit(f"{sources}: sm_{architecture}: does not compile: {code}\n{said}")
        image = self._read("CUBIN", program)
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return image, said


def constant(headers: str, name: str) -> int:
    match = re.search(rf"\b{name} = (\d+),", headers)
    assert match, f"no {name} in the headers"
    return int(match.group(1))


def disassemble(nvdisasm: Path, image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        words = [nvdisasm, file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def instructions(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+[@A-Z]", line)]


@dataclass(frozen=True)
class Loop:
    """Of the machine code, what moves DEPTH times 16 bytes: what it takes for 16 of them."""

    instructions: float
    table_loads: float

    def __str__(self) -> str:
        return f"{self.instructions:g} instructions and {self.table_loads:g} table loads"


def loops(code: str) -> list[Loop]:
    """Those that move 16 bytes unchanged, the shortest first: of runs, then of rows."""
    lines, places, found = code.splitlines(), dict[str, int](), set[Loop]()
    for at, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            places[label.group(1)] = at
        jump = re.search(r"\bBRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", line)
        if not jump or jump.group(1) not in places:
            continue
        body = instructions(lines[places[jump.group(1)] : at + 1])
        loads = [line for line in body if re.search(r"\bLDG\.", line)]
        once = [line for line in loads if re.search(r"\.NA\..*\b128\b", line)]
        stores = [line for line in body if re.search(r"\bSTG\.E\.128\b", line)]
        if len(once) == len(stores) == DEPTH:
            tables = [line for line in loads if ".CONSTANT" in line and ".NA." not in line]
            found.add(Loop(len(body) / DEPTH, len(tables) / DEPTH))
    return sorted(found, key=lambda loop: loop.instructions)


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code."""

    name: str
    code: str
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))

    @property
    def stored(self) -> int:
        return KERNELS[self.name][1]

    @property
    def stores(self) -> int:
        return self.count(rf"\bSTG\.E\.(?:[A-Z0-9]+\.)*{self.stored}\b")

    @property
    def loads(self) -> int:
        return self.count(r"\bLDG\.E\.(?:[A-Z0-9]+\.)*128\b")

    def __str__(self) -> str:
        total = len(instructions(self.code.splitlines()))
        text = f"{self.name}: {self.registers} registers, {total} instructions, "
        text += f"16-byte loads {self.loads}, {self.stored // 8}-byte stores {self.stores}"
        if self.name == "wsync_copy":
            moves = zip(("runs", "rows", "other rows"), loops(self.code), strict=False)
            text += "; for 16 bytes of " + ", of ".join(f"{what} {loop}" for what, loop in moves)
        return text

    def complaints(self, headers: str) -> list[str]:
        prefix, wrong = KERNELS[self.name][0], list[str]()
        threads = constant(headers, f"{prefix}_BLOCK") * constant(
            headers, f"{prefix}_BLOCKS_PER_SM"
        )
        if self.registers > REGISTERS // threads:
            wrong.append(f"{self.registers} registers, more than {REGISTERS // threads}")
        if self.stack or self.count(r"\b(?:LDL|STL)\b"):
            wrong.append(f"spills: {self.stack} bytes of stack")
        if not self.loads:
            wrong.append("no 16-byte loads")
        if not self.stores:
            wrong.append(f"no {self.stored // 8}-byte stores")
        if generic := self.count(r"\b(?:LD|ST|ATOM)\.E\b"):
            wrong.append(f"generic accesses, {generic}: an address is not known to be global")
        if self.name == "wsync_copy":
            if self.count(r"\bMUFU\.RCP\b"):
                wrong.append("divides by floating point")
            if len(loops(self.code)) < 2 or loops(self.code)[1].table_loads:
                wrong.append("rows read the tables for every 16 bytes")
        return [f"{self.name}: {complaint}" for complaint in wrong]


def kernels(code: str) -> list[Kernel]:
    """Those of an image, by its disassembly."""
    words = re.split(r"(?m)^\s+\.section\s+\.text\.(\w+),.*$", code)
    found = dict(zip(words[1::2], words[2::2], strict=True))
    assert set(found) == set(KERNELS), f"kernels {sorted(found)}"

    def noted(what: str, name: str) -> int:
        """What the image notes for the driver."""
        value = rf"EIATTR_{what}\n(?:(?!EIATTR)[\s\S])*?index@\({name}\)\s+\S+\s+\.word\s+0x(\w+)"
        match = re.search(value, code)
        assert match, f"no {what} of {name}"
        return int(match.group(1), 16)

    return [
        Kernel(name, found[name], noted("REGCOUNT", name), noted("FRAME_SIZE", name))
        for name in KERNELS
    ]


def headers_of(sources: Path) -> str:
    return "".join((sources / "device" / file).read_text() for file in FILES)


def compile_as_wsync(program: Path, library: Path, folder: Path, architecture: int) -> bytes:
    """The first process compiles, the next one loads the same code from the disk."""
    images = [folder / f"{architecture}.{how}" for how in ("compiled", "cached")]
    for image in images:
        words = [program, library, folder / "cache", str(architecture), image]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not done.stdout.startswith(image.suffix[1:]):
            sys.exit(f"{image.name}: {done.stdout}{done.stderr}")
    if images[0].read_bytes() != images[1].read_bytes():
        sys.exit(f"sm_{architecture}: the cache gives other code than NVRTC")
    return images[0].read_bytes()


def planted(nvrtc: Nvrtc, nvdisasm: Path, sources: Path, folder: Path) -> list[str]:
    """Every plant must be found."""
    wrong = []
    for index, plants in enumerate(PLANTS):
        copy = folder / f"plant-{index}" / "device"
        copy.mkdir(parents=True)
        texts = {file: (sources / "device" / file).read_text() for file in FILES}
        for before, (after, _) in plants.items():
            places = sum(text.count(before) for text in texts.values())
            if places != 1:
                wrong.append(f"{before!r} is in {places} places")
            texts = {file: text.replace(before, after) for file, text in texts.items()}
        for file, text in texts.items():
            (copy / file).write_text(text)
        image, _ = nvrtc.compile(copy.parent, 90)
        headers = headers_of(copy.parent)
        found = kernels(disassemble(nvdisasm, image))
        said = [complaint for kernel in found for complaint in kernel.complaints(headers)]
        for after, expected in plants.values():
            missed = [words for words in expected if not any(words in line for line in said)]
            wrong += [f"planted {after!r}: no {words!r} in {said}" for words in missed]
    return wrong


def check(root: Path, cache: Path, program: Path) -> int:
    sources, wrong = root / "csrc", list[str]()
    library, nvdisasm = from_wheel(NVRTC, cache), from_wheel(NVDISASM, cache)
    headers = headers_of(sources)
    nvrtc = Nvrtc(library)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for architecture in ARCHITECTURES:
            image = compile_as_wsync(program, library, folder, architecture)
            for kernel in kernels(disassemble(nvdisasm, image)):
                print(f"sm_{architecture}: {kernel}")
                wrong += [f"sm_{architecture}: {text}" for text in kernel.complaints(headers)]
        same, said = nvrtc.compile(sources, ARCHITECTURES[-1])
        if same != image or said:
            wrong.append(f"the embedded source is another one, or has warnings: {said}")
        wrong += planted(nvrtc, nvdisasm, sources, folder)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    plants = sum(map(len, PLANTS))
    print(f"checked: {len(KERNELS) * len(ARCHITECTURES)} kernels and {plants} plants")
    return 1 if wrong else 0


def figures(cache: Path, folders: list[Path]) -> int:
    nvrtc, nvdisasm = Nvrtc(from_wheel(NVRTC, cache)), from_wheel(NVDISASM, cache)
    print("| architecture | registers, spills | runs | rows | other rows |")
    print("| --- | --- | --- | --- | --- |")
    for architecture in ARCHITECTURES:
        columns: list[list[str]] = [[] for _ in range(4)]
        for folder in folders:
            code = disassemble(nvdisasm, nvrtc.compile(folder, architecture)[0])
            kernel = kernels(code)[0]
            moves = loops(kernel.code)
            columns[0].append(f"{kernel.registers}, {kernel.stack}")
            for column, loop in zip(columns[1:], (moves[0], moves[1], moves[-1]), strict=True):
                column.append(f"{loop.instructions:g} ({loop.table_loads:g})")
        print(f"| sm_{architecture} | " + " | ".join("; ".join(c) for c in columns) + " |")
    return 0


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "figures":
        sys.exit(figures(Path(rest[0]), [Path(folder) for folder in rest[1:]]))
    sys.exit(check(Path(first), Path(rest[0]), Path(rest[1])))
