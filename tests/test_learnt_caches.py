"""Large tensors of a module that are no weights: learning copies none of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.two_weights import Pairs, TwoWeights, draw
from support.workers import ThreadEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.machine import device

OPTIONS = wsync.Options(deadline=60, progress=False)
NBYTES = 17 << 20
Load = Callable[[Any, Pairs], None]


class Module(TwoWeights):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self.cache = torch.full((NBYTES // 4,), 3.0)
        self.served = False
        self._load = load

    def load_weights(self, pairs: Pairs) -> None:
        self._load(self, pairs)


def copy(module: Module, pairs: Pairs) -> None:
    for name, tensor in pairs:
        getattr(module, name).data.copy_(tensor)


def reset(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    if module.served:
        module.served = False


def double(module: Module, pairs: Pairs) -> None:
    reset(module, [(name, tensor * 2 if name == "b" else tensor) for name, tensor in pairs])


def make_once(module: Module, pairs: Pairs) -> None:
    if not hasattr(module, "made"):
        module.made = torch.zeros(8)
    reset(module, pairs)


def go_by_values(module: Module, pairs: Pairs) -> None:
    reset(module, [(name, tensor) for name, tensor in pairs if tensor.abs().max() < 1e9])


def count(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    module.cache[:2] += len(pairs)


def note_largest(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    for name, tensor in pairs:
        if name == "b":
            module.cache[0] = tensor.abs().max()


def raise_largest(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    for _, tensor in pairs:
        largest = module.cache[0]
        torch.maximum(largest, tensor.abs().max(), out=largest)


def clear_what_was_served(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    if module.served:
        module.cache += 1
        module.served = False


def write_unseen(module: Module, pairs: Pairs) -> None:
    copy(module, pairs)
    ctypes.c_uint8.from_address(module.cache.data_ptr() + 5).value += len(pairs)


def write_again_seen(module: Module, pairs: Pairs) -> None:
    write_unseen(module, pairs)
    module.cache[0] += 1


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that an operator has made a tensor of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _storages((args, kwargs)), _storages(result)
        self.most = max(self.most, *(made[start] for start in made.keys() - given.keys()), 0)
        return result


def _storages(values: Any) -> dict[int, int]:
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in found if not tensor.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class Watched(RecordedLoader):
    """One that tells what is allocated while it learns, and in `begin`."""

    def learn(self, *arguments: Any) -> bytes:
        with Allocations() as self.learning:
            return super().learn(*arguments)

    def begin(self, rounds: int) -> None:
        with Allocations() as self.beginning:
            super().begin(rounds)


@pytest.mark.parametrize(
    ("load", "learnt"),
    [(reset, True), (double, True), (make_once, True), (go_by_values, False)],
)
def test_learning_copies_no_cache(load: Load, learnt: bool) -> None:
    module = Module(load)
    loader = Watched(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        assert 0 < loader.learning.most < NBYTES
        module.served = True  # it is tried once more
        sync.update(draw(2))
        assert 0 < loader.beginning.most < NBYTES
    assert (loader.reason == "") == learnt
    assert module.a.equal(draw(2)["a"]) and module.cache.eq(3).all()


@pytest.mark.parametrize(
    ("load", "learnt"), [(count, False), (note_largest, True), (raise_largest, False)]
)
def test_of_made_up_values_nothing_stays_in_a_cache(load: Load, learnt: bool) -> None:
    module, other = Module(load), Module(load)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            other.load_weights(list(draw(seed).items()))
            assert module.cache.equal(other.cache)
            assert module.b.equal(other.b)
    assert (loader.reason == "") == learnt


def test_a_cache_is_put_back_that_is_written_to_in_another_state() -> None:
    module = Module(clear_what_was_served)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
        module.served = True
        with pytest.raises(wsync.WsyncError, match="served"):
            sync.update(draw(2))
        assert module.cache.eq(3).all()


@pytest.mark.parametrize("load", [reset, double, make_once, go_by_values])
def test_a_cache_is_not_read_that_has_no_memory(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine that has woken its weights alone.  Reading it ends this process."""
    module = Module(load)
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    module.cache = torch.frombuffer(memory, dtype=torch.float32)
    start = module.cache.data_ptr()
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(NBYTES), 0) == 0
    monkeypatch.setattr(device, "has_memory", lambda tensor: tensor.data_ptr() != start)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(draw(seed))
            assert module.a.equal(draw(seed)["a"])
            module.served = True  # it is tried once more


def test_weights_that_have_no_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(reset)
    gone = module.b.data_ptr()
    monkeypatch.setattr(device, "has_memory", lambda tensor: tensor.data_ptr() != gone)
    engine = ThreadEngine([RecordedLoader(module)])
    with wsync.connect(draw(0), engines=[engine], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError, match="b: no memory of a GPU lies there, as while"):
            sync.update(draw(1))
        monkeypatch.undo()
        sync.update(draw(2))
    assert module.b.equal(draw(2)["b"])


def at_odd_bytes(_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(NBYTES + 1, dtype=torch.uint8)[1:]


def in_blocks(_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(17 << 10, 2, 256)[:, 1]


def in_blocks_of_another_order(_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(256, 17 << 10).T


@pytest.mark.parametrize(
    ("load", "make"),
    [
        (write_unseen, torch.Tensor.clone),
        (write_unseen, at_odd_bytes),
        (write_unseen, in_blocks),
        (write_unseen, in_blocks_of_another_order),
        (write_again_seen, torch.Tensor.clone),
    ],
)
def test_nothing_is_loaded_where_a_cache_is_written_to_unseen(
    load: Load, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    module = Module(load)
    module.cache = make(module.cache)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for _ in range(2):
            with pytest.raises(wsync.WsyncError, match="cache: of Module, was written to by means"):
                sync.update(draw(1))
    with pytest.raises(wsync.LayoutError, match="cache: of Module"):
        loader.begin(1)


def test_a_large_buffer_may_be_written_to_unseen() -> None:
    module = Module(write_unseen)
    cache = module.cache
    del module.cache
    module.register_buffer("cache", cache)
    loader = RecordedLoader(module)
    with wsync.connect(draw(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        sync.update(draw(1))
    assert "cache: written by means that cannot be seen" in loader.reason
    assert module.b.equal(draw(1)["b"])
