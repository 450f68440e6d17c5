"""Forms say what a slow and obvious comparison says, of values and of whole modules."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from wsync._core import LayoutError, Pattern
from wsync.engine.learn import attributes_read, forms_of_values
from wsync.engine.learn.attributes_read import Attribute, AttributeGuards
from wsync.engine.learn.forms_of_values import Forms
from wsync.engine.learn.module_memory import ModuleMemory, slots, usable
from wsync.module_tensors import Slot, Slots, homes_of
from wsync.module_tensors.value_forms import pattern


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Config:
    def __init__(self, held: Any) -> None:
        self.held = held

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    first: Any


class Opaque:
    pass


def closure(held: Any) -> Callable[[], Any]:
    def inner(default: Any = held) -> Any:
        return held, default

    return inner


def frozen(value: Any) -> Any:
    """What equals another one's if the values are the same."""
    kind = type(value)
    if isinstance(value, float | complex | slice):
        return kind, repr(value)
    if isinstance(value, int | str | bytes | type(None) | torch.dtype | range | type):
        return kind, value
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape
    if isinstance(value, list | tuple | deque):
        return kind, tuple(map(frozen, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(frozen, value))
    if isinstance(value, dict | types.MappingProxyType):
        return kind, tuple((frozen(k), frozen(v)) for k, v in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return kind, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, functools.partial):
        return kind, frozen(value.func), frozen(value.args), frozen(value.keywords)
    if isinstance(value, types.MethodType):
        return kind, frozen(value.__func__), frozen(value.__self__)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return kind, value.__code__, frozen(cells), frozen(value.__defaults__)
    if isinstance(value, Slotted):
        return kind, frozen(value.first)
    return (kind, frozen(vars(value))) if isinstance(value, Config | Plain) else kind


ATOMS = [
    *(0, 1, True, False, None, "", "a", b"a", 0.0, -0.0, 1.0, float("nan"), 1j, 10**20),
    *(Color.RED, Color.BLUE, range(2), slice(1), torch.int8, torch.int32, int, str, Config),
]


def draw(chance: random.Random, depth: int = 3, *, hashable: bool = False) -> Any:
    if depth == 0 or chance.random() < 0.3:
        found = chance.choice(ATOMS)
        return 0 if hashable and isinstance(found, slice) else copy.copy(found)
    inner = [draw(chance, depth - 1, hashable=hashable) for _ in range(chance.randrange(3))]
    keys = [draw(chance, depth - 1, hashable=True) for _ in inner]
    one = inner[0] if inner else 7
    kinds: list[Callable[[], Any]] = [
        lambda: tuple(inner),
        lambda: frozenset(draw(chance, depth - 1, hashable=True) for _ in range(3)),
    ]
    if not hashable:
        kinds += [
            *(lambda: inner, lambda: deque(inner), lambda: Config(one), lambda: Slotted(one)),
            *(lambda: Plain(*inner, second=3) if len(inner) == 1 else Plain(one), Opaque),
            *(lambda: dict(zip(keys, inner, strict=True)), lambda: closure(one)),
            lambda: OrderedDict(zip(keys, inner, strict=True)),
            lambda: types.MappingProxyType(dict(zip(keys, inner, strict=True))),
            lambda: {draw(chance, depth - 1, hashable=True) for _ in range(3)},
            lambda: np.array([chance.randrange(2)] * 2),
            lambda: torch.zeros(chance.randrange(3)),
            lambda: functools.partial(closure(one), *inner, held=one),
            lambda: types.MethodType(closure(one), Config(one)),
        ]
    return chance.choice(kinds)()


def mutate(chance: random.Random, value: Any) -> Any:
    """The value, changed somewhere if it can be, or another one; perhaps one that is equal."""
    if isinstance(value, types.MethodType | functools.partial) and chance.random() < 0.8:
        inner = value.__func__ if isinstance(value, types.MethodType) else value.func
        mutate(chance, inner)
    elif isinstance(value, list | deque) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        value[place] = mutate(chance, value[place])
    elif isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        found = mutate(chance, value[key])
        if chance.random() < 0.3:
            del value[key]  # it may come last now
        if chance.random() < 0.9:
            value[key] = found
    elif isinstance(value, set) and chance.random() < 0.8:
        value ^= {draw(chance, 1, hashable=True)}
    elif isinstance(value, Config | Slotted | Plain) and chance.random() < 0.9:
        name = "held" if isinstance(value, Config) else "first"
        setattr(value, name, mutate(chance, getattr(value, name)))
    elif isinstance(value, types.FunctionType) and chance.random() < 0.8:
        cell = chance.choice([*(value.__closure__ or ())])
        if chance.random() < 0.5:
            cell.cell_contents = mutate(chance, cell.cell_contents)
        else:
            value.__defaults__ = (mutate(chance, (value.__defaults__ or (0,))[0]),)
    elif isinstance(value, np.ndarray):
        value[:] = chance.randrange(2)
    elif isinstance(value, torch.Tensor):
        value.data = torch.zeros(chance.randrange(3))
    elif chance.random() < 0.3 and isinstance(value, list | tuple | dict | Config):
        return copy.copy(value)
    else:
        return draw(chance, 2)
    return value


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values as deep as they are drawn are compared."""
    monkeypatch.setattr(forms_of_values, "_DEPTH", 99)
    elements = [functools.partial(forms_of_values._elements, depth) for depth in range(99)]
    monkeypatch.setattr(forms_of_values, "_ELEMENTS", elements)


@pytest.mark.usefixtures("deep")
def test_a_value_has_the_form_that_it_had_if_it_is_the_same() -> None:
    found = {True: 0, False: 0}
    for seed in range(150):
        chance = random.Random(seed)
        value = draw(chance)
        for _ in range(6):
            before, form = frozen(value), pattern(Forms().of(value, 1))
            assert form.match(value) == []
            value = mutate(chance, value)
            same = frozen(value) == before
            assert (form.match(value) is not None) is same, (seed, value)
            found[same] += 1
    assert min(found.values()) > 50


def test_what_is_too_deep_is_compared_by_its_type() -> None:
    value: list[Any] = []
    for _ in range(20):
        value = [value]
    form, inner = pattern(Forms().of(value)), value
    for _ in range(8):
        inner = inner[0]
    inner.append(3)
    assert form.match(value) == []
    value[0][0][0][0][0] = ()
    assert form.match(value) is None


# --- modules ----------------------------------------------------------------------------------


class Part(torch.nn.Module):
    def __init__(self, chance: random.Random, depth: int) -> None:
        super().__init__()
        self.plain: Any = None
        self.a = torch.nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("b", torch.zeros(chance.randrange(3)))
        self.register_parameter("none", None)
        self.count = torch.zeros(2)
        for name in "xyz"[: chance.randrange(4) if depth else 0]:
            self.add_module(name, Part(chance, depth - 1))


def seen(module: torch.nn.Module) -> Any:
    """Everything of a module that an update depends on: parts, tensors with memory, and where."""
    parts = list(module.named_modules(remove_duplicate=False))
    tensors = [
        (path, number, name, id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), memory(t))
        for path, part in module.named_modules()
        for number, slot in enumerate(slots(part))
        for name, t in slot.items()
        if isinstance(t, torch.Tensor) and usable(t) and t.numel()
    ]
    children = [list(part._modules.items()) for _, part in parts]
    return parts, tensors, children


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def data_moves(part: Any) -> None:
    part.a.data = part.a.data.clone()


def data_is_seen_otherwise(part: Any) -> None:
    part.a.data = part.a.data.view(2, 4)


def storage_grows(part: Any) -> None:
    place = part.a.data_ptr()
    part.a.untyped_storage().resize_(part.a.untyped_storage().nbytes() + 64)
    if part.a.data_ptr() == place:
        part.a.untyped_storage().resize_(part.a.untyped_storage().nbytes() + 64)


def tied(part: Any) -> None:
    part._parameters["none"] = part.a


def children_turn(part: Any) -> None:
    found = list(part._modules.items())
    part._modules.clear()
    part._modules.update(reversed(found))


def child_of_two_names(part: Any) -> None:
    for name, child in list(part._modules.items())[:1]:
        part._modules[f"{name}2"] = child


CHANGES: list[Callable[[Any], Any]] = [
    *(data_moves, data_is_seen_otherwise, storage_grows, tied, children_turn, child_of_two_names),
    lambda p: p.requires_grad_(False),
    lambda p: p.train(not p.training),
    lambda p: setattr(p, "plain", [1] if p.plain is None else None),
    lambda p: setattr(p, "plain", torch.zeros(0)),
    lambda p: setattr(p, "plain", torch.zeros(2)),
    lambda p: setattr(p, "plain", torch.zeros(2, device="meta")),
    lambda p: setattr(p, "new", object()),
    lambda p: setattr(p, "count", p.count.clone()),
    lambda p: setattr(p, "count", p.count),
    lambda p: setattr(p, "b", torch.zeros(3)),
    lambda p: p.b.resize_(0),
    lambda p: p.register_forward_hook(lambda *_: None),
    lambda p: vars(p).update(_parameters=dict(p._parameters)),
    lambda p: vars(p).pop("new", None),
    lambda p: vars(p).update(none=p._parameters["none"]),
    lambda p: p._modules.pop("x", None),
    lambda p: p.add_module("x", Part(random.Random(0), 0)),
    lambda p: p._parameters.update(a=torch.nn.Parameter(p.a.data)),
]


def test_a_module_is_current_if_everything_in_it_is_what_it_was() -> None:
    found = {True: 0, False: 0}
    for seed in range(len(CHANGES) * 4):
        chance = random.Random(seed)
        module = Part(chance, 2)
        held, before, kept_alive = ModuleMemory(module), seen(module), list(module.parameters())
        assert held.kept() is not None
        for _ in range(4):
            CHANGES[seed % len(CHANGES)](chance.choice(list(module.modules())))
            seed = chance.randrange(10**6)
            same = seen(module) == before
            assert held.current() is same, seed
            assert same or held.kept() is None, seed
            found[same] += 1
        del kept_alive
    assert min(found.values()) > 50


def test_slots_of_a_trainer_are_read_where_they_are_or_refused() -> None:
    found = {True: 0, False: 0}
    changes = [
        *CHANGES,
        lambda p: p.register_parameter("more", torch.nn.Parameter(torch.zeros(2))),
        lambda p: p.register_buffer("more", torch.zeros(2)),
        lambda p: vars(p).update(_parameters={"a": torch.nn.Parameter(p.a.data), "none": None}),
        lambda p: vars(p).update(_buffers={"b": p.b.clone()}),
    ]
    for seed in range(len(changes) * 4):
        chance = random.Random(seed)
        module = Part(chance, 2)

        def find(module: Any = module) -> list[Slot]:
            return [Slot(path, home, key, path) for _, home, key, path in homes_of(module)]

        def tied(module: Any = module) -> dict[str, str]:
            firsts: dict[int, str] = {}
            homes = homes_of(module)
            return {p: firsts.setdefault(id(home[key]), p) for _, home, key, p in homes}

        slots, before = Slots([module], find), tied()
        for _ in range(4):
            changes[seed % len(changes)](chance.choice(list(module.modules())))
            seed = chance.randrange(10**6)
            held = {path: home[key] for _, home, key, path in homes_of(module)}
            try:
                tensors = slots.read()
            except LayoutError:
                assert list(tied().items()) != list(before.items()), seed
                found[False] += 1
                continue
            assert list(map(id, tensors)) == [id(held[name]) for name in slots.names], seed
            assert {*map(id, tensors)} == {*map(id, held.values())}, seed
            found[True] += 1
    assert min(found.values()) > 50


def test_slots_are_found_anew_when_a_part_gets_another_class() -> None:
    module, asked = Part(random.Random(1), 1), []

    def find() -> list[Slot]:
        asked.append(type(module))
        return [Slot(path, home, key, path) for _, home, key, path in homes_of(module)]

    slots = Slots([module], find)
    slots.read()
    module.__class__ = Made
    slots.read()
    slots.read()
    assert asked == [Part, Made]


@pytest.mark.parametrize("raises", [False, True])
def test_slots_are_found_anew_after_they_were_found_in_vain(raises: bool) -> None:
    """What was found with them is of the module as it was then."""
    module, beside = torch.nn.Sequential(torch.nn.Linear(2, 2)), list[torch.nn.Module]()

    def find() -> Iterator[Slot]:
        beside[:] = module.children()
        for _, home, key, path in homes_of(module):
            if raises and path.startswith("more"):
                raise LayoutError("more")
            yield Slot(path, home, key, path)

    slots, first = Slots([module], find), module[0]
    for _ in range(2):
        module[0] = torch.nn.Linear(2, 2)
        module.add_module("more", torch.nn.Linear(2, 2))
        with pytest.raises(LayoutError, match="more"):
            slots.read()
        module[0] = first
        del module.more
        assert slots.read()[0] is first.weight
        assert beside == [first]


def test_a_module_with_a_tensor_that_cannot_be_described_is_looked_at_in_whole() -> None:
    module = Part(random.Random(0), 0)
    module.count = torch.zeros((1,) * 9)
    held = ModuleMemory(module)
    assert held.kept() is None and held.current()
    for change in (data_moves, storage_grows, lambda p: setattr(p, "count", p.count.clone())):
        before, keep = ModuleMemory(module), module.count
        change(module)
        assert not before.current()
        assert keep is not None


def test_a_module_without_tensors_is_current() -> None:
    module = torch.nn.Identity()
    held = ModuleMemory(module)
    assert held.kept() == []
    module.late = torch.zeros(2)
    assert held.kept() is None and not held.current()


def test_what_is_kept_is_the_memory_of_all_tensors() -> None:
    module = Part(random.Random(1), 2)
    held = ModuleMemory(module)
    kept = held.kept()
    assert kept is not None
    assert {storage.data_ptr() for storage in kept} == {start for start, _ in held.spans()}


# --- attributes -------------------------------------------------------------------------------


class Made(Part):
    """Makes up attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["plain"] if name == "made" else super().__getattr__(name)

    @property
    def computed(self) -> Any:
        return self.plain

    def method(self) -> int:
        return 0


NAMES = ["plain", "new", "made", "computed", "extra_repr", "method", "x", "training", "__class__"]
MORE: list[Callable[[Any, random.Random], Any]] = [
    lambda p, c: setattr(p, c.choice(["plain", "new", "extra_repr", "method"]), draw(c)),
    lambda p, c: setattr(p, "plain", mutate(c, p.plain)),
    lambda p, c: setattr(p.a, c.choice(["plain", "new"]), draw(c)),
    lambda p, c: setattr(p.a, "plain", mutate(c, getattr(p.a, "plain", 0))),
    lambda p, c: setattr(p, "a", torch.nn.Parameter(torch.zeros(4, 2))),
    lambda p, c: p.a.requires_grad_(c.random() < 0.5),
    lambda p, c: vars(p).pop(c.choice(["new", "extra_repr", "method"]), None),
    lambda p, c: setattr(Made, "new", 3) if c.random() < 0.5 else setattr(Part, "made", 4),
    lambda p, c: setattr(p, "__class__", c.choice([Part, Made])),
    lambda p, c: p._modules.update(x=torch.nn.Identity()) or p._modules.pop("x"),
]


def same_attribute(attribute: Attribute, parts: Any) -> Any:
    """What is compared of an attribute."""
    owner = attribute.owner(parts)
    if attribute.name == "__class__":
        return type(owner)
    value = getattr(owner, attribute.name, Opaque)
    method = callable(value) and isinstance(owner, torch.nn.Module) and not isinstance(value, type)
    if method and attribute.name not in vars(owner):
        return "inherited"
    return type(value) if isinstance(value, torch.Tensor) else frozen(value)


@pytest.mark.usefixtures("deep")
def test_guards_say_what_attributes_say_one_by_one() -> None:
    found = {True: 0, False: 0}
    for seed in range(100):
        chance = random.Random(seed)
        module = Part(chance, 1)
        module.__class__ = chance.choice([Part, Made])
        for part in module.modules():
            part.plain = draw(chance)
        parts = dict(module.named_modules())
        empty = [
            Attribute.of(path, tensor, name, 0, Forms())
            for path in parts
            for tensor in ("", "a")
            for name in (*NAMES, "requires_grad")
            if name != "__class__"
        ]
        attributes = [each.renewed(Forms(parts)) for each in empty]
        attributes += [
            Attribute.of(path, "", "__class__", type(part), Forms()) for path, part in parts.items()
        ]
        guards = AttributeGuards(attributes, parts)
        before = [same_attribute(each, parts) for each in attributes]
        assert guards.difference(parts) == ""
        try:
            for _ in range(4):
                chance.choice(MORE)(chance.choice(list(parts.values())), chance)
                same = [same_attribute(each, parts) for each in attributes] == before
                assert (guards.difference(parts) == "") is same, seed
                found[same] += 1
        finally:
            for kind, name in ((Made, "new"), (Part, "made")):
                if name in vars(kind):
                    delattr(kind, name)
    assert min(found.values()) > 50


# --- patterns ---------------------------------------------------------------------------------


def test_functions_that_refer_to_each_other_are_looked_at_once() -> None:
    def many() -> list[Callable[[], Any]]:
        made: list[Callable[[], Any]] = []
        made += [lambda made=made, k=k: (made, k) for k in range(10)]
        return made

    functions = many()
    assert pattern(Forms().of(functions)).match(functions) == []


def test_a_pattern_is_let_go_with_what_refers_to_it() -> None:
    part = torch.nn.Identity()
    part.held = pattern(("atom", part, ()))  # type: ignore[assignment]
    gone = weakref.ref(part)
    del part
    gc.collect()
    assert gone() is None


class Raising:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


@pytest.mark.parametrize("operation", ["attribute", "absent", "call"])
def test_what_cannot_be_asked_is_another_value_but_not_an_interrupt(operation: str) -> None:
    asked = Pattern([(operation, "name", ())])
    assert asked.match(Raising(RuntimeError)) is None
    assert (asked.match(Raising(AttributeError)) is not None) is (operation == "absent")
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error):
            asked.match(Raising(error))
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([("atom", 1)], "takes exactly 3|3 arguments"),
        ([["atom", 1, ()]], "row 0 is no tuple"),
        ([("bad", 1, ())], "row 0: no operation bad of 1"),
        ([("other", 1, ())], "row 0: no operation other of 1"),
        ([("items", ("a",), ())], "row 0: no operation items"),
        ([("held", {}, ())], "row 0: no operation held"),
        ([("held", (1, "a"), ())], "row 0: no operation held"),
        ([("once", None, (0,))], "row 0: inner row 0 does not come before"),
        ([("once", None, (max(0, i - 1),)) if i else ("atom", 1, ()) for i in range(5000)], "4096"),
        ([("atom", 1, ()), ("once", None, (-1,))], "inner row -1 does not come before"),
        ([("atom", 1, ()), ("once", None, ("0",))], "inner row '0' does not come before"),
    ],
)
def test_rows_that_are_none_are_refused(rows: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Pattern(rows)


def test_what_a_dict_holds_is_asked_for_as_it_is_by_then() -> None:
    held: dict[str, Any] = {"a": Opaque()}
    asked = Pattern([("held", (held, "a"), ())])
    assert asked.match(held["a"]) == []
    held["b"], held["a"] = held["a"], Opaque()
    assert asked.match(held["a"]) == []
    assert asked.match(held["b"]) is None
    del held["a"]
    assert asked.match(held["b"]) is None


def test_attributes_are_asked_for_where_an_object_has_them() -> None:
    asked = Pattern([("atom", 1, ()), ("item", "held", (0,)), ("own", None, (1,))])
    assert asked.match(Config(1)) == []
    assert asked.match(Config(2)) is None
    assert asked.match(Opaque()) is None
    assert asked.match(1) is None  # has none of its own
    class_wide = type("ClassWide", (), {"held": 1})
    assert asked.match(class_wide()) is None


def test_a_dict_that_changes_while_it_is_asked_does_no_harm() -> None:
    held: dict[str, Any] = {"a": 1, "b": 2, "c": 3}

    def clear(_: object) -> bool:
        held.clear()
        gc.collect()
        return True

    def grow(_: object) -> bool:
        held.update({str(k): k for k in range(1000)})
        return True

    for change in (clear, grow):
        held.update(a=1, b=2, c=3)
        rows = [("atom", True, ()), ("apply", change, (0,)), ("once", None, ())]
        asked = Pattern([*rows, ("items", ("a", "b", "c"), (1, 2, 2))])
        asked.match(held)


def test_that_attributes_are_absent_is_asked_of_classes() -> None:
    """Of each tensor it would be asked by an AttributeError, at every update.  While load_weights
    is watched, torch's classes look attributes up in a way of wsync's."""
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    with attributes_read.attributes_read(module) as read:
        getattr(module.w, "weight_loader", None)
        found = [each for each in read if each.name == "weight_loader"]
        forms = attributes_read._of_group(module.w, found, {})
        guards = AttributeGuards(found, {"": module})
    assert [each.absent for each in found] == [True]
    assert "absent" not in {operation for operation, *_ in forms}
    assert guards.hold({"": module})
    module.w.weight_loader = print
    assert not guards.hold({"": module})
