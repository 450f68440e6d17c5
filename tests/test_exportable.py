"""Memory of a GPU that `wsync.exportable` has torch take, on a stand-in for the driver and a played
torch (support/played_pool.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fakecuda import fake_environment, fake_nvrtc
from support.peer import Peer

PRELUDE = """
import ctypes, gc, logging, os, threading
import torch, wsync
from support.played_gpu import reach
from support.played_pool import PlayedTorch
from wsync import _core

said = []
class Said(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("wsync").addHandler(Said())

library = ctypes.CDLL(os.environ["WSYNC_CUDA_LIB"])
def census():
    counts = (ctypes.c_long * 6)()  # fakecuda_census_t
    library.fakecuda_census(counts)
    return counts[0], counts[1], counts[2]  # physical, reserved, mapped

def physical():
    "Descriptors that the driver keeps for memory of this process."
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{fd}")}
    return [int(fd) for fd, link in links.items() if link.startswith("/memfd:fakecuda-physical")]

def wsync_exportable_free(address, nbytes):
    module = ctypes.CDLL(_core.__file__)
    module.wsync_exportable_free(*map(ctypes.c_void_p, (address, nbytes)), 0, None)

def played(**settings): return PlayedTorch(**settings).installed()
def raised(function, *arguments):
    try: function(*arguments)
    except Exception as error: return type(error).__name__, getattr(error, "__notes__", [])
"""
GRANULE = 2 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[Peer]:
    with Peer(fake_environment(WSYNC_FAKE_CUDA_MEMORY=str(3 * GRANULE))) as peer:
        peer(PRELUDE)
        yield peer


@pytest.fixture
def trainer(process: Peer) -> Iterator[Peer]:
    process("said.clear()")
    yield process
    assert process("census()") == (0, 0, 0)


def test_memory_made_in_the_block_is_mapped_by_another_process(trainer: Peer) -> None:
    pid, fds = trainer(
        "with played() as gpu:\n"
        "    with wsync.exportable():\n"
        f"        address, pool = gpu.empty({GRANULE})\n"
        "    assert gpu.empty(1) is None\n"
        "ctypes.memmove(reach(address), b'weights', 7)\n"
        "os.getpid(), physical()"
    )
    with Peer(fake_environment(WSYNC_NVRTC_LIB=fake_nvrtc())) as engine:
        found = engine(
            "import ctypes, os\n"
            "from support.played_gpu import reach\n"
            "from wsync import _core\n"
            "from wsync.machine import device\n"
            f"fd = os.open(f'/proc/{pid}/fd/{fds[0]}', os.O_RDWR)\n"
            f"memory = _core.Memory.from_fd(fd, {GRANULE}, device.find(device.uuid(0)))\n"
            "ctypes.string_at(reach(memory.address), 7)"
        )
    assert found == b"weights"
    assert trainer(f"pool.free(address, {GRANULE}, 0, None); said") == []


def test_what_is_free_when_the_block_ends_goes_back(trainer: Peer) -> None:
    counts = trainer(
        "with played() as gpu:\n"
        "    with wsync.exportable():\n"
        "        kept, _ = gpu.empty(100)\n"
        "        temporary, pool = gpu.empty(100)\n"
        "        pool.cached[temporary] = 100\n"
        "        del pool, _\n"
        "        during = census()\n"
        "    gc.collect()\n"
        "after = census()\n"
        "wsync_exportable_free(kept, 100)\n"
        "during, after"
    )
    assert counts == ((2, 2, 2), (1, 1, 1))


def test_a_gpu_that_is_first_used_in_the_block_is_named(trainer: Peer) -> None:
    made, said = trainer(
        "with played(initialized=False) as gpu:\n"
        "    with wsync.exportable(): made = gpu.empty(1)\n"
        "made, said"
    )
    assert made is None
    assert len(said) == 1 and "call torch.cuda.set_device first" in said[0]
