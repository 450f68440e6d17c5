"""What else a process does while load_weights is learnt, in other threads and in processes that are
forked then, and what goes on afterwards."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from support.loads_in_time import PATIENCE, Module, delivered, in_time, patchable, plain
from support.two_weights import Pairs
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from wsync._core import LayoutBuilder
from wsync.engine.learn.recorded_loader import RecordedLoader

# --- processes that are forked meanwhile ----------------------------------------------------------


def patched_or_not_learning(before: list[Any]) -> str:
    if patchable() != before:
        return "it is patched"
    return in_time(lambda: delivered(plain)).reason  # type: ignore[no-any-return]


@pytest.mark.parametrize("within", [False, True], ids=["from another thread", "by load_weights"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_another_thread_learns_can_learn(within: bool) -> None:
    before, texts = patchable(), multiprocessing.get_context("fork").Queue()
    learning, forked = threading.Event(), threading.Event()
    found: list[str] = []

    def fork() -> None:
        child = multiprocessing.get_context("fork").Process(
            target=lambda: texts.put(patched_or_not_learning(before)), daemon=True
        )
        child.start()
        try:
            found.append(texts.get(timeout=PATIENCE))
        finally:
            child.kill()
            child.join()

    def load(module: Module, pairs: Pairs) -> None:
        if within and not learning.is_set():
            learning.set()
            fork()
        learning.set()
        assert forked.wait(PATIENCE)
        plain(module, pairs)

    if within:
        forked.set()
        in_time(lambda: delivered(load))
        assert found == [""]
        return
    update = threading.Thread(target=delivered, args=(load,), daemon=True)
    update.start()
    try:
        assert learning.wait(PATIENCE)
        fork()
    finally:
        forked.set()
        update.join(PATIENCE)
    assert not update.is_alive() and found == [""]


# --- other threads meanwhile and afterwards -----------------------------------------------------


def test_threads_that_a_load_has_started_leave_no_flags_of_torch_behind() -> None:
    released, threads = threading.Event(), list[threading.Thread]()

    def load(module: Module, pairs: Pairs) -> None:
        threads.append(threading.Thread(target=released.wait))
        threads[-1].start()
        plain(module, pairs)

    try:
        assert in_time(lambda: delivered(load)).reason == ""
    finally:
        released.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not is_in_torch_dispatch_mode()


def test_another_model_can_be_compiled_as_one_graph_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    compiled = torch.compile(torch.nn.Linear(4, 4), fullgraph=True, backend="eager")
    learning, called = threading.Event(), threading.Event()

    def load(module: Module, pairs: Pairs) -> None:
        learning.set()
        assert called.wait(PATIENCE)
        plain(module, pairs)

    update = threading.Thread(target=delivered, args=(load,), daemon=True)
    update.start()
    try:
        assert learning.wait(PATIENCE)
        assert compiled(torch.ones(2, 4)).shape == (2, 4)
    finally:
        called.set()
        update.join(PATIENCE)
        torch.compiler.reset()
    assert not update.is_alive()


def test_a_task_that_goes_on_when_all_is_loaded_does_its_own_work() -> None:
    released, modules, works = threading.Event(), list[Module](), list[Any]()

    def work() -> None:
        released.wait()
        modules[0].a.data.fill_(7)

    def load(module: Module, pairs: Pairs) -> None:
        modules.append(module)
        if not works:
            works.append(pool.submit(work))
        plain(module, pairs)

    with ThreadPoolExecutor(1) as pool:
        try:
            in_time(lambda: delivered(load))
        finally:
            released.set()
        works[0].result(timeout=PATIENCE)
    assert modules[0].a.eq(7).all()


# --- what load_weights finds --------------------------------------------------------------------


def test_load_weights_and_its_tasks_are_tried_with_what_is_set_for_the_thread_that_learns() -> None:
    word: ContextVar[str] = ContextVar("word", default="none")
    found = set[Any]()

    def note() -> None:
        place = torch.empty(1).device.type
        found.add((word.get(), place, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def load(module: Module, pairs: Pairs) -> None:
        note()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(note)
        plain(module, pairs)

    def learn() -> str:
        builder = LayoutBuilder()
        for name in "ab":
            builder.add_tensor(name, "float32", (8, 8))
        loader = RecordedLoader(Module(load))
        word.set("set")
        with torch.inference_mode(), torch.device("meta"):
            loader.learn(builder.build())
        return loader.reason

    assert in_time(learn) == ""
    assert found == {("set", "meta", False, True)}
