"""Maps of parameters, read out of a converter: a function that makes Hugging Face tensors of one
whole Megatron parameter.

The converter is given tensors whose elements say where they lie, and what it returns says where
they went.  A number that tells all elements apart does not fit into one bfloat16, so there is one
tensor for each digit of it.  This needs nothing of the converter but that it is a function of the
tensor: views, copies, indices and numpy are all the same.  What it does is then proved on random
values, for every parameter of the model; where it computes in 16 bits, once on all there are.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wsync import _core
from wsync.families.rules import Piece, key_of, may_step
from wsync.module_tensors import same_bytes
from wsync.probing.boxes import boxes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Convert", "Whole", "converter_of", "is_slimes", "learn"]

Convert = Callable[[str, "Tensor"], list[tuple[str, "Tensor"]]]

MAX_BOXES = 1 << 16  # of one tensor; what has more is no copy of boxes
MAX_STEP = 8  # in which boxes may go through a tensor
_SAMPLE = 61  # elements of a slice that are looked at first
_BLOCK = 1 << 22  # elements of further windows, at most
_PERIOD = 1_048_573  # of the random values: a prime, so that no rows or columns repeat
_BITS = 8  # of a digit: every dtype below has all such integers
# The dtypes of parameters, and for each those in which nothing is lost.
_WIDER = {
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "float32": ("float32", "float64"),
}
_COPIED = 64  # values on which copies of elements are proved, at least
# The same of computed ones: all of 16 bits (see _tile) where a target's elements lie in one run,
# most of them where it takes every n-th.
_COMPUTED = 1 << 17
_RUNS = 1 << 11  # for that, at most: fewer than 64 elements get a part of them
_FEW_BITS = 4  # where a converter computes, and rounds


@dataclass(frozen=True)
class Whole:
    """A parameter that no rank's cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def converter_of(function: Callable[..., Any], config: Any) -> Convert:
    """A converter that is called with a global name and a tensor, and whose answers are checked.

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
                found = list(made)
        except Exception as error:
            raise _core.LayoutError(
                f"{name}: the converter raised {type(error).__name__}: {error}"
            ) from error
        return _checked(name, found)

    return convert


def is_slimes(function: Callable[..., Any]) -> bool:
    """Whether a converter is called as slime's are: it must be given three arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 3


def _checked(name: str, found: Sequence[Any]) -> list[tuple[str, Tensor]]:
    import torch

    outputs: dict[str, Tensor] = {}
    for item in found:
        if not (
            isinstance(item, tuple | list)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], torch.Tensor)
        ):
            raise _core.LayoutError(
                f"{name}: the converter returned {type(item).__name__} {item!r:.80}, where a pair "
                "of a name and a tensor is wanted"
            )
        if item[0] in outputs:
            raise _core.LayoutError(f"{name}: the converter returned {item[0]} twice")
        outputs[item[0]] = item[1].detach()
    if not outputs:
        raise _core.LayoutError(
            f"{name}: the converter returned no tensors: one that holds them back until others "
            "come cannot be learnt"
        )
    return list(outputs.items())


def learn(convert: Convert, wholes: Mapping[str, Whole]) -> dict[str, list[Piece]]:
    """Where the elements of every parameter go, by its global name.

    What a converter does with one parameter is learnt once, and proved on random values; with
    others of the same kind (the name without its numbers, shape and dtype), it is only proved.
    One whole parameter in its own dtype and what is made of it are there at a time, some times
    over.

    Raises:
        LayoutError: the converter does more than to copy elements, or to compute all elements of a
            tensor with one scale and offset; the text names parameter and tensor.
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
        sources = next((k for k, made in known if _difference(outputs, made) < 0), None)
        if sources is None:
            sources, made = _learn_one(convert, name, whole, tile, outputs)
            known.append((sources, made))
        yield (
            name,
            [
                replace(piece, name=target)
                for (target, _), source in zip(outputs, sources, strict=True)
                for piece in source.pieces
            ],
        )


def _learn_one(
    convert: Convert,
    name: str,
    whole: Whole,
    tile: Tensor,
    outputs: Sequence[tuple[str, Tensor]],
) -> tuple[list[_Source], list[Tensor]]:
    """Where what a converter makes of a parameter comes from, and what it makes of the first
    window."""
    reader = _Reader(convert, name, whole)
    values, place = _window(tile, whole, 0), 0
    for sample in (_SAMPLE, None):
        sources = reader.sources(sample)
        made = [source.apply(values) for source in sources]
        place = _difference(outputs, made)
        if place < 0:
            break
    for start in _starts(whole, sources):
        if place >= 0:
            break
        values = _window(tile, whole, start)
        outputs = convert(name, values.clone())
        place = _difference(outputs, [source.apply(values) for source in sources])
    if place < 0:
        return sources, made
    target = outputs[min(place, len(outputs) - 1)][0]
    raise _refusal(name, target, "what it makes depends on the values")


def _starts(whole: Whole, sources: Sequence[_Source]) -> range:
    """Of further windows, so that the elements of each target have enough values together."""
    least = min(math.prod(source.shape) for source in sources)
    computed = any(piece.affine is not None for source in sources for piece in source.pieces)
    room = max(1, min(_RUNS, _BLOCK // math.prod(whole.shape)))
    return range(least, min(_COMPUTED if computed else _COPIED, room * least), least)


def _difference(outputs: Sequence[tuple[str, Tensor]], expected: Sequence[Tensor]) -> int:
    """The first output that is not as expected, or -1."""
    pairs = itertools.zip_longest((tensor.cpu() for _, tensor in outputs), expected)
    for place, (found, wanted) in enumerate(pairs):
        if found is None or wanted is None:
            return place
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            return place
        if not same_bytes(found, wanted):
            return place
    return -1


def _refusal(name: str, target: str, why: str) -> _core.LayoutError:
    return _core.LayoutError(f"{name}: the converter does more to {target} than to copy it: {why}")


def _tile(dtype: torch.dtype) -> Tensor:
    """_PERIOD values of all magnitudes, more of them around 1; of 16 bits: among any 2**17 that
    follow each other are all finite ones."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-1 << 15, 1 << 15, dtype=torch.int16, device="cpu").view(dtype)
        every = every[every.isfinite()]
        draws = range(-(-_PERIOD // len(every)))
        orders = [torch.randperm(len(every), generator=generator, device="cpu") for _ in draws]
        return every[torch.cat(orders)[:_PERIOD]]
    count = (_PERIOD,)
    reach = 1 + 14 * torch.randint(2, count, generator=generator, device="cpu")
    powers = reach * torch.randint(-8, 8, count, generator=generator, device="cpu")
    tile = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
    tile *= powers.float().exp2()
    return tile.to(dtype)


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
    """Reads where the elements go of which a converter makes its tensors.

    An element's number has bits for each axis, enough to count to twice its extent: the step from
    the end of one row to the start of the next is no step along any axis.
    """

    def __init__(self, convert: Convert, name: str, whole: Whole) -> None:
        self._convert = convert
        self._name = name
        self._whole = whole
        if _plain(whole.dtype) not in _WIDER:
            raise _core.LayoutError(
                f"{name}: no converter is learnt for parameters in {whole.dtype}"
            )
        self._zeros = self._run(self._filled(0))
        ones = self._run(self._filled(1))
        self._affine = [
            self._affine_of(target, zero, one)
            for (target, zero), (_, one) in zip(self._zeros, ones, strict=True)
        ]
        copies = all(pair == (1.0, 0.0) for pair in self._affine)
        self._bits = _BITS if copies else _FEW_BITS
        self._units = [1] * len(whole.shape)
        self._digits: list[list[tuple[str, Tensor]]] = []
        for axis in reversed(range(len(whole.shape))):
            self._units[axis] = 1 << len(self._digits) * self._bits
            room = (2 * whole.shape[axis] - 1).bit_length() if whole.shape[axis] > 1 else 0
            for shift in range(0, room, self._bits):
                self._digits.append(self._run(self._digit(axis, shift)))

    def sources(self, sample: int | None) -> list[_Source]:
        """Of all tensors; sample: how many elements of a slice are looked at, None: all."""
        return [
            self._source(place, target, tuple(made.shape), sample)
            for place, (target, made) in enumerate(self._zeros)
        ]

    def _run(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """What the converter makes of a tensor; in form as the first time."""
        found = [(target, made.cpu()) for target, made in self._convert(self._name, tensor)]
        first = getattr(self, "_zeros", found)
        forms = [[(t, made.shape, made.dtype) for t, made in each] for each in (found, first)]
        if forms[0] != forms[1]:
            raise _refusal(
                self._name, first[0][0], "names, shapes or dtypes of what it makes change"
            )
        return found

    def _filled(self, value: int) -> Tensor:
        import torch

        return torch.full(self._whole.shape, value, dtype=self._whole.dtype, device="cpu")

    def _digit(self, axis: int, shift: int) -> Tensor:
        """Some bits of the coordinate that every element has on an axis."""
        import torch

        shape = self._whole.shape
        bits = torch.arange(shape[axis], device="cpu") >> shift & (1 << self._bits) - 1
        ones = (1 for _ in shape[axis + 1 :])
        return (
            bits.to(self._whole.dtype)
            .reshape(-1, *ones)
            .expand(shape)
            .clone(memory_format=torch.contiguous_format)
        )

    def _affine_of(self, target: str, zero: Tensor, one: Tensor) -> tuple[float, float]:
        """(scale, offset) of all elements of a tensor; (1.0, 0.0): they are copied."""
        own = self._whole.dtype
        if _plain(zero.dtype) not in _WIDER[_plain(own)]:
            raise _refusal(self._name, target, f"it makes {zero.dtype} of {own}")
        if not zero.numel():
            raise _refusal(self._name, target, "it has no elements")
        if any(not tensor.eq(tensor.reshape(-1)[0]).all() for tensor in (zero, one)):
            raise _refusal(self._name, target, "its elements are made in several ways")
        offset = float(zero.reshape(-1)[0])
        scale = float(one.reshape(-1)[0]) - offset
        if not math.isfinite(scale) or not math.isfinite(offset) or scale == 0:
            raise _refusal(self._name, target, "its elements are not those of the parameter")
        if zero.dtype != own and (scale, offset) != (1.0, 0.0):
            raise _refusal(self._name, target, f"it computes in {zero.dtype}, and {own} is held")
        return scale, offset

    def _source(
        self, place: int, target: str, shape: tuple[int, ...], sample: int | None
    ) -> _Source:
        import torch

        made = [each[place][1].reshape(shape or (1,)) for each in (self._zeros, *self._digits)]
        affine = scale, offset = self._affine[place]

        def read(places: tuple[int, ...], low: int, high: int) -> Tensor:
            sampled = []
            for each in made:
                rows = each[places][low:high].reshape(high - low, -1)
                every = 1 if sample is None else -(-rows.shape[1] // sample)
                sampled.append(rows[:, ::every])
            numbers = torch.zeros(sampled[0].shape, dtype=torch.int64, device="cpu")
            for number, part in enumerate(sampled[1:]):
                if affine != (1.0, 0.0):
                    part = ((part.double() - offset) / scale).round()
                numbers += part.to(torch.int64) << number * self._bits
            return numbers

        extents = enumerate(self._whole.shape)
        units = {self._units[axis]: axis for axis, extent in extents if extent > 1}
        kept, own = len(shape), None if affine == (1.0, 0.0) else affine
        pieces: list[Piece] = []
        for longest in (MAX_STEP, 1):
            pieces = []
            found = boxes(read, shape or (1,), units, longest)
            for start, extent, axes, steps, number in found:
                if len(pieces) == MAX_BOXES:
                    raise _refusal(self._name, target, f"it falls into more than {MAX_BOXES} boxes")
                first = self._coordinates(target, number, axes, extent)
                box = start[:kept], first, extent[:kept], axes[:kept], steps[:kept]
                pieces.append(Piece(target, shape, *box, affine=own))
            if may_step(pieces):
                break
        return _Source(shape, self._zeros[place][1].dtype, tuple(pieces))

    def _coordinates(
        self, target: str, number: int, axes: Sequence[int], extent: Sequence[int]
    ) -> tuple[int, ...]:
        """Where a box starts that has this number first."""
        start = []
        for unit, size in zip(self._units, self._whole.shape, strict=True):
            place, number = divmod(number, unit) if size > 1 else (0, number)
            start.append(place)
        ends = list(start)
        for axis, count in zip(axes, extent, strict=True):
            if axis >= 0:
                ends[axis] += count - 1
        if number or any(
            not 0 <= end < size for end, size in zip(ends, self._whole.shape, strict=True)
        ):
            raise _refusal(self._name, target, "its elements are mixed")
        return tuple(start)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
