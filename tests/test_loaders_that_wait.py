"""load_weights that waits, for its own tasks and threads or for good, keeps no update from its end,
and nothing patched."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from support.loads_in_time import Load, Module, delivered, in_time, patchable, plain
from support.two_weights import Pairs, draw
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn import bounded_call, watched_pools
from wsync.engine.learn.recorded_loader import RecordedLoader


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    before = patchable()
    yield
    assert patchable() == before
    assert in_time(lambda: delivered(plain)).reason == ""  # another one can learn


# --- tasks that wait for what comes after them ------------------------------------------------


def prefetching(module: Module, pairs: Pairs) -> None:
    found: queue.Queue[Any] = queue.Queue(maxsize=1)

    def fill() -> None:
        for pair in pairs:
            found.put(pair)
        found.put(None)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill)
        while (pair := found.get()) is not None:
            module.load_one(*pair)


def looking_for_room(module: Module, pairs: Pairs) -> None:
    """As prefetching, by a task that wakes up now and then."""
    found: queue.Queue[Any] = queue.Queue(maxsize=1)

    def put(pair: Any) -> None:
        while True:
            try:
                return found.put(pair, timeout=0.02)
            except queue.Full:
                pass

    def fill() -> None:
        for pair in [*pairs, None]:
            put(pair)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill)
        while (pair := found.get()) is not None:
            module.load_one(*pair)


def consuming(module: Module, pairs: Pairs) -> None:
    given: queue.Queue[Any] = queue.Queue()

    def drain() -> None:
        while (pair := given.get()) is not None:
            module.load_one(*pair)

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        done = pool.submit(drain)
        for pair in pairs:
            given.put(pair)
        given.put(None)
        done.result()


def prefetching_by_asyncio(module: Module, pairs: Pairs) -> None:
    found: queue.Queue[Any] = queue.Queue(maxsize=1)

    def fill() -> None:
        for pair in [*pairs, None]:
            found.put(pair)

    async def load() -> None:
        filling = asyncio.create_task(asyncio.to_thread(fill))
        while (pair := await asyncio.to_thread(found.get)) is not None:
            module.load_one(*pair)
        await filling

    asyncio.run(load())


def waiting_for_the_next(module: Module, pairs: Pairs) -> None:
    """Two tasks of which the first needs the second."""
    ready = threading.Event()

    def first() -> None:
        ready.wait()
        plain(module, pairs[:1])

    with ThreadPoolExecutor(2) as pool:
        pool.submit(first)
        pool.submit(ready.set)
    plain(module, pairs[1:])


def reading_meanwhile(module: Module, pairs: Pairs) -> None:
    """What looks at values while a task waits ends no load: the task would wait on."""
    found: queue.Queue[Any] = queue.Queue(maxsize=1)

    def fill() -> None:
        for pair in [*pairs, None]:
            found.put(pair)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill)
        while (pair := found.get()) is not None:
            if pair[1].abs().max().item() >= 0:
                module.load_one(*pair)


WAITING = [
    *(prefetching, looking_for_room, consuming, prefetching_by_asyncio),
    *(waiting_for_the_next, reading_meanwhile),
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_pools, "_IDLE_POLLS", 4)
    monkeypatch.setattr(watched_pools, "_LONGEST", 3.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("load", WAITING)
def test_a_loader_whose_tasks_wait_for_what_comes_after_them_is_left_as_it_is(load: Load) -> None:
    loader = in_time(lambda: delivered(load))
    assert (
        "tasks that it gives to thread pools wait for others, or for what comes after"
        in loader.reason
    )


# --- tasks that do not -----------------------------------------------------------------------


def mapping(module: Module, pairs: Pairs) -> None:
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in pool.map(lambda pair: (pair[0], pair[1].clone()), pairs):
            module.load_one(name, tensor)


def of_a_task(module: Module, pairs: Pairs) -> None:
    def outer() -> None:
        for done in [pool.submit(module.load_one, *pair) for pair in pairs]:
            done.result()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(outer).result()


def by_asyncio(module: Module, pairs: Pairs) -> None:
    async def load() -> None:
        await asyncio.gather(*(asyncio.to_thread(module.load_one, *pair) for pair in pairs))

    asyncio.run(load())


def by_what_a_pool_begins_with(module: Module, pairs: Pairs) -> None:
    own = threading.local()

    def begin(prefix: str) -> None:
        own.prefix = prefix

    def load_one(name: str, tensor: torch.Tensor) -> None:
        getattr(module, own.prefix + name).data.copy_(tensor)

    with ThreadPoolExecutor(2, initializer=begin, initargs=("",)) as pool:
        for pair in pairs:
            pool.submit(load_one, *pair)


def by_callback(module: Module, pairs: Pairs) -> None:
    with ThreadPoolExecutor(1) as pool:
        for pair in pairs:
            done = pool.submit(lambda pair=pair: pair)
            done.add_done_callback(lambda done: module.load_one(*done.result()))


def raising(module: Module, pairs: Pairs) -> None:
    def refuse() -> None:
        raise KeyError("no such shard")

    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(refuse).exception(timeout=30), KeyError)
        pool.submit(plain, module, pairs)


def of_a_pool_that_was_there(module: Module, pairs: Pairs) -> None:
    for done in [POOL.submit(module.load_one, *pair) for pair in pairs]:
        done.result()


POOL = ThreadPoolExecutor(2)
TASKS = [
    *(mapping, of_a_task, by_asyncio, by_what_a_pool_begins_with, by_callback, raising),
    of_a_pool_that_was_there,
]


@pytest.mark.parametrize("load", TASKS)
def test_tasks_that_end_are_learnt(load: Load) -> None:
    assert in_time(lambda: delivered(load)).reason == ""


def test_values_that_a_group_of_tasks_looks_at_end_no_engine() -> None:
    def load_one(module: Module, name: str, tensor: torch.Tensor) -> None:
        if tensor.abs().max().item() >= 0:
            module.load_one(name, tensor)

    def load(module: Module, pairs: Pairs) -> None:
        async def load_all() -> None:
            async with asyncio.TaskGroup() as group:
                for pair in pairs:
                    group.create_task(asyncio.to_thread(load_one, module, *pair))

        asyncio.run(load_all())

    assert "values are looked at" in in_time(lambda: delivered(load)).reason


@pytest.mark.usefixtures("impatient")
def test_a_task_that_works_for_long_is_waited_for() -> None:
    def load(module: Module, pairs: Pairs) -> None:
        def slowly() -> None:
            end = time.thread_time() + 0.5
            while time.thread_time() < end:
                pass
            plain(module, pairs)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(slowly)

    assert in_time(lambda: delivered(load)).reason == ""


# --- other threads and processes ---------------------------------------------------------------


def by_thread_pool(module: Module, pairs: Pairs) -> None:
    with ThreadPool(2) as pool:
        for name, place in pool.imap(lambda index: (pairs[index][0], index), range(len(pairs))):
            module.load_one(name, pairs[place][1])


def by_forked_pool(module: Module, pairs: Pairs) -> None:
    GIVEN[:] = pairs
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            names = pool.map(_name_of, range(len(pairs)))
    finally:
        GIVEN.clear()
    for name, (_, tensor) in zip(names, pairs, strict=True):
        module.load_one(name, tensor)


GIVEN: Pairs = []


def _name_of(index: int) -> str:
    """Looks in the other process at values, which no recording ends there."""
    return GIVEN[index][0] if GIVEN[index][1].clone().max().item() else ""


@pytest.mark.parametrize("load", [by_thread_pool, by_forked_pool])
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_other_pools_end(load: Load) -> None:
    in_time(lambda: delivered(load))


# --- loads that do not end ---------------------------------------------------------------------


def waits_for_good(module: Module, pairs: Pairs, released: threading.Event) -> None:
    released.wait()


def joins_what_waits(module: Module, pairs: Pairs, released: threading.Event) -> None:
    thread = threading.Thread(target=released.wait)
    thread.start()
    try:
        pairs[0][1].tolist()
        released.set()
    finally:
        thread.join()


@pytest.mark.parametrize("load", [waits_for_good, joins_what_waits])
def test_an_update_ends_where_load_weights_does_not(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_call, "_GRACE", 0.2)  # the more for the answer
    released = threading.Event()
    loader = RecordedLoader(Module(lambda module, pairs: load(module, pairs, released)))
    options = wsync.Options(deadline=8, progress=False)

    def update() -> None:
        with wsync.connect(draw(0), [ThreadEngine([loader])], options=options) as sync:
            for _ in range(2):
                with pytest.raises(
                    wsync.WsyncError, match=r"has not ended .* make the engine anew"
                ):
                    sync.update(draw(1))

    try:
        in_time(update)
    finally:
        released.set()
    assert "has not ended" in loader.reason
