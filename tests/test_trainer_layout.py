"""wsync.layout: a rank's tensors, bound anew for every update."""

import pytest
import torch

from wsync import LayoutError
from wsync.layout import from_tensors, global_name


@pytest.fixture
def tensors():
    return {
        "model.norm.weight": torch.ones(6, dtype=torch.bfloat16),
        "model.proj.weight": torch.arange(12.0).reshape(3, 4),
    }


def test_a_dict_is_a_layout_of_one_rank(tensors):
    layout = from_tensors(tensors)
    assert (layout.rank, layout.ranks, layout.group) == (0, 1, None)
    assert layout.names == tuple(tensors)
    assert layout.layout.names() == list(tensors)
    assert layout.layout.tensor(1) == ("model.proj.weight", "float32", (3, 4), 0)
    assert layout.layout.nbytes == 6 * 2 + 12 * 4


def test_bind_finds_tensors_that_moved(tensors):
    layout = from_tensors(tensors)
    first = layout.bind()
    assert first[1][0] == tensors["model.proj.weight"].data_ptr()
    tensors["model.proj.weight"] = torch.zeros(3, 4)
    assert layout.bind()[1][0] == tensors["model.proj.weight"].data_ptr()


def test_bind_takes_the_trainers_own_weights(tensors):
    layout = from_tensors(tensors)
    backup = {f"module.module.{name}": tensor.clone() for name, tensor in tensors.items()}
    backup["module.module.other"] = torch.zeros(1)
    table = layout.bind(backup)
    assert len(table) == 2
    assert table[0][0] == backup["module.module.model.norm.weight"].data_ptr()


def test_strided_tensors_keep_their_strides():
    tensors = {"a": torch.arange(12.0).reshape(3, 4).t()}
    layout = from_tensors(tensors)
    assert layout.made_from[0][1:4] == ("float32", (4, 3), (1, 4))
    tensors["a"] = tensors["a"].contiguous()
    with pytest.raises(LayoutError, match=r"a: strides \(3, 1\) != \(1, 4\)"):
        layout.bind()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.to(torch.float16), "dtype float16 != float32 of the layout"),
        (lambda t: t[:2], r"shape \(2, 4\) != \(3, 4\) of the layout"),
        (lambda t: t.t().contiguous().t(), r"strides \(1, 3\) != \(4, 1\) of the layout"),
    ],
)
def test_a_parameter_that_changed_is_named(tensors, change, text):
    layout = from_tensors(tensors)
    changed = {**tensors, "model.proj.weight": change(tensors["model.proj.weight"])}
    with pytest.raises(LayoutError, match="model.proj.weight: " + text):
        layout.bind(changed)


def test_a_missing_parameter_is_named(tensors):
    layout = from_tensors(tensors)
    with pytest.raises(LayoutError, match=r"model.norm.weight: .* 1 weights given \(1 of 2"):
        layout.bind({"model.proj.weight": tensors["model.proj.weight"]})
    del tensors["model.proj.weight"]
    with pytest.raises(LayoutError, match=r"model.proj.weight: no longer"):
        layout.bind()


def test_global_names():
    assert global_name("module.module.decoder.x") == "decoder.x"
    assert global_name("decoder.module.x") == "decoder.module.x"
