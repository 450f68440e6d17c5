"""The NVIDIA driver as wsync finds it: `wsync doctor` says what is there, or in words why not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import doctor

# A driver of one GPU.  Whatever is not said here is an entry point that nobody calls.
LIBCUDA = """
#include <string.h>
#ifdef OTHER
int someOtherLibrary(void) { return 0; }
#else
int cuInit(unsigned flags) { (void)flags; return RESULT; }
static int words(int code, const char **text) { *text = "in its words"; return 0 * code; }
static int version(int *out) { *out = VERSION; return 0; }
static int count(int *out) { *out = COUNT; return 0; }
static int get(int *device, int index) { *device = index; return 0; }
static int name(char *out, int length, int device)
{
    return !strncpy(out, "Tester", (unsigned)length) + 0 * device;
}
static int uuid(unsigned char *out, int device)
{
    for (int i = 0; i < 16; i++) out[i] = (unsigned char)(17 * i);
    return 0 * device;
}
static int total(unsigned long *out, int device) { *out = 3ul << 30; return 0 * device; }
static int attribute(int *out, int which, int device)
{
    *out = which == 75 ? 9 : 0;
    return 0 * device;
}
static int nobody(void) { return 999; }
#define IS(symbol, function) if (!strcmp(name_, symbol)) *out = (void *)function
#ifndef OLD
int cuGetProcAddress_v2(const char *name_, void **out, int v, unsigned long f, int *status)
{
    if (STUB) return 34;
    *out = (void *)nobody;
    IS("cuInit", cuInit);
    IS("cuGetErrorString", words);
    IS("cuDriverGetVersion", version);
    IS("cuDeviceGetCount", count);
    IS("cuDeviceGet", get);
    IS("cuDeviceGetName", name);
    IS("cuDeviceGetUuid", uuid);
    IS("cuDeviceTotalMem", total);
    IS("cuDeviceGetAttribute", attribute);
    IS(MISSING, NULL);
    *status = *out == NULL;
    return *out == NULL ? 500 : 0 * (v + (int)f);
}
#endif
#endif
"""
DEFAULTS = {"RESULT": "0", "VERSION": "12080", "COUNT": "1", "STUB": "0", "MISSING": '""'}


def finding(library: str, **environment: str) -> tuple[bool, str]:
    return doctor.finding("GPU driver", WSYNC_CUDA_LIB=library, **environment)


def build(folder: Path, **macros: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in libcuda.so.1 with")
    source, target = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(LIBCUDA)
    options = [f"-D{name}={value}" for name, value in {**DEFAULTS, **macros}.items()]
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *options, "-o", target, source], check=True)
    return str(target)


def test_a_machine_without_the_library_is_told_so() -> None:
    found, detail = finding("/nowhere/libcuda.so.1")
    assert not found
    assert detail.startswith("no NVIDIA driver: /nowhere/libcuda.so.1: cannot open shared object")


@pytest.mark.parametrize(
    ("macros", "words"),
    [
        ({"OTHER": "1"}, "another library: it has no cuInit"),
        ({"OLD": "1"}, "older than CUDA 12.0: it has no cuGetProcAddress_v2"),
        ({"STUB": "1"}, "(34): this is the toolkit's stub library"),
        ({"VERSION": "11080"}, "the driver speaks CUDA 11.8, wsync needs 12.0 or later"),
        (
            {"MISSING": '"cuMemCreate"'},
            "the driver (CUDA 12.8) has no cuMemCreate, which CUDA 10.2 has",
        ),
        ({"RESULT": "34"}, "cuInit: in its words (34): this is the toolkit's stub library"),
        ({"RESULT": "100"}, "cuInit: in its words (100): no GPU is visible"),
        ({"RESULT": "3"}, "cuInit: in its words (3): this process was forked after CUDA was"),
        ({"RESULT": "999"}, "cuInit: in its words (999): the kernel's driver does not answer"),
        ({"COUNT": "0"}, "cuDeviceGetCount: in its words (100): no GPU is visible"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_driver_that_cannot_be_used_says_why(
    tmp_path: Path, macros: dict[str, str], words: str
) -> None:
    found, detail = finding(build(tmp_path, **macros))
    assert not found
    assert detail.startswith("no ")
    assert words in detail


def test_gpus_are_named_by_their_uuids(tmp_path: Path) -> None:
    row = "Tester (GPU-00112233-4455-6677-8899-aabbccddeeff, sm_90, 3 GiB)"
    assert finding(build(tmp_path, COUNT="2")) == (True, f"CUDA 12.8, 2 devices: {row}, {row}")


def test_the_system_s_library_is_the_default(tmp_path: Path) -> None:
    build(tmp_path)
    found, detail = finding("", LD_LIBRARY_PATH=str(tmp_path))
    assert found, detail
    assert "1 devices: Tester" in detail


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    code = (
        "import wsync, wsync._core as core\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
        "try: core.cuda_devices()\n"
        "except wsync.UnsupportedError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "WSYNC_CUDA_LIB": "/nowhere/libcuda.so.1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no NVIDIA driver: ")


def test_a_fork_of_a_process_that_uses_the_gpu_is_refused(tmp_path: Path) -> None:
    code = """
import os, wsync._core as core
assert core.cuda_devices()[0] == 12080
child = os.fork()
if child == 0:
    try:
        core.cuda_devices()
    except core.StateError as error:
        os._exit(0 if "start processes that use the GPU with spawn" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert core.cuda_devices()[0] == 12080
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "WSYNC_CUDA_LIB": build(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
