"""What every test shares.

The tests are about the installed package.  Child processes run with PYTHONSAFEPATH, so that a
`python -m ...` started in the repository root does not find the source folder either.
"""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PYTHONSAFEPATH"] = "1"

import pytest
from support.nursery import Nursery

import wsync

if TYPE_CHECKING:
    from support.procs import Ranks
    from support.sglang_server import Nursery as Servers
    from support.tensor_parallel_engine import TensorParallelEngine
    from support.vllm_server import Nursery as Vllm

_ROOT = Path(__file__).resolve().parent.parent
MISUSE = "WSYNC_FAKE_CUDA_MISUSE"
_frozen = [0]  # the number of modules at the last time


with contextlib.suppress(ImportError):  # not every environment of the tests has it
    from hypothesis import settings

    # How long an example takes says what else the machine does.
    settings.register_profile("unhurried", settings(), deadline=None)
    settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fakecuda",
        action="store_true",
        help="rings and streams of updates are on a GPU, which tests/fakecuda plays",
    )


def pytest_configure(config: pytest.Config) -> None:
    origin = Path(wsync.__file__).resolve()
    if origin.is_relative_to(_ROOT / "wsync"):
        raise pytest.UsageError(
            f"wsync was imported from its source folder ({origin}), but the tests are about the "
            "installed package: `pip install '.[test]'`, then run `pytest` or `python -P -m pytest`"
        )
    folder = tempfile.TemporaryDirectory(prefix="wsync-fakecuda-")
    config.add_cleanup(folder.cleanup)
    os.environ[MISUSE] = os.path.join(folder.name, "misuse")
    if config.getoption("--fakecuda"):
        from support.fakecuda import coherent

        os.environ.update(coherent())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        nursery = Nursery()
        nursery.install()
        config.add_cleanup(nursery.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Freezes what was imported since the last time (see support.preloaded): tests collect
    garbage and fork this process."""
    yield
    if len(sys.modules) > _frozen[0] + 50:
        gc.collect()
        gc.freeze()
        _frozen[0] = len(sys.modules)


def _device_count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more CUDA devices than there are, with the numbers."""
    needs = {"gpu": 1, "multigpu": 2}
    wanted = [
        (item, need)
        for item in items
        for mark, need in needs.items()
        if item.get_closest_marker(mark)
    ]
    if not wanted or os.environ.get("WSYNC_GPU_DRY_RUN") == "1":
        return
    count = _device_count()
    for item, need in wanted:
        if count < need:
            reason = f"needs {need} CUDA device(s), this machine has {count}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test of servers that fails shows what these have written."""
    report = yield
    if report.failed and item.get_closest_marker("servers"):
        from support.servers import logs

        report.sections += logs()
    return report


@pytest.fixture(autouse=True)
def no_misuse_of_the_gpu() -> Iterator[None]:
    """Nothing was taken away from under a stream of the played GPU, and the like, by any process
    (tests/fakecuda/fakecuda.h)."""
    yield
    path = Path(os.environ[MISUSE])
    if path.exists():
        found = path.read_text(encoding="ascii").splitlines()
        os.truncate(path, 0)
        assert found == []


# What whole updates need.  Imports wait until a test asks: many tests need no torch.


@pytest.fixture(scope="module")
def config() -> Any:
    from support import tiny_qwen3

    return tiny_qwen3.dense()


@pytest.fixture(scope="module")
def engine(config: Any) -> Iterator["TensorParallelEngine"]:
    """One engine for many tests: each connects to it anew."""
    from support.tensor_parallel_engine import TensorParallelEngine

    with TensorParallelEngine(config, tp=2) as running:
        yield running


@pytest.fixture(scope="module")
def server(config: Any) -> Iterator[str]:
    from wsync.demo.engines.serve import serve_in_process

    with serve_in_process(config) as running:
        yield running.url


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """torch.distributed in this process.

    Nothing of it is left.  DTensor's caches, and meshes in cycles, keep a group.  In a process that
    is forked later, the end of that group joins threads which only this process has, and crashes.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()


@pytest.fixture(scope="module")
def ranks() -> Iterator["Ranks"]:
    """Four processes, one after another of whose tasks are trainers."""
    from support.procs import Ranks

    with Ranks(4, path=sys.path) as started:
        yield started


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Servers"]:
    """What starts SGLang's server."""
    from support import sglang_server
    from support.servers import packages

    folder = packages(sglang_server.NEWEST)
    started = sglang_server.Nursery(folder, tmp_path_factory.mktemp("servers") / "log")
    yield started
    started.close()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Vllm"]:
    """What starts vLLM."""
    from support import vllm_server
    from support.servers import packages

    folder = packages(vllm_server.NEWEST)
    started = vllm_server.Nursery(folder, tmp_path_factory.mktemp("vllm") / "log")
    yield started
    started.close()
