"""load_weights has tasks of pools do its work: it is learnt, and nothing stays patched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
from support.loads_in_time import Load, Module, delivered, in_time, patchable, plain
from support.two_weights import Pairs


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    before = patchable()
    yield
    assert patchable() == before
    assert in_time(lambda: delivered(plain)).reason == ""  # another one can learn


# --- tasks of pools -----------------------------------------------------------------------


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
    *(mapping, of_a_task, by_asyncio, by_callback, raising),
    of_a_pool_that_was_there,
]


@pytest.mark.parametrize("load", TASKS)
def test_tasks_that_end_are_learnt(load: Load) -> None:
    assert in_time(lambda: delivered(load)).reason == ""


# --- other pools ---------------------------------------------------------------


def by_thread_pool(module: Module, pairs: Pairs) -> None:
    with ThreadPool(2) as pool:
        for name, place in pool.imap(lambda index: (pairs[index][0], index), range(len(pairs))):
            module.load_one(name, pairs[place][1])


def test_other_pools_end() -> None:
    in_time(lambda: delivered(by_thread_pool))
