"""Maps of parameters, read out of a converter: a function that makes Hugging Face tensors of one
whole Megatron parameter.

The converter is given tensors whose elements say where they lie, and what it returns says where
they went.  A number that tells all elements apart does not fit into one bfloat16, so there is one
tensor for each digit of it.  This needs nothing of the converter but that it is a function of the
tensor: views, copies, indices and numpy are all the same.  A tensor may also be the parameter times
one number, plus another.  What the converter does is then proved on random values, for every
parameter of the model; where it computes in 16 bits, once on all there are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.rules import Piece, key_of, may_step
from wsync.module_tensors import same_bytes
from wsync.probing.boxes import boxes, units_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Convert = Callable[[str, "Tensor"], list[tuple[str, "Tensor"]]]

_BOXES = 1 << 16  # of one tensor; what has more is no copy of boxes
_STEP = 8  # in which boxes may go through a tensor, at most
_SAMPLE = 61  # elements of a slice that are looked at
_PERIOD = 1_048_573  # of the random values: a prime, so that no rows or columns repeat
# On so many values it is proved what is computed: on all of 16 bits (see _tile), in so many calls.
_COMPUTED = 1 << 17
_CALLS = 1 << 11


@dataclass(frozen=True)
class Whole:
    """A parameter that no rank's cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def converter_of(function: Callable[..., Any], config: Any) -> Convert:
    """A converter that is called with a global name and a tensor.

    function: convert(name, tensor), or one of slime's kind, convert(args, name, tensor), which is
    called with `config` and with names as slime has them, "module.module." before all.
    """
    slimes = is_slimes(function)

    def convert(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        import torch

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
                f"{name}: the converter returned no tensors: one that holds them back until others "
                "come cannot be learnt"
            )
        return found

    return convert


def is_slimes(function: Callable[..., Any]) -> bool:
    """Whether a converter is called as slime's are: it must be given three arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 3


def learn(convert: Convert, wholes: Mapping[str, Whole]) -> dict[str, list[Piece]]:
    """Where the elements of every parameter go, by its global name.

    What a converter does with one parameter is learnt once, and proved on random values; with
    others of the same kind (the name without its numbers, shape and dtype), it is only proved.
    One whole parameter in its own dtype and what is made of it are there at a time, some times
    over.

    Raises:
        LayoutError: the converter does more than to copy elements, or to make a tensor of the
            parameter with one scale and offset; the text names parameter and tensor.
    """
    import torch

    kinds: dict[tuple[str, Whole], list[str]] = {}
    for name, whole in wholes.items():
        kinds.setdefault((key_of(name), whole), []).append(name)
    found: dict[str, list[Piece]] = {}
    tiles: dict[torch.dtype, Tensor] = {}
    with torch.device("cpu"):
        for (_, whole), names in kinds.items():
            if whole.dtype not in tiles:
                tiles[whole.dtype] = _tile(whole.dtype)
            found |= _learn_kind(convert, whole, names, tiles[whole.dtype])
    return found


def _learn_kind(
    convert: Convert, whole: Whole, names: Iterable[str], tile: Tensor
) -> Iterator[tuple[str, list[Piece]]]:
    values = _window(tile, whole, 0)
    known: list[tuple[list[_Source], list[Tensor]]] = []
    for name in names:
        outputs = convert(name, values.clone())
        sources = next((k for k, made in known if _difference(outputs, made) is None), None)
        if sources is None:
            sources = _Reader(convert, name, whole).sources()
            _prove(convert, name, whole, tile, sources)
            known.append((sources, [source.apply(values) for source in sources]))
        targets = zip(outputs, sources, strict=True)
        yield name, [replace(p, name=to) for (to, _), source in targets for p in source.pieces]


def _prove(
    convert: Convert, name: str, whole: Whole, tile: Tensor, sources: Sequence[_Source]
) -> None:
    """LayoutError where a converter makes something else of random values."""
    computed = any(piece.affine for source in sources for piece in source.pieces)
    count = max(1, math.prod(whole.shape))
    calls = min(_CALLS, -(-_COMPUTED // count)) if computed else 1
    for call in range(calls):
        values = _window(tile, whole, call * count)
        outputs = convert(name, values.clone())
        wrong = _difference(outputs, [source.apply(values) for source in sources])
        if wrong is not None:
            raise _refusal(name, wrong, "what it makes depends on the values, or is mixed of them")


def _difference(outputs: Sequence[tuple[str, Tensor]], expected: Sequence[Tensor]) -> str | None:
    """The first output that is not as expected, or None."""
    if len(outputs) != len(expected):
        return outputs[-1][0]
    for (target, found), wanted in zip(outputs, expected, strict=True):
        same = (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if not same or not same_bytes(found, wanted):
            return target
    return None


def _refusal(name: str, target: str, why: str) -> _core.LayoutError:
    return _core.LayoutError(f"{name}: the converter does more to {target} than to copy it: {why}")


def _tile(dtype: torch.dtype) -> Tensor:
    """_PERIOD values of all magnitudes; of 16 bits: among any 2**17 that follow each other are all
    finite ones."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if dtype.itemsize == 2:
        every = torch.arange(-1 << 15, 1 << 15, dtype=torch.int16, device="cpu").view(dtype)
    else:
        drawn = torch.randint(
            *(-1 << 31, 1 << 31, (_PERIOD,)),
            dtype=torch.int32,
            device="cpu",
            generator=generator,
        )
        every = drawn.view(dtype)
    every = every[every.isfinite()]
    draws = range(0, _PERIOD, len(every))
    orders = [torch.randperm(len(every), generator=generator, device="cpu") for _ in draws]
    return every[torch.cat(orders)[:_PERIOD]]


def _window(tile: Tensor, whole: Whole, start: int) -> Tensor:
    """A whole parameter of these values, from one on."""
    end = start + math.prod(whole.shape)
    rounds = -(-end // _PERIOD)
    return (tile if rounds == 1 else tile.repeat(rounds))[start:end].reshape(whole.shape)


@dataclass(frozen=True)
class _Source:
    """Where the elements of a tensor come from: boxes of the parameter, and what is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def apply(self, values: Tensor) -> Tensor:
        """The tensor that is made of a whole parameter."""
        import torch

        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        strides = values.stride()
        for piece in self.pieces:
            first = sum(a * stride for a, stride in zip(piece.source_start, strides, strict=True))
            steps = [strides[axis] if axis >= 0 else 0 for axis in piece.axes]
            part = values.as_strided(piece.extent, steps, values.storage_offset() + first)
            if piece.affine is not None:  # as copies compute it (csrc/core/layout/dtype.h)
                scale, offset = piece.affine
                part = part.float() * scale
                part = part + offset if offset else part  # -0 + 0 would lose its sign
            ends = zip(piece.target_start, piece.extent, piece.steps, strict=True)
            found[tuple(slice(at, at + n * step, step) for at, n, step in ends)] = part
        return found


class _Reader:
    """Reads where a converter puts the elements of a parameter."""

    def __init__(self, convert: Convert, name: str, whole: Whole) -> None:
        import torch

        from wsync.probing.codes import WIDE, kind_of
        from wsync.probing.numbering import Numbering, Source

        if kind_of(whole.dtype) != WIDE or whole.dtype.itemsize > 4:
            raise _core.LayoutError(
                f"{name}: no converter is learnt for parameters in {whole.dtype}"
            )
        self._name, self._whole, self._convert = name, whole, convert
        self._forms: list[tuple[str, torch.Size]] = []
        self._zeros = self._made(torch.zeros(whole.shape, dtype=whole.dtype, device="cpu"))
        self._ones = self._made(torch.ones(whole.shape, dtype=whole.dtype, device="cpu"))
        self._units = units_of(whole.shape)[:-1]
        source = Source(name, whole.dtype, whole.shape)
        numbering = Numbering([source], {})
        # What is made of each digit, and what that adds to the number of an element.
        self._digits: list[tuple[int, list[Tensor]]] = []
        for call, digit in enumerate(numbering.digits[name], numbering.naming):
            tensor = numbering.tensor(source, call).contiguous()
            self._digits.append((digit.weight * self._units[digit.axis], self._made(tensor)))

    def sources(self) -> list[_Source]:
        """Of all tensors."""
        return [self._source(place, target) for place, (target, _) in enumerate(self._forms)]

    def _made(self, tensor: Tensor) -> list[Tensor]:
        """What the converter makes of a tensor; in form as the first time."""
        made = self._convert(self._name, tensor)
        forms = [(target, each.shape) for target, each in made]
        self._forms = self._forms or forms
        if forms != self._forms:
            raise self._refusal(self._forms[0][0], "names or shapes of what it makes change")
        return [each for _, each in made]

    def _refusal(self, target: str, why: str) -> _core.LayoutError:
        return _refusal(self._name, target, why)

    def _source(self, place: int, target: str) -> _Source:
        import torch

        from wsync.probing.codes import WIDE, kind_of

        zero, one, whole = self._zeros[place], self._ones[place], self._whole
        shape, dtype = tuple(zero.shape), zero.dtype
        if kind_of(dtype) != WIDE or torch.promote_types(dtype, whole.dtype) != dtype:
            raise self._refusal(target, f"it makes {dtype} of {whole.dtype}")
        if not zero.numel():
            raise self._refusal(target, "it has no elements")
        offset = float(zero.reshape(-1)[0])
        scale = float(one.reshape(-1)[0]) - offset
        if (scale, offset) == (1.0, 0.0):
            return _Source(shape, dtype, tuple(self._copies(place, target, shape)))
        same = (shape, dtype) == (whole.shape, whole.dtype)
        if not same or scale == 0 or not math.isfinite(scale + offset):
            raise self._refusal(target, "its elements are not those of the parameter")
        zeros, axes, steps = (0,) * len(shape), tuple(range(len(shape))), (1,) * len(shape)
        piece = Piece(target, shape, zeros, zeros, shape, axes, steps, affine=(scale, offset))
        return _Source(shape, dtype, (piece,))

    def _copies(self, place: int, target: str, shape: tuple[int, ...]) -> list[Piece]:
        import torch

        from wsync.probing.codes import decode

        def rows(made: Sequence[Tensor], places: tuple[int, ...], low: int, high: int) -> Tensor:
            found = made[place].reshape(shape or (1,))[places][low:high].reshape(high - low, -1)
            return found[:, :: -(-found.shape[1] // _SAMPLE)]

        def read(places: tuple[int, ...], low: int, high: int) -> Tensor:
            numbers = torch.zeros_like(rows(self._zeros, places, low, high), dtype=torch.int64)
            for weight, made in self._digits:
                digits = decode(rows(made, places, low, high))
                if digits.min() < 0:
                    raise self._refusal(target, "its elements are not those of the parameter")
                numbers += weight * digits
            return numbers

        extents = enumerate(self._whole.shape)
        units = {self._units[axis]: axis for axis, extent in extents if extent > 1}
        kept = slice(len(shape))
        pieces: list[Piece] = []
        for longest in (_STEP, 1):
            pieces = []
            for start, extent, axes, steps, number in boxes(read, shape or (1,), units, longest):
                if len(pieces) == _BOXES:
                    raise self._refusal(target, f"it falls into more than {_BOXES} boxes")
                first = self._coordinates(target, number, axes, extent)
                box = start[kept], first, extent[kept], axes[kept], steps[kept]
                pieces.append(Piece(target, shape, *box))
            if may_step(pieces):
                break
        return pieces

    def _coordinates(
        self, target: str, number: int, axes: Sequence[int], extent: Sequence[int]
    ) -> tuple[int, ...]:
        """Where a box starts that has this number first."""
        start = []
        for unit in self._units:
            place, number = divmod(number, unit)
            start.append(place)
        counts = dict(zip(axes, extent, strict=True))
        ends = (at + counts.get(axis, 1) for axis, at in enumerate(start))
        if any(end > size for end, size in zip(ends, self._whole.shape, strict=True)):
            raise self._refusal(target, "its elements are mixed")
        return tuple(start)
