"""Attributes that load_weights reads, and whether they have changed since.

Seen are those of the module, of its parts and of its tensors whose values are plain: numbers,
words, None, enumerations, dtypes, arrays of numpy, functions by their code and what they are bound
to, containers of such, configurations (objects with to_dict, dataclasses) and objects that hold
nothing else, by what they hold.  Of a part or tensor of the module it is compared which one it is,
of a view of such a tensor what it is a view of, of another tensor which one it is, if load_weights
has read its values, and else, in containers, the shape; and of anything else, and of anything
deeper than a few containers, the type.  Of a method of the part's class it is seen that nothing on
the part takes its place.  Not seen is what is read by way of `__dict__` or `vars`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import reprlib
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import torch

from wsync.engine.learn.attribute_watch import WATCHED, watching
from wsync.engine.learn.forms_of_values import (
    ABSENT,
    ATOMS,
    INHERITED,
    AttributePlace,
    Forms,
    Parts,
    finder,
    owner_of,
    owners_in,
    paths_in,
    store_of,
)
from wsync.module_tensors.value_forms import (
    Form,
    at,
    atom,
    attribute,
    elements,
    lacks,
    merged,
    pattern,
    typed,
)

_HELD: Final = frozenset(("_parameters", "_buffers", "_modules"))  # ModuleMemory knows of these


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a part of a module, or of the part's tensor of that name, as it was.

    form: of its owner.
    """

    part: str
    tensor: str
    name: str
    form: Form
    text: str

    @staticmethod
    def of(part: str, tensor: str, name: str, value: Any, forms: Forms) -> Attribute:
        owner = None if tensor else forms.parts.get(part)
        if (not tensor and isinstance(value, torch.Tensor)) or _holds(owner, name, value):
            forms = Forms()  # ModuleMemory knows which one it is
        return Attribute(part, tensor, name, _of_owner(name, value, forms), _words(value))

    @property
    def place(self) -> AttributePlace:
        """Where it is looked for."""
        return self.part, self.tensor, self.name

    @property
    def absent(self) -> bool:
        return bool(self.form[0] == "absent")

    def renewed(self, forms: Forms) -> Attribute:
        """As it is now."""
        value = self._value(forms.parts)
        return Attribute.of(self.part, self.tensor, self.name, value, forms)

    def difference(self, parts: Parts) -> str:
        """How it differs now, or ""."""
        owner = self.owner(parts)
        if (
            self.absent
            if owner is None
            else pattern(self.form, finder(parts)).match(owner) is not None
        ):
            return ""
        name = ".".join(filter(None, (self.part, self.tensor, self.name)))
        text = _words(self._value(parts))
        if text == self.text:
            text = "another"
        return f"{name}, which load_weights goes by, was {self.text} and is {text}"

    def owner(self, parts: Parts) -> Any:
        """What it is an attribute of, or None."""
        return owner_of(self.part, self.tensor, parts)

    def _value(self, parts: Parts) -> Any:
        owner = self.owner(parts)
        if owner is None:
            return ABSENT
        return _own(owner, self.name, getattr(owner, self.name, ABSENT))


class AttributeGuards:
    """Attributes that are compared at every update, all at once.

    parts: those of the module, whose attributes are what they were.  outside: as of Forms, when
    they are renewed.
    """

    def __init__(
        self,
        attributes: Iterable[Attribute] = (),
        parts: Parts | None = None,
        outside: Collection[int] = (),
    ) -> None:
        self.attributes = list(attributes)
        self._outside = outside
        self._make({} if parts is None else parts)

    def _make(self, parts: Parts) -> None:
        self._rest: list[Attribute] = []  # those of tensors that are not there
        owned: dict[str, list[Form]] = {}  # by the path of a part
        absent: dict[type, set[str]] = {}  # names that classes do not define
        groups: dict[tuple[str, str], list[Attribute]] = {}
        for each in self.attributes:
            groups.setdefault((each.part, each.tensor), []).append(each)
        for (path, tensor), members in groups.items():
            owner = members[0].owner(parts)
            if owner is None:
                self._rest += members
                continue
            forms = _of_group(owner, members, absent)
            if tensor:
                forms = (attribute(store_of(parts[path], tensor), ("item", tensor, forms)),)
            owned.setdefault(path, []).extend(forms)
        self._classes = list(absent)
        classes = [
            [attribute("__dict__", *lacks(*names)), *_lookup(kind)]
            for kind, names in absent.items()
        ]
        # by these, what is compared is found: they are kept, and are to be the same
        places = {path: parts[path] for path in paths_in(owned.values()) if path in parts}
        self._placed, self._kept = list(places), list(places.values())
        self._paths = list(owned | dict.fromkeys(places))
        inner = [("once", None, merged(owned.get(path, ()))) for path in self._paths]
        for number, path in enumerate(self._paths):
            if path in places:
                inner[number] = at(places[path], inner[number])
        inner += [("once", None, merged(forms)) for forms in classes]
        self._pattern = pattern(elements(inner), finder(parts))

    def hold(self, parts: Parts) -> bool:
        """Whether all are as they were."""
        return self._same(parts) and not any(each.difference(parts) for each in self._rest)

    def _same(self, parts: Parts) -> bool:
        """Whether all are but those of tensors that are not there."""
        if self._match(parts):
            return True
        if all(map(operator.is_, map(parts.get, self._placed), self._kept)):
            return False
        self._make(parts)  # parts are others, and perhaps all else is as it was
        return self._match(parts)

    def _match(self, parts: Parts) -> bool:
        values = [*map(parts.get, self._paths), *self._classes]
        return self._pattern.match(values) is not None

    def renewed(self, parts: Parts, more: Iterable[Attribute] = ()) -> AttributeGuards:
        """The same attributes, and more, as they are now."""
        known = {each.place: each for each in (*more, *self.attributes)}
        forms = Forms(parts, self._outside)
        renewed = [each.renewed(forms) for each in known.values()]
        return AttributeGuards(renewed, parts, self._outside)

    def difference(self, parts: Parts) -> str:
        """How the first one that differs now does, or ""."""
        doubtful = self._rest if self._same(parts) else self.attributes
        return next(filter(None, (each.difference(parts) for each in doubtful)), "")


def _of_owner(name: str, value: Any, forms: Forms) -> Form:
    """The form of what has an attribute of this value."""
    if value is ABSENT:
        return "absent", name, ()
    if value is INHERITED:
        return attribute("__dict__", *lacks(name))
    return typed(value) if name == "__class__" else attribute(name, forms.of(value))


def _of_group(
    owner: Any, members: list[Attribute], absent: dict[type, set[str]]
) -> tuple[Form, ...]:
    """Forms of what has all these attributes.  That one is absent follows, where lookup is
    Python's or torch's own, from what the owner and its classes hold; these are added."""
    kind: Any = type(owner)
    names = {each.name for each in members if each.absent}
    names -= {name for base in kind.__mro__ for name in vars(base)}  # by a property's doing
    stores = _STORES.get(getattr(kind, "__getattr__", None))
    plain = [base for base in kind.__mro__ if base not in (object, *WATCHED)]
    if not names or not stores or any(_LOOKUP in vars(base) for base in plain):
        return tuple(each.form for each in members)
    for base in kind.__mro__:
        own = {_LOOKUP} if base in plain else set()
        absent.setdefault(base, set()).update(names | own)
    held = [attribute(store, *lacks(*names)) for store in stores]
    return *(each.form for each in members if each.name not in names), *held


# what WATCHED have of it is this package's while load_weights is watched
_LOOKUP: Final = "__getattribute__"
# by a class's __getattr__: where an attribute can be that the class does not have
_STORES: Final[dict[Any, tuple[str, ...]]] = {
    None: ("__dict__",),
    torch.nn.Module.__getattr__: ("__dict__", *sorted(_HELD)),
}


def _lookup(kind: Any) -> list[Form]:
    """How a class looks up attributes that are not found."""
    names = "__mro__", "__getattr__"
    return [
        attribute(name, atom(getattr(kind, name))) if hasattr(kind, name) else ("absent", name, ())
        for name in names
    ]


def _holds(part: torch.nn.Module | None, name: str, value: Any) -> bool:
    """Whether a part has another one as a part of its own."""
    return part is not None and value is not None and part._modules.get(name) is value


def _is_pythons(owner: Any, name: str) -> bool:
    """Whether it is a special name, which the owner has not set itself."""
    return name.startswith("__") and name not in object.__getattribute__(owner, "__dict__")


def _has_default(kind: type, name: str) -> bool:
    """Whether a class of tensors of an engine's own has a value for those that have none."""
    for base in kind.__mro__:
        if base in WATCHED:
            return False
        if name in vars(base):
            found = vars(base)[name]
            slot = isinstance(found, types.MemberDescriptorType)
            return slot or not hasattr(type(found), "__get__")  # no method or property
    return False


def _own(owner: Any, name: str, value: Any) -> Any:
    """A value that was found on an owner, or INHERITED."""
    inherited = (
        callable(value)
        and isinstance(owner, torch.nn.Module)
        and not isinstance(value, torch.nn.Module | type)
        and name not in vars(owner)
    )
    return INHERITED if inherited else value


class _Words(reprlib.Repr):
    """Never the values of tensors: a recording would take that for the loader's doing."""

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, ATOMS):
            return super().repr_instance(value, level)
        return f"a {type(value).__name__}"


_words: Final = _Words().repr


@contextlib.contextmanager
def attributes_read(module: torch.nn.Module) -> Iterator[list[Attribute]]:
    """The attributes that this thread, and those that it starts, read in the block, with the values
    that they had first, and those that are looked for in vain."""
    owners = owners_in(dict(module.named_modules()))
    strangers: dict[int, Any] = {}  # kept, too
    unknown: set[int] = set()  # of them

    def is_owner(value: Any) -> bool:
        """Also one that load_weights has made."""
        if id(value) in owners or id(value) in unknown:
            return id(value) in owners
        # by its type: isinstance looks at attributes of tensors
        if issubclass(type(value), (torch.nn.Module, torch.nn.Parameter)):
            strangers[id(value)] = value
            unknown.add(id(value))
            made = owners_in(dict(torch.nn.Module.named_modules(module)))
            owners.update((key, made[key]) for key in made.keys() - owners.keys())
        return id(value) in owners

    seen: set[tuple[int, str]] = set()
    found = [
        Attribute.of(path, name, "__class__", type(owner), Forms())
        for owner, path, name in owners.values()
        if isinstance(owner, torch.nn.Module | torch.nn.Parameter)
    ]

    def note(owner: Any, name: str, value: Any) -> None:
        key = (id(owner), name)
        if key in seen or name in _HELD or _is_pythons(owner, name) or not is_owner(owner):
            return
        seen.add(key)
        _, part, tensor = owners[key[0]]
        own = value is ABSENT or name in owner.__dict__ or name == "requires_grad"
        if own or not tensor or _has_default(type(owner), name):
            # which one of the module's a value is shows when it is `renewed`
            found.append(Attribute.of(part, tensor, name, _own(owner, name, value), Forms()))

    def look_again(owner: Any, _: str) -> None:
        if issubclass(type(owner), torch.nn.Module):
            unknown.clear()  # it may be given one of them

    with watching(read=note, changed=look_again):
        yield found
