"""driver.py ROOT CACHE: wsync's table of the CUDA driver's functions is that of NVIDIA's headers.

Numbers, structures and the parameters of every function, in the version that is asked for, are
compared by the compiler (tests/c/cuda_abi.c) with the oldest release that wsync runs on and with a
new one.  The compiler must also find what is planted.  What is missing comes from PyPI and is kept
in CACHE.
"""

import sys
from pathlib import Path

import headers
import wheels

RELEASES = ("nvidia-cuda-runtime-cu12==12.0.146", "nvidia-cuda-runtime==13.5.37")
HEADER = "device/cuda_driver.h"
PLANTS = (
    ("STREAM_WORDS = 122", "STREAM_WORDS = 93", "WSYNC_CU_ATTRIBUTE_STREAM_WORDS is not"),
    ("WSYNC_CU_POINTER_MAPPED = 13", "WSYNC_CU_POINTER_MAPPED = 14", "POINTER_MAPPED is not"),
    ("WSYNC_CU_NOT_READY = 600", "WSYNC_CU_NOT_READY = 601", "WSYNC_CU_NOT_READY is not"),
    ("uint8_t flags[8]", "uint8_t flags[16]", "sizeof(wsync_cu_property_t) is not"),
    ("    int handle_types;\n    wsync_cu_location_t location;\n",
     "    wsync_cu_location_t location;\n    int handle_types;\n", "handle_types"),
    ("cuDeviceGetUuid, 11040", "cuDeviceGetUuid, 11030", "PFN_cuDeviceGetUuid_v11030"),
    ("cuMemcpyAsync, 4000", "cuMemcpyAsync, 3020", "PFN_cuMemcpyAsync_v3020"),
    ("cuMemcpyBatchAsync, 12080", "cuMemcpyBatchAsync, 13000", "cuMemcpyBatchAsync of 13000 has"),
    ("(wsync_cu_ptr_t at, unsigned char value, size_t nbytes,",
     "(wsync_cu_ptr_t at, unsigned value, size_t nbytes,", "cuMemsetD8Async of 3020 has other"),
    ("(int *blocks, wsync_cu_function_t function, int threads, size_t shared_nbytes)",
     "(int *blocks, wsync_cu_function_t function, int threads)", "has other parameters"),
)  # fmt: skip


def main() -> int:
    root, cache = map(Path, sys.argv[1:])
    source = root / "tests/c/cuda_abi.c"
    wrong = []
    for release in RELEASES:
        (include,) = wheels.install(release, cache).glob("nvidia/*/include")
        folders = [root / "csrc", include]
        if said := headers.compile(source, folders):
            wrong.append(f"{release}:\n{said}")
    wrong += headers.planted(source, folders, HEADER, PLANTS)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    always, later = (root / "csrc" / HEADER).read_text().split("#define WSYNC_CUDA_LATER_MAP(X)")
    count = len(RELEASES) * always.count("    X(") + later.count("    X(")
    print(f"checked: {count} functions of {len(RELEASES)} releases, and {len(PLANTS)} plants")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
