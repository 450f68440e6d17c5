"""Forms: what a value was, to see later at little cost whether it still is that.

A form is a question about a value, and forms of what the value holds, which C asks (see
csrc/python/value_pattern.c).  A value is still the same if it has the form that it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from wsync._core import Pattern

if TYPE_CHECKING:
    from torch.nn import Module

# (operation, what it takes, forms of what it leads to); of an atom its type, too: 1 is not True
Form = tuple[Any, ...]

KEEP: Final[Form] = ("keep", None, ())


def pattern(form: Form, find: Callable[[Any], tuple[str, object]] | None = None) -> Pattern:
    """What tells whether a value has this form.  Equal questions become one row.

    find: the operation, and what it takes, that asks whether a value is at a `place`.
    """
    rows: list[tuple[str, object, tuple[int, ...]]] = []
    numbers: dict[tuple[str, int, tuple[int, ...]], int] = {}
    known: dict[int, int] = {}  # by the identity of forms

    def number(form: Form) -> int:
        found = known.get(id(form))
        if found is None:
            operation, what, inner = form[0], form[1], tuple(map(number, form[2]))
            if operation == "place" and find is not None:
                operation, what = find(what)
            found = numbers.setdefault((operation, id(what), inner), len(rows))
            if found == len(rows):
                rows.append((operation, what, inner))
            known[id(form)] = found
        return found

    number(form)
    return Pattern(rows)


def atom(value: Any) -> Form:
    return "atom", value, (), type(value)


def typed(kind: Any, *inner: Form) -> Form:
    return "type", kind, inner


def at(value: object, *inner: Form) -> Form:
    """Of this very object, which a form does not keep: torch swaps no tensors that there are weak
    references to, and another object may take the place of one that is gone."""
    return "at", id(value), inner


def place(what: object, *inner: Form) -> Form:
    """Of whatever is at a place by the time that a pattern is made, which has to find it."""
    return "place", what, inner


def attribute(name: str, *inner: Form) -> Form:
    return "attribute", name, inner


def own(held: Mapping[str, Any], **forms: Form) -> tuple[Form, ...]:
    """Of what a value, whose attributes are `held`, has under these names."""
    inside = tuple(("item", name, (form,)) for name, form in forms.items() if name in held)
    others = (attribute(name, form) for name, form in forms.items() if name not in held)
    return ("own", None, inside), *others


def merged(forms: Iterable[Form]) -> tuple[Form, ...]:
    """Forms of one value, of which those that lead to the same are one."""
    found: dict[tuple[str, Any], list[Form]] = {}
    for operation, what, inner in forms:
        found.setdefault((operation, what), []).extend(inner)
    return tuple((operation, what, tuple(inner)) for (operation, what), inner in found.items())


def call(name: str, *inner: Form) -> Form:
    return "call", name, inner


def lacks(*names: str) -> tuple[Form, ...]:
    return tuple(("lacks", name, ()) for name in sorted(names))


def elements(forms: Iterable[Form]) -> Form:
    return "elements", None, tuple(forms)


def items(forms: Mapping[Any, Form]) -> Form:
    """Of a mapping, by its keys."""
    return "items", _keys(*forms), tuple(forms.values())


@functools.lru_cache(maxsize=1024, typed=True)
def _keys(*keys: Any) -> tuple[Any, ...]:
    """One tuple for many mappings: those of what a class's objects hold."""
    return keys


def module_pattern(
    roots: Iterable[Module], holds: Callable[[Module], Iterable[Form]]
) -> Callable[[], list[Any] | None]:
    """What gives all that `keep` meets in these modules as long as they have the same parts, under
    the same names and in the same order, and each holds what it held; None afterwards.

    holds: forms of a module, of what it holds besides its parts.
    """
    met: set[int] = set()

    def of(module: Module | None) -> Form:
        if module is None:
            return atom(None)
        if id(module) in met:
            return at(module)
        met.add(id(module))
        parts = items({name: of(part) for name, part in module._modules.items()})
        return at(module, *merged([*holds(module), *own(vars(module), _modules=parts)]))

    modules = tuple(roots)
    return functools.partial(pattern(elements(map(of, modules))).match, modules)
