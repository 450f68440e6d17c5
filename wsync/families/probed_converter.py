"""Learns the maps of parameters from a converter.

A converter is a function that makes Hugging Face tensors of one whole Megatron parameter.
wsync.probing treats a call of it like an engine's load: the parameter is the tensor that is loaded,
and the returned tensors are the memory that it fills.  A returned tensor may also be the parameter
times one number, plus another.  For every parameter of the model, the learnt maps are then proved
on random values.  A map that computes in 16 bits is also proved once on all 16-bit values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wsync import _core
from wsync.families.rules import Piece, may_step
from wsync.module_tensors import same_bytes
from wsync.module_tensors.names import key_of
from wsync.probing.boxes import LONGEST
from wsync.probing.codes import WIDE, kind_of
from wsync.probing.numbering import Source
from wsync.probing.pieces import PlacedBox, as_kept
from wsync.probing.probe import Overwriting, probe

Convert = Callable[[str, Tensor], list[tuple[str, Tensor]]]

_PERIOD = 1_048_573  # of the random values: a prime, so that no two rows or columns are equal
_BOXES = 1 << 16  # the largest number of a tensor's boxes: one for each row is no plan
_CALLS = 1 << 11  # the largest number of calls that prove a computed tensor


@dataclass(frozen=True)
class Whole:
    """The shape and dtype of an unsharded parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def converter_of(function: Callable[..., Any], config: Any) -> Convert:
    """A converter that is called with a global name and a tensor.

    function: convert(name, tensor), or convert(args, name, tensor) like slime's converters.  The
    second kind gets `config` as args, and names that begin with "module.module." as in slime.
    """
    slimes = is_slimes(function)

    def convert(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        try:
            with torch.no_grad():
                if slimes:
                    made = function(config, f"module.module.{name}", tensor)
                else:
                    made = function(name, tensor)
                found = [(str(target), each.detach().cpu()) for target, each in made]
        except Exception as error:
            raise _core.LayoutError(
                f"{name}: the converter raised {type(error).__name__}: {error}"
            ) from error
        if not found:
            raise _core.LayoutError(
                f"{name}: the converter returned no tensors: wsync cannot learn a converter that "
                "waits for other parameters"
            )
        return found

    return convert


def is_slimes(function: Callable[..., Any]) -> bool:
    """Whether a converter needs exactly three arguments, and so is called like slime's."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty for p in positional) == 3


def learn(convert: Convert, wholes: Mapping[str, Whole]) -> dict[str, list[Piece]]:
    """The pieces of every parameter, by its global name.

    Parameters are of one kind if they agree in shape, dtype, and name without numbers.  The first
    parameter of a kind is learnt and proved on random values; the others are only proved.  Memory
    holds a few copies of one whole parameter and of its tensors at a time.

    Raises:
        LayoutError: the converter neither copies elements nor computes parameter * scale + offset;
            the text names the parameter and the tensor.
    """
    kinds: dict[tuple[str, Whole], list[str]] = {}
    for name, whole in wholes.items():
        kinds.setdefault((key_of(name), whole), []).append(name)
    found: dict[str, list[Piece]] = {}
    with torch.device("cpu"):
        for (_, whole), names in kinds.items():
            found |= _learn_kind(convert, whole, names)
    return found


def _learn_kind(
    convert: Convert, whole: Whole, names: Iterable[str]
) -> Iterator[tuple[str, list[Piece]]]:
    if kind_of(whole.dtype) != WIDE or whole.dtype.itemsize > 4:
        raise _core.LayoutError(
            f"{next(iter(names))}: wsync cannot learn what a converter does with {whole.dtype}"
        )
    values = _random(whole)
    known: list[tuple[list[Tensor], list[list[Piece]]]] = []
    for name in names:
        made = convert(name, values.clone())
        outputs = [each for _, each in made]
        pieces = next((pieces for others, pieces in known if _equal(outputs, others)), None)
        if pieces is None:
            pieces = _Reader(convert, name, whole, values, made).pieces()
            known.append((outputs, pieces))
        pairs = zip(made, pieces, strict=True)
        yield name, [replace(piece, name=to) for (to, _), mine in pairs for piece in mine]


def _equal(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    one, other = ([(each.shape, each.dtype) for each in made] for made in (outputs, others))
    return one == other and all(map(same_bytes, outputs, others))


def _finite(dtype: torch.dtype) -> Tensor:
    """Finite values of all magnitudes: every value of a 16-bit dtype, else random values."""
    generator = torch.Generator().manual_seed(0)
    if dtype.itemsize == 2:
        values = torch.arange(-1 << 15, 1 << 15, dtype=torch.int16, device="cpu").view(dtype)
    else:
        drawn: Any = {"dtype": torch.int32, "generator": generator}
        values = torch.randint(-1 << 31, 1 << 31, (_PERIOD,), device="cpu", **drawn).view(dtype)
    return values[values.isfinite()]


def _filled(values: Tensor, whole: Whole) -> Tensor:
    """A whole parameter filled with these values, again and again."""
    count = math.prod(whole.shape)
    return values.repeat(max(1, -(-count // len(values))))[:count].reshape(whole.shape)


def _random(whole: Whole) -> Tensor:
    """A whole parameter of random values, which are small enough for finite norms."""
    values = _finite(whole.dtype)
    values = values[values.abs() < 2.0**48]
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(len(values), (_PERIOD,), generator=generator, device="cpu")
    return _filled(values[order], whole)


@dataclass
class _Reader:
    """Learns where a converter puts the elements of a parameter.

    made: the names and tensors that the converter returns for the random `values`.
    """

    convert: Convert
    name: str
    whole: Whole
    values: Tensor
    made: Sequence[tuple[str, Tensor]]

    def __post_init__(self) -> None:
        self._outputs = [each.contiguous() for _, each in self.made]
        self._forms = [(target, each.shape, each.dtype) for target, each in self.made]
        self._targets = [torch.empty_like(each) for each in self._outputs]
        for target, shape, dtype in self._forms:
            if kind_of(dtype) != WIDE or torch.promote_types(dtype, self.whole.dtype) != dtype:
                raise self._refusal(target, f"it is {dtype}, the parameter is {self.whole.dtype}")
            if not shape.numel():
                raise self._refusal(target, "it has no elements")

    def _refusal(self, target: str, why: str) -> _core.LayoutError:
        return _core.LayoutError(
            f"{self.name}: wsync cannot learn how the converter makes {target}: {why}"
        )

    def _made(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that the converter returns; their forms must be those of the first call."""
        made = self.convert(self.name, tensor)
        if [(target, each.shape, each.dtype) for target, each in made] != self._forms:
            why = "the names, shapes or dtypes of its tensors are not the same in each call"
            raise self._refusal(self._forms[0][0], why)
        return [each for _, each in made]

    def _load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            for target, made in zip(self._targets, self._made(tensor.contiguous()), strict=True):
                target.copy_(made)

    def pieces(self) -> list[list[Piece]]:
        """The pieces of each tensor that the converter returns."""
        source = Source(self.name, self.whole.dtype, self.whole.shape)
        found: list[list[Piece]] = []
        for longest in (LONGEST, 1):
            boxes = probe(Overwriting(self._load, self._targets), [source], {}, longest)
            found = [[] for _ in self._targets]
            for box in boxes:
                found[box.target].append(self._piece(box))
            for target in {box.target for box in boxes if not self._holds(box)}:
                found[target] = [self._computed(target)]
            for (name, *_), mine in zip(self._forms, found, strict=True):
                if len(mine) > _BOXES:
                    raise self._refusal(name, f"it consists of more than {_BOXES} boxes")
            if may_step(piece for mine in found for piece in mine):
                break
        return found

    def _holds(self, box: PlacedBox) -> bool:
        """Whether the converter copied the random values as the box says."""
        output = self._outputs[box.target]
        return bool(box.name) and same_bytes(
            box.view(self._outputs), as_kept(box.of(self.values), output.dtype)
        )

    def _piece(self, box: PlacedBox) -> Piece:
        name, shape, _ = self._forms[box.target]
        strides, rest = self._targets[box.target].stride(), box.offset
        start: list[int] = []
        for count, stride in zip(shape, strides, strict=True):
            place, rest = divmod(rest, stride) if count > 1 else (0, rest)
            start.append(place)
        extent, axes, steps = [1] * len(shape), [-1] * len(shape), [1] * len(shape)
        for source, (count, step) in enumerate(zip(box.extent, box.strides, strict=True)):
            if count > 1:
                axis = next(n for n, each in enumerate(strides) if shape[n] > 1 and each <= step)
                extent[axis], axes[axis], steps[axis] = count, source, step // strides[axis]
        ends = tuple(extent), tuple(axes), tuple(steps)
        return Piece(name, tuple(shape), tuple(start), box.start, *ends)

    def _computed(self, number: int) -> Piece:
        """The piece of a tensor that is the parameter times one number, plus another."""
        (target, shape, dtype), whole = self._forms[number], self.whole
        ends = (torch.full(whole.shape, value, device="cpu", dtype=whole.dtype) for value in (0, 1))
        offset, one = (float(self._made(end)[number].flatten()[0]) for end in ends)
        scale = one - offset
        copied = (scale, offset) == (1.0, 0.0) or scale == 0 or not math.isfinite(one)
        if copied or (shape, dtype) != (whole.shape, whole.dtype):
            raise self._refusal(target, "its elements are not those of the parameter")
        count, every = math.prod(shape), _finite(dtype)
        for first in range(0, min(len(every), count * _CALLS), count):
            values = _filled(every[first : first + count], whole)
            wanted = values.float() * scale  # as copies compute it (csrc/core/layout/dtype.h)
            wanted = wanted + offset if offset else wanted  # -0 + 0 would lose its sign
            if not same_bytes(self._made(values)[number], wanted.to(dtype)):
                raise self._refusal(target, "its elements have different scales or offsets")
        zeros, axes = (0,) * len(shape), tuple(range(len(shape)))
        box = zeros, zeros, tuple(shape), axes, (1,) * len(shape)
        return Piece(target, tuple(shape), *box, affine=(scale, offset))
