"""`wsync doctor`: what wsync can use on this machine, and for the rest why not.

Every probe is independent: one that fails says so in its own row and stops nothing.
"""

import argparse
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wsync.machine.shared_libraries import bundled

_PEERCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True)
class Finding:
    """One row: what was looked for, whether it can be used, and the version or the reason."""

    name: str
    found: bool
    detail: str


def _core() -> tuple[bool, str]:
    from wsync import _core as core

    return True, f"{core.__version__} ({core.__file__})"


def _torch() -> tuple[bool, str]:
    import torch

    cuda = getattr(torch.version, "cuda", None)
    return True, f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU build'})"


def _dlpack() -> tuple[bool, str]:
    import torch

    capsule: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return False, f"torch {torch.__version__} has no C exchange API; data_ptr is used"
    name = repr(capsule).split('"')[1] if '"' in repr(capsule) else repr(capsule)
    return True, f"torch.Tensor hands out {name}"


def _memfd() -> tuple[bool, str]:
    """A sealed memfd must still map writable and refuse to change its size."""
    fd = os.memfd_create("wsync-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with mmap.mmap(fd, mmap.PAGESIZE) as pages:
            pages[0] = 1
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return True, "sealed memory maps writable and refuses to shrink"
        return False, "the kernel let a sealed memfd shrink"
    finally:
        os.close(fd)


def _sockets() -> tuple[bool, str]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        raw = left.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(raw)
    if uid != os.getuid():
        return False, f"SO_PEERCRED reports uid {uid} for a peer with uid {os.getuid()}"
    return True, f"peer credentials are reported (uid {uid})"


def _open_library(names: Sequence[str], pattern: str) -> tuple[ctypes.CDLL, str]:
    """Opens the first library that loads: by soname, else one that a pip package brings (see
    wsync.machine.shared_libraries).  Raises OSError with the loader's own words."""
    reasons = []
    for name in [*names, *bundled(pattern)]:
        try:
            return ctypes.CDLL(name), name
        except OSError as error:
            reasons.append(str(error))
    raise OSError(reasons[0] if reasons else "no such library")


def _driver() -> tuple[bool, str]:
    """The driver as the extension itself finds and refuses it."""
    from wsync import _core as core

    version, devices = core.cuda_devices()
    names = [
        f"{name} ({uuid}, sm_{major}{minor}, {nbytes / 2**30:.0f} GiB)"
        for uuid, name, nbytes, (major, minor) in devices
    ]
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return True, f"{cuda}, {len(devices)} devices: {', '.join(names)}"


def _nvrtc() -> tuple[bool, str]:
    library, name = _open_library(
        ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"], "*/lib/libnvrtc.so.*"
    )
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return True, f"{major.value}.{minor.value} ({name})"


def _nccl() -> tuple[bool, str]:
    library, name = _open_library(["libnccl.so.2"], "nccl/lib/libnccl.so.*")
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    major, rest = divmod(version.value, 10000)
    return True, f"{major}.{rest // 100}.{rest % 100} ({name})"


def importable(module: str) -> bool:
    """Whether `module` is installed; a bare folder, as `pip uninstall` may leave, is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent
        return False
    return spec is not None and spec.origin is not None


def _package(module: str, distribution: str) -> Callable[[], tuple[bool, str]]:
    """Looks a package up without importing it: some take seconds, and some want a GPU."""

    def probe() -> tuple[bool, str]:
        if not importable(module):
            return False, "not installed"
        try:
            return True, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return True, "version unknown: importable, but no package metadata"

    return probe


_PROBES: tuple[tuple[str, Callable[[], tuple[bool, str]]], ...] = (
    ("wsync core", _core),
    ("memfd and seals", _memfd),
    ("unix sockets", _sockets),
    ("torch", _torch),
    ("DLPack exchange API", _dlpack),
    ("GPU driver", _driver),
    ("NVRTC", _nvrtc),
    ("NCCL", _nccl),
    ("transformers", _package("transformers", "transformers")),
    ("megatron-core", _package("megatron.core", "megatron-core")),
    ("mbridge", _package("mbridge", "mbridge")),
    ("fastapi", _package("fastapi", "fastapi")),
    ("uvicorn", _package("uvicorn", "uvicorn")),
    ("ray", _package("ray", "ray")),
    ("SGLang", _package("sglang", "sglang")),
    ("vLLM", _package("vllm", "vllm")),
)


def examine() -> list[Finding]:
    """Runs every probe; an exception is that probe's reason."""
    findings = []
    for name, probe in _PROBES:
        try:
            found, detail = probe()
        except Exception as error:  # whatever a broken installation raises belongs in its row
            text = " ".join(str(error).split())
            found, detail = False, text or type(error).__name__
        findings.append(Finding(name, found, detail))
    return findings


def table(findings: Sequence[Finding]) -> str:
    """The findings as aligned lines."""
    width = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{finding.name:<{width}}  {'found  ' if finding.found else 'missing'}  {finding.detail}"
        for finding in findings
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings; the exit status is 0 whatever was found."""
    parser = argparse.ArgumentParser(prog="wsync doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    findings = examine()
    if options.json:
        report: dict[str, Any] = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"Python {platform.python_version()} on {platform.platform()}\n")
    print(table(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
