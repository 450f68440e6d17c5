"""Reads the parts of parameters from a model or a state dict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.fsdp.flat_units import FlatUnit, check_inside, flat_units, saved_dtypes
from wsync.fsdp.fsdp2_modules import fsdp2_modules
from wsync.fsdp.parts import TIED, Form, Part, plain_name
from wsync.fsdp.sharded_tensors import parts_of
from wsync.layout import by_plain_name, chosen
from wsync.module_tensors import Slot, Slots, homes_of, same_bytes

if TYPE_CHECKING:
    from torch import Tensor


def of_mapping(
    tensors: Mapping[str, Tensor], tied: bool, wanted: Sequence[Form] | None = None
) -> list[Part]:
    """The parts of named tensors; if `wanted` is given, only of the tensors that it names."""
    some = None if wanted is None else dict.fromkeys(form[0] for form in wanted)
    known = by_plain_name(tensors, plain_name, some)
    if tied and TIED in known:
        _check_tied(known)
        del known[TIED]
    names = list(known if some is None else some)
    given = zip(names, chosen(known, names), strict=True)
    return [part for name, tensor in given for part in parts_of(name, tensor)]


def of_module(module: Any, tied: bool) -> Callable[[], list[Part]]:
    """A function that reads the tensors of a module's state dict and FSDP1's flat parameters."""
    flats: list[FlatUnit] = []
    units: list[Any] = []
    saved: dict[str, Any] = {}

    def find() -> Iterator[Slot]:
        flats[:] = flat_units(module)
        saved.clear()
        saved.update(saved_dtypes(module))
        units[:] = fsdp2_modules(module)
        check_inside(module, flats)
        reshard()
        for unit in flats:
            unit.write_back()
        return _slots(module, flats, tied)

    def reshard() -> None:  # the next pass gathers them again
        for unit in units:
            unit.reshard()

    slots = Slots([module], find)

    def read() -> list[Part]:
        reshard()
        held = zip(slots.names, slots.read(), strict=True)
        given = ((n, t.to(saved[n]) if n in saved else t) for n, t in held)
        parts = [part for name, tensor in given for part in parts_of(name, tensor)]
        for unit in flats:
            parts += unit.parts(tied)
        return parts

    return read


def _check_tied(known: Mapping[str, Any]) -> None:
    """Raises LayoutError if a tied head equals none of the other tensors, because wsync would not
    deliver the head's values."""
    head = known[TIED]
    others = (tensor for name, tensor in known.items() if name != TIED)
    if not any(other is head or _same(other, head) for other in others):
        raise _core.LayoutError(
            f"{TIED}: it has values of its own, but the configuration says tied embeddings"
        )


def _same(one: Any, other: Any) -> bool:
    """Whether this rank's parts of two tensors are equal, bit for bit."""
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    pairs = itertools.zip_longest(parts_of(TIED, one), parts_of(TIED, other))
    return all(a and b and a.form == b.form and same_bytes(a.tensor, b.tensor) for a, b in pairs)


def _slots(module: Any, flats: Sequence[FlatUnit], tied: bool) -> Iterator[Slot]:
    """Every parameter and persistent buffer that is not in a flat parameter."""
    buffers = {id(unit.flat) for unit in flats}
    delivered = {name for unit in flats for name, *_ in unit.names()}
    flat = {id(tensor) for unit in flats for tensor in unit.tensors()}
    parts: dict[str, int] = {}  # each name has a part, even if names share a tensor
    firsts: dict[int, int] = {}
    heads: list[Slot] = []
    for owner, home, key, full in homes_of(module, once=False):
        tensor, name = home[key], plain_name(full)
        if id(tensor) in flat:
            whole = id(tensor) in buffers or (tied and name == TIED)
            if not whole and name not in delivered:
                raise _core.LayoutError(
                    f"{name}: two FSDP1 units share this parameter, but only one holds it: wrap "
                    "both modules in one unit"
                )
            continue
        if home is owner._buffers and key in owner._non_persistent_buffers_set:
            continue
        if tied and name == TIED:
            heads.append(Slot(name, home, key, full))
            continue
        part = parts.setdefault(name, len(parts))
        firsts.setdefault(id(tensor), part)
        yield Slot(name, home, key, full, part)
    for head in heads:  # a head may be registered before or after its embedding
        first = firsts.get(id(head.home[head.key]))
        if first is None:
            raise _core.LayoutError(
                f"{TIED}: it is a separate parameter, but the configuration says tied "
                "embeddings: wrap embedding and head in one FSDP unit"
            )
        yield head._replace(part=first)
