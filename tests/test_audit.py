"""An audit notices that a load does something else than what was learnt, whatever it goes by."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from wsync.probing.audit import Audit, AuditError
from wsync.probing.learn import learn
from wsync.probing.numbering import Source

LAYERS = 5
FLAG = False


class Locked:
    """An object that can be neither copied nor compared."""

    def __init__(self) -> None:
        self.lock, self.swapped = threading.Lock(), False

    def read(self) -> bool:
        with self.lock:
            return self.swapped


class Loading(torch.nn.Module):
    """Two halves of a weight in each layer, which a load swaps where it says so."""

    mode = False  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.rand(4, 6) for _ in range(LAYERS))
        self.says: Callable[[], bool] = lambda: False
        self.register_buffer("map", torch.zeros(1, dtype=torch.int64))

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            _, layer, half = name.split(".")
            place = (half == "b") != self.says()
            self.layers[int(layer)].data[2 * place : 2 * place + 2].copy_(tensor)


def by_a_global(module: Loading) -> Callable[[], object]:
    module.says = lambda: FLAG
    return lambda: globals().update(FLAG=True)


def by_a_class_attribute(module: Loading) -> Callable[[], object]:
    module.says = lambda: Loading.mode
    return lambda: setattr(Loading, "mode", True)


def by_an_object_with_a_lock(module: Loading) -> Callable[[], object]:
    locked = Locked()
    module.says = locked.read
    return lambda: setattr(locked, "swapped", True)


def by_a_cache_of_functools(module: Loading) -> Callable[[], object]:
    seen = [False]

    @functools.cache
    def cached() -> bool:
        return seen[0]

    module.says = cached

    def change() -> None:
        seen[0] = True
        cached.cache_clear()

    return change


def by_a_buffers_value(module: Loading) -> Callable[[], object]:
    module.says = lambda: bool(module.map.item())
    return lambda: module.map.fill_(1)


def by_a_closure(module: Loading) -> Callable[[], object]:
    swapped = False

    def says() -> bool:
        return swapped

    def change() -> None:
        nonlocal swapped
        swapped = True

    module.says = says
    return change


def by_another_load_weights(module: Loading) -> Callable[[], object]:
    return lambda: setattr(module, "says", lambda: True)


WAYS = [
    by_a_global,
    by_a_class_attribute,
    by_an_object_with_a_lock,
    by_a_cache_of_functools,
    by_a_buffers_value,
    by_a_closure,
    by_another_load_weights,
]


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    yield
    globals().update(FLAG=False)
    Loading.mode = False


def audited(module: Loading, nbytes: int = 1 << 20) -> tuple[Audit, list[torch.Tensor]]:
    sources = [
        Source(f"layers.{layer}.{half}", torch.float32, (2, 6))
        for layer in range(LAYERS)
        for half in "ab"
    ]
    targets = [parameter.data for parameter in module.parameters()]
    made = [{s.name: torch.rand(s.shape) for s in sources} for _ in range(2)]
    values = (lambda source: made[0][source.name], lambda source: made[1][source.name])
    found = learn(module.load_weights, targets, sources, {}, values)
    assert len(found.pieces) == len(sources)
    module.load_weights([(source.name, torch.rand(source.shape)) for source in sources])
    return Audit(module.load_weights, found, sources, nbytes), targets


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_change_is_noticed_and_undone(way: Callable[[Loading], Callable[[], object]]) -> None:
    module = Loading()
    change = way(module)
    audit, targets = audited(module)
    before = [layer.detach().clone() for layer in module.layers]
    for _ in range(3):
        audit.some(targets)
    change()
    with pytest.raises(AuditError, match=r"layers\.\d\.a"):
        audit.some(targets)
    assert all(map(torch.equal, before, module.layers))


def test_samples_rotate_within_their_size() -> None:
    audit, targets = audited(Loading(), nbytes=2 * 48)
    samples = [audit.some(targets) for _ in range(LAYERS)]
    assert all({name[-1] for name in names} == {"a", "b"} for names in samples)
    assert len({name for names in samples for name in names}) == 2 * LAYERS
    audit, targets = audited(Loading(), nbytes=1)
    assert [audit.some(targets)[0][-1] for _ in range(4)] == ["a", "b", "a", "b"]


def test_what_a_load_joins_comes_together() -> None:
    target = torch.rand(6, 4)
    names = [f"layers.{n}.{part}_proj.weight" for n in range(2) for part in ("gate", "up")]

    def load(pairs: Any) -> None:
        given = dict(pairs)
        for number in range(2):
            parts = [given.get(name) for name in names[2 * number :][:2]]
            if all(part is not None for part in parts):
                target[2 * number :][:2] = torch.cat(parts)

    sources = [Source(name, torch.float32, (1, 4)) for name in names]
    values = [{name: torch.rand(1, 4) for name in names} for _ in range(2)]
    found = learn(load, [target], sources, {}, tuple(lambda s, v=v: v[s.name] for v in values))
    audit = Audit(load, found, sources, nbytes=1)
    assert audit.is_possible([target])
    assert sorted(audit.some([target]) + audit.some([target])) == names


def test_a_load_that_asks_for_more_when_it_has_loaded_is_right() -> None:
    """SGLang's Step-3.5 raises where it is not given all of its tensors."""
    module = Loading()
    audit, targets = audited(module)
    own = module.load_weights

    def load(pairs: Any) -> None:
        own(pairs)
        raise ValueError("Some parameters are not loaded")

    audit._load = load
    audit.some(targets)


def test_what_other_workers_have_is_zero() -> None:
    target, seen = torch.rand(2, 6), []

    def load(pairs: Any) -> None:
        for _, tensor in pairs:
            seen.append(tensor)
            target.copy_(tensor[2:])

    source = Source("w", torch.float32, (4, 6))
    values = torch.rand(4, 6), torch.rand(4, 6)
    found = learn(load, [target], [source], {}, (lambda _: values[0], lambda _: values[1]))
    load([("w", torch.rand(4, 6))])
    Audit(load, found, [source]).some([target])
    assert not seen[-1][:2].any()
    assert torch.equal(seen[-1][2:], target)


def test_memory_that_an_engine_has_taken_again_may_hold_anything() -> None:
    """It has slept without a copy of its weights; an element of bfloat16 is kept in float32."""
    target = torch.zeros(4, 6)

    def load(pairs: Any) -> None:
        for _, tensor in pairs:
            target.copy_(tensor)

    source = Source("w", torch.bfloat16, (4, 6))
    values = [torch.rand(4, 6).bfloat16() for _ in range(2)]
    found = learn(load, [target], [source], {}, (lambda _: values[0], lambda _: values[1]))
    target.copy_(torch.rand(4, 6))
    Audit(load, found, [source]).some([target])
