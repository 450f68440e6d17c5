"""Parameters that repeat what a checkpoint has once: one is taken, all must be equal."""

import pytest
import torch
from torch import nn

import wsync.megatron
from wsync import _core
from wsync.families.rules import Cut, Rule, RuleError, Target
from wsync.families.tables import Family, Model

# Per query group: its query heads, and their gates, each of which is repeated d times.
NAME = "decoder.layers.0.self_attention.linear_qkv.weight"
GATES = Rule(
    NAME.replace("0", "{layer}"),
    "*(g (query:1 n | gate:1 n) d) h",
    Target("model.layers.{layer}.q_proj.weight", "(g n query d) h"),
    Target("model.layers.{layer}.g_proj.weight", "(g n gate) h", equal="d"),
)
SIZES = {"g": 2, "n": 3, "d": 4, "h": 5, "heads": 6, "layers": 1}


def layout_of(monkeypatch, tensor, tensor_cut):
    """The layout of a rank that holds the tensor, in a model of the one rule."""
    module = nn.Module()
    home = module
    for part in NAME.split(".")[:-1]:
        home.add_module(part, nn.Module())
        home = home._modules[part]
    module.decoder.layers.get_submodule("0").layer_number = 1
    home.weight = nn.Parameter(tensor)
    spec = Model(Family("gates", (GATES,)), SIZES, False)
    monkeypatch.setattr(wsync.megatron, "read_model", lambda *arguments, **options: spec)
    ranks = wsync.megatron.Ranks(tensor=tensor_cut)
    monkeypatch.setattr(wsync.megatron.Ranks, "current", staticmethod(lambda: ranks))
    return wsync.megatron.layout(module, None)


def whole():
    """(unsharded parameter, query rows, gate rows)."""
    queries = torch.randn(2, 3, 4, 5)
    gates = torch.randn(2, 3, 1, 5)
    parameter = torch.cat([queries, gates.expand(2, 3, 4, 5)], 1).reshape(-1, 5)
    return parameter, queries.reshape(-1, 5), gates.reshape(-1, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_rows_is_taken(monkeypatch, dtype):
    parameter, queries, gates = (tensor.to(dtype) for tensor in whole())
    parameter[44:48] = gates[5] = torch.nan  # equal bits are equal
    mine = layout_of(monkeypatch, parameter, Cut())
    sources = _core.BufferTable.of(mine.bind(), mine.tensors())
    found = {
        "model.layers.0.q_proj.weight": torch.zeros_like(queries),
        "model.layers.0.g_proj.weight": torch.zeros_like(gates),
    }
    table = _core.describe(list(found.values()), list(found))
    builder = _core.LayoutBuilder()
    builder.add_tensors(list(found), table)
    stream = _core.Stream()
    route = _core.Route(mine.layout, builder.build())
    stream.copy(route, 0, 0, sources, _core.BufferTable.of(table, list(found.values())))
    stream.synchronize(60.0)
    stream.close()
    for tensor, want in zip(found.values(), (queries, gates), strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_differ_are_named_at_every_update(monkeypatch, rank):
    parameter, *_ = whole()
    part = parameter.chunk(2)[rank].clone()
    mine = layout_of(monkeypatch, part, Cut(rank, 2))
    mine.bind()
    mine.tensors()[0].data[:12] += 1.0  # query rows may be anything
    mine.bind()
    mine.tensors()[0].data[17, 3] += 1.0
    text = f"{NAME}: elements 16 to 19 of dimension 0 must be equal"
    with pytest.raises(_core.LayoutError, match=text):
        mine.bind()
    backup = {f"module.{NAME}": part.clone()}
    backup[f"module.{NAME}"][17] = backup[f"module.{NAME}"][16]
    mine.bind(backup)
    backup[f"module.{NAME}"][23, 0] += 1.0
    with pytest.raises(_core.LayoutError, match="elements 20 to 23"):
        mine.bind(backup)


def test_equal_rows_on_several_ranks_are_refused(monkeypatch):
    parameter, *_ = whole()
    sizes = {**SIZES, "g": 1, "n": 1, "heads": 1}
    monkeypatch.setitem(globals(), "SIZES", sizes)
    text = f"{NAME}: .*the 4 elements along 'd', which are equal, are on several ranks"
    with pytest.raises(_core.LayoutError, match=text):
        layout_of(monkeypatch, parameter[:2], Cut(2, 4))


@pytest.mark.parametrize(
    ("view", "target", "options"),
    [("a b", "a b", {}), ("a b", "a", {}), ("a b", "a", {"stored": ((0,), (1,))})],
)
def test_axes_that_cannot_be_equal(view, target, options):
    axis = {"a b": "b", "a": "b" if options else "c"}[target]
    with pytest.raises(RuleError, match=f"t: '{axis}' is no axis that it can do without"):
        Rule("w", view, Target("t", target, equal=axis), **options)
