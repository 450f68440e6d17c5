"""Maps that are read out of converters: functions of one whole parameter, in one process.

What the maps say is applied to arrays, one element after the other, and compared with what the
converter itself makes of them.
"""

import numpy as np
import pytest
import torch

from wsync import LayoutError
from wsync.families import probed_converter
from wsync.families.probed_converter import Whole, converter_of, learn

NAME = "decoder.layers.{}.mlp.weight"


def maps_of(function, shape, dtype=torch.float32, layers=1):
    """What is learnt of a converter that gives tensors by their endings, for some layers."""

    def convert(name, tensor):
        layer = name.split(".")[2]
        return [(f"model.{layer}.{end}", made) for end, made in function(tensor).items()]

    wholes = {NAME.format(layer): Whole(shape, dtype) for layer in range(layers)}
    found = learn(converter_of(convert, None), wholes)
    return {name: [piece.map({}) for piece in pieces] for name, pieces in found.items()}


def applied(maps, values):
    """{target: array} that maps make of a whole parameter, an element after the other."""
    found = {}
    for name, _, shape, start, source, extent, axes, _, *rest in maps:
        out = found.setdefault(name, np.full(shape, np.nan))
        for index in np.ndindex(*extent):
            place = list(source)
            for axis, step in zip(axes, index, strict=True):
                if axis >= 0:
                    place[axis] += step
            scale, offset = rest[:2] if rest and rest[0] else (1.0, 0.0)
            steps = rest[2] if len(rest) > 2 else (1,) * len(start)
            target = tuple(a + i * n for a, i, n in zip(start, index, steps, strict=True))
            assert np.isnan(out[target])
            out[target] = values[tuple(place)] * scale + offset
    return found


COPIES = {
    "as-it-is": ((6, 5), lambda t: {"w": t}),
    "a-scalar": ((), lambda t: {"w": t}),
    "one-element": ((1, 1), lambda t: {"w": t.reshape(1)}),
    "a-vector": ((7,), lambda t: {"w": t[2:]}),
    "halves": ((6, 5), lambda t: dict(zip("ab", t.chunk(2), strict=True))),
    "swapped-columns": ((3, 8), lambda t: {"w": torch.cat([t[:, 4:], t[:, :4]], 1)}),
    "swapped-inside-heads": (
        (12, 3),
        lambda t: {"w": torch.cat(t.view(3, 4, 3).split(2, 1)[::-1], 1).reshape(12, 3)},
    ),
    "alternating-rows": ((6, 5), lambda t: {"gate": t[0::2], "up": t[1::2]}),
    "by-turns": ((6, 5), lambda t: {"w": t.view(2, 3, 5).transpose(0, 1).reshape(6, 5)}),
    "by-turns-transposed": ((6, 5), lambda t: {"w": t.view(3, 2, 5).permute(2, 1, 0).flatten(1)}),
    "by-turns-twice": (
        (4, 6),
        lambda t: {"w": t.view(2, 2, 2, 3).permute(1, 0, 3, 2).reshape(4, 6)},
    ),
    "by-turns-otherwise": (
        (12,),
        lambda t: {
            "w": torch.cat([t[:6].view(3, 2).t().flatten(), t[6:].view(2, 3).t().flatten()])
        },
    ),
    "transposed": ((6, 5), lambda t: {"w": t.t().contiguous()}),
    "three-axes": ((4, 3, 5), lambda t: {"w": t.permute(2, 0, 1)}),
    "folded": ((4, 3, 5), lambda t: {"w": t.reshape(12, 5)}),
    "unfolded": ((12, 5), lambda t: {"w": t.reshape(4, 3, 1, 5)}),
    "flat": ((3, 5), lambda t: {"w": t.flatten()}),
    "upside-down": ((6, 5), lambda t: {"w": t.flip(0)}),
    "repeated": ((2, 5), lambda t: {"w": t.repeat_interleave(3, 0)}),
    "widened": ((6, 5), lambda t: {"w": t.double()}),
    "by-numpy": ((6, 5), lambda t: {"w": torch.from_numpy(np.roll(t.numpy(), 2, 0))}),
    "one-more": ((6,), lambda t: {"w": t + 1}),
    "half": ((6, 5), lambda t: {"w": t * 0.5, "v": t[3:]}),
    "changed-in-place": ((6, 5), lambda t: {"w": t.neg_()}),
}


@pytest.mark.parametrize(("shape", "function"), COPIES.values(), ids=COPIES)
def test_boxes_say_where_a_converter_puts_elements(shape, function):
    (maps,) = maps_of(function, shape).values()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    wanted = {f"model.0.{end}": made for end, made in function(values.clone()).items()}
    found = applied(maps, values.double().numpy())
    assert found.keys() == wanted.keys()
    for name, made in wanted.items():
        assert np.array_equal(found[name].astype(np.float32), made.float().numpy())


def test_a_copy_of_too_many_boxes_is_refused(monkeypatch):
    monkeypatch.setattr(probed_converter, "_BOXES", 50)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(LayoutError, match=r"model\.0\.w: it consists of more than 50 boxes"):
        maps_of(lambda t: {"w": t[order]}, (64, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elements_are_told_apart_in_every_dtype(dtype):
    def split(tensor):
        grouped = tensor.view(4, 6, 16, 96)
        parts = grouped.split([4, 1, 1], 1)
        return {x: part.reshape(-1, 96) for x, part in zip("qkv", parts, strict=True)}

    (maps,) = maps_of(split, (384, 96), dtype).values()
    assert len(maps) == 12
    numbers = np.arange(384 * 96).reshape(384, 96)
    for (name, made), wanted in zip(
        applied(maps, numbers).items(), split(torch.from_numpy(numbers)).values(), strict=True
    ):
        assert np.array_equal(made, wanted), name


def test_what_a_converter_adds_is_said_with_the_map():
    (maps,) = maps_of(lambda t: {"norm": t + 1, "w": t}, (8,), torch.bfloat16).values()
    assert maps[0][8:] == (1.0, 1.0)
    assert len(maps[1]) == 8


def _quantized(tensor):
    scale = tensor.abs().max().clamp(min=1) / 448
    return {"w": (tensor / scale).to(torch.float8_e4m3fn), "scale": scale}


COMPUTED = {
    "sum": (lambda t: {"w": t.sum(0)}, "w"),
    "mean": (lambda t: {"w": t.mean(0)}, "w"),
    "pairs": (lambda t: {"w": t, "v": (t[::2] + t[1::2]) / 2}, "v"),
    "product": (lambda t: {"w": t @ t.t()}, "w"),
    "squares": (lambda t: {"w": t * t}, "w"),
    "rows-of-their-own": (lambda t: {"w": t * torch.arange(1, 7)[:, None]}, "w"),
    "moved-and-more": (lambda t: {"w": t.t() + 1}, "w"),
    "constant": (lambda t: {"w": t, "v": torch.ones(3)}, "v"),
    "padded": (lambda t: {"w": torch.nn.functional.pad(t, (0, 1))}, "w"),
    "narrowed": (lambda t: {"w": t.bfloat16()}, "w"),
    "quantized": (_quantized, "w"),
    "empty": (lambda t: {"w": t, "v": t[:0]}, "v"),
    "in-order": (lambda t: {"w": t[t.norm(dim=1).argsort()]}, "w"),
    "by-sign": (lambda t: {"w": t if t.min() >= 0 else t.flip(0)}, "w"),
    "of-some": (lambda t: {"w": t[t[:, 0] > 0]}, "w"),
    "names-by-values": (lambda t: {f"w{int(t.sum())}": t}, "w"),
    "dice": (lambda t: {"w": t[torch.randperm(6)]}, "w"),
}


@pytest.mark.parametrize(("function", "target"), COMPUTED.values(), ids=COMPUTED)
def test_what_is_more_than_a_copy_is_refused_by_name(function, target):
    torch.manual_seed(1)
    with pytest.raises(
        LayoutError, match=rf"^decoder\.layers\.0\.mlp\.weight: .*model\.0\.{target}"
    ):
        maps_of(function, (6, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", [lambda t: t + 1, lambda t: t * 0.5, lambda t: -3 * t])
def test_what_is_computed_of_every_value_as_copies_do_is_learnt(function, dtype):
    ((piece,),) = maps_of(lambda tensor: {"w": function(tensor)}, (64,), dtype).values()
    scale, offset = piece[8:10]
    zero, one = function(torch.tensor([0.0, 1.0], dtype=dtype)).tolist()
    assert (scale, offset) == (one - zero, zero)


def test_a_layer_that_is_converted_otherwise_is_learnt_on_its_own():
    def convert(name, tensor):
        return [(name, tensor.flip(0) if ".3." in name else tensor)]

    wholes = {NAME.format(layer): Whole((2, 3), torch.float32) for layer in range(5)}
    found = learn(converter_of(convert, None), wholes)
    counts = [len(pieces) for pieces in found.values()]
    assert counts == [1, 1, 1, 2, 1]


def test_layers_of_one_kind_are_learnt_once():
    calls = []

    def convert(name, tensor):
        calls.append(name)
        return [(name, tensor)]

    wholes = {NAME.format(layer): Whole((2, 3), torch.float32) for layer in range(50)}
    learn(converter_of(convert, None), wholes)
    assert len(calls) < 75
    assert set(calls) == wholes.keys()


def test_a_converter_of_slimes_kind_gets_arguments_and_names_as_slime_has_them():
    def convert(args, name, tensor, quantization_config=None):
        assert args == "arguments"
        assert quantization_config is None
        return [(name, tensor)]

    found = converter_of(convert, "arguments")("output_layer.weight", torch.zeros(2))
    assert [name for name, _ in found] == ["module.module.output_layer.weight"]
