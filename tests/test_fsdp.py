"""Layouts of FSDP trainers: real torch sharding over gloo, every byte compared.

The trainer's weights are known, so each shard of the merged layout must hold the bytes of its box;
where torch can, its own `full_tensor()` confirms the known weights.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.procs import Ranks

import wsync
from wsync.families.runtime_names import RuntimeNames
from wsync.fsdp import layout, plain_name
from wsync.layout import from_tensors

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from support import fsdp_cases as cases

TESTS = str(Path(__file__).parent)


def _ranks(count: int) -> Iterator[Ranks]:
    with Ranks(count, path=[TESTS], modules=["support.fsdp_cases"]) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from _ranks(4)


TIED = {"tie_word_embeddings": True}
LAYOUTS = {
    "dense": ("dense", "fsdp2", {}),
    "dense-tied": ("dense", "fsdp2", TIED),
    "dense-columns": ("dense", "fsdp2-dim1", {}),
    "dense-tp": ("dense", "tp", {}),
    "moe": ("moe", "fsdp2", {}),
    "moe-fused": ("fused", "fsdp2", {}),
}
MESHES = {
    "dense-hsdp": ("dense", "hsdp", {}),
    "dense-hsdp-tied": ("dense", "hsdp", TIED),
    "dense-fsdp-tp": ("dense", "fsdp-tp", {}),
    "moe-hsdp": ("moe", "hsdp", {}),
    "moe-fsdp-tp": ("moe", "fsdp-tp", {}),
    "moe-fused-hsdp": ("fused", "hsdp", {}),
    "moe-fused-fsdp-tp": ("fused", "fsdp-tp", {}),
}
FLAT = {
    "flat": ("dense", "fsdp1", {}),
    "flat-orig": ("dense", "fsdp1-orig", {}),
    "flat-tied": ("dense", "fsdp1-orig", TIED),
    "flat-moe": ("moe", "fsdp1", {}),
    "flat-fused": ("fused", "fsdp1", {}),
    "flat-fused-orig": ("fused", "fsdp1-orig", {}),
}


def _matches(ranks: Ranks, case: Any) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = ranks.run(cases.layout_matches, *case)
    for fact in facts:
        assert all(count >= fact["tensors"] > 20 for count in fact["shards"])
        assert fact["borrowed"], "a shard was copied"
    return facts


@pytest.mark.parametrize("case", [*LAYOUTS.values(), *MESHES.values()], ids=[*LAYOUTS, *MESHES])
def test_shards(four: Ranks, case: Any) -> None:
    _matches(four, case)


@pytest.mark.parametrize("case", FLAT.values(), ids=FLAT)
def test_flat_parameters_of_fsdp1(four: Ranks, case: Any) -> None:
    _matches(four, case)


def test_replicas_are_the_same_boxes_on_several_ranks(four: Ranks) -> None:
    sharded = _matches(four, LAYOUTS["dense"])
    hybrid = _matches(four, MESHES["dense-hsdp"])
    flat = _matches(four, ("dense", "fsdp1-hybrid", {}))
    assert hybrid[0]["mine"] == hybrid[2]["mine"] > 0
    assert sum(fact["mine"] for fact in hybrid) == hybrid[0]["shards"][0]
    # two replicas of halves instead of quarters
    assert hybrid[0]["shards"][0] <= sharded[0]["shards"][0]
    assert flat[0]["mine"] == flat[2]["mine"] > 0


def test_ranks_without_rows_take_part(four: Ranks) -> None:
    facts = _matches(four, LAYOUTS["moe-fused"])
    # five experts over four ranks: 2, 2, 1, 0
    assert [fact["empty"] > 0 for fact in facts] == [False, False, False, True]


@pytest.mark.parametrize(
    "how",
    [
        "fsdp1-trained",
        "fsdp1-trained-whole",
        "fsdp1-orig",
        "fsdp1-orig-whole",
        "fsdp1-orig-trained",
    ],
)
def test_parameters_of_fsdp1_that_are_assigned_are_seen(two: Ranks, how: str) -> None:
    for shards in two.run(cases.assigned_matches, how):
        assert min(shards) > 20


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1", "fsdp1-orig"])
def test_training_is_seen(two: Ranks, how: str) -> None:
    for fact in two.run(cases.trained_matches, "dense", how):
        assert fact["shards"] >= fact["changed"] > 20


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("fsdp1", "ShardedTensor"),
        ("fsdp1-orig", "ShardedTensor"),
        ("fsdp1-mesh", "DTensor"),
        ("fsdp1-mesh-orig", "DTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_state_dicts_of_fsdp1(four: Ranks, how: str, kind: str, tied: bool) -> None:
    for fact in four.run(cases.state_dict_matches, how, tied):
        assert fact["kinds"] == [kind]
        assert fact["shards"] > 20


def _played(
    mesh_shape: tuple[int, ...], placements: Any, whole: torch.Tensor, make: Any = layout
) -> list[Any]:
    """The layout and the local tensor of every rank of a mesh that exists in name only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    count = math.prod(mesh_shape)
    for rank in range(count):
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            found.append((make({"w": tensor}).layout, tensor._local_tensor))
        finally:
            dist.destroy_process_group()
    return found


def _covers(played: list[Any], whole: torch.Tensor) -> None:
    seen = torch.zeros_like(whole)
    for built, local in played:
        if local.numel() == 0:
            assert built.tensor_count == 0
            continue
        assert built.tensor(0)[:3] == ("w", "int64", tuple(whole.shape))
        count = 0
        for _, _, offset, start, extent, strides, _ in built.shards(0):
            box = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
            steps = [stride // 8 for stride in strides]
            view = torch.as_strided(local, extent, steps, local.storage_offset() + offset // 8)
            assert torch.equal(view, whole[box]), (box, offset)
            seen[box] += 1
            count += view.numel()
        assert count == local.numel()
    assert bool((seen > 0).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 12])
def test_any_order_of_placements(rows: int) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = torch.arange(rows * 6).reshape(rows, 6)
    meshes: list[tuple[tuple[int, ...], Any]] = [
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 3), [Shard(0), Shard(1)]),
        ((3, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ]
    strided: list[tuple[tuple[int, ...], Any]] = [
        ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((2, 2, 3), [Replicate(), _StridedShard(0, split_factor=3), Shard(0)]),
        ((2, 2, 3), [Shard(0), _StridedShard(0, split_factor=3), Shard(0)]),
    ]
    for shape, placements in strided if rows % 12 == 0 else []:
        _covers(_played(shape, placements, whole), whole)
        text = r"w: \(.*_StridedShard.* are not placements of FSDP2"
        with pytest.raises(wsync.UnsupportedError, match=text):
            _played((*shape[:-1], 2), placements, whole)
    for shape, placements in meshes:
        _covers(_played(shape, placements, whole), whole)


def test_fsdp2_over_tensor_parallelism_whose_rows_do_not_divide() -> None:
    with contextlib.contextmanager(_ranks)(6) as six:
        for found in six.run(cases.uneven_rows, [1, 7, 13, 19, 26, 50257]):
            assert found == [True] * 6


@pytest.mark.parametrize("counts", [(2, 3, 1, 2), (8, 0, 0, 0), (2, 2, 2, 2), (0, 2, 4, 2)])
@pytest.mark.parametrize("said", [True, False])
def test_megatron_fsdp_cuts_unevenly(four: Ranks, counts: tuple[int, ...], said: bool) -> None:
    """Of which some ranks have as many rows as an even cut would give them."""
    found = four.run(cases.megatron_fsdp_uneven_rows, counts, said)
    if said or len({*counts}) == 1:
        assert found == [([*map(float, range(8))] * 2, "")] * 4
    else:
        unsaid = "the share of this rank (if Megatron-FSDP has cut it"
        assert any(unsaid in text for _, text in found)


def test_megatron_fsdp_over_tensor_parallelism(four: Ranks) -> None:
    pytest.importorskip("megatron.core.distributed.fsdp", reason="megatron-core has none")
    for found in four.run(cases.megatron_fsdp_rows):
        assert found == list(range(16))


def test_wrappers_are_taken_off_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, state = cases.build("dense")
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    model = torch.compile(model, backend="eager")
    found = layout(model)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert sorted(found.layout.names()) == sorted(state)
    assert plain_name("_orig_mod._fsdp_wrapped_module.model.x._checkpoint_wrapped_module.y") == (
        "model.x.y"
    )


def test_persistent_buffers_are_weights_and_others_are_not() -> None:
    model = torch.nn.Module()
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model.register_buffer("none", None)
    assert layout(model).layout.names() == ["kept"]


def _linears() -> Any:
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})


@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_of_two_names_is_delivered_under_both(tied: bool) -> None:
    """An engine has both; whether they are one tensor may change, as long as each is delivered."""
    model = _linears()
    if tied:
        model["b"].weight = model["a"].weight
    found = layout(model)
    assert found.layout.names() == ["a.weight", "b.weight", "c.weight"]
    table = found.bind()
    assert (table[0][0] == table[1][0]) == tied
    model["b"].weight = model["c"].weight
    table = found.bind()
    assert table[0][0] == model["a"].weight.data_ptr()
    assert table[1][0] == table[2][0] == model["c"].weight.data_ptr()


def test_a_name_that_no_unit_of_fsdp1_has_is_refused() -> None:
    with contextlib.contextmanager(_ranks)(1) as one:
        said = one.run(cases.shared_by_units)
    assert all(text.startswith("LayoutError: b.weight: two FSDP1 units share") for text in said)


class _Tied(torch.nn.Module):
    """The head is registered first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        head = torch.nn.Linear(4, 8, bias=False)
        if first:
            self.lm_head = head
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(8, 4)})
        if not first:
            self.lm_head = head
        head.weight = self.model["embed_tokens"].weight


@pytest.mark.parametrize("first", [False, True])
def test_a_tied_head_goes_by_the_name_of_the_embedding(first: bool, two: Ranks) -> None:
    tied, untied = (types.SimpleNamespace(tie_word_embeddings=each) for each in (True, False))
    model = _Tied(first)
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(layout(model, untied).layout.names()) == names
    found = layout(model, tied)
    assert found.layout.names() == ["model.embed_tokens.weight"]
    model.lm_head.weight = torch.nn.Parameter(torch.randn(8, 4))
    with pytest.raises(
        wsync.LayoutError, match=r"^lm_head\.weight: it shared a tensor with model\."
    ):
        found.bind()
    with pytest.raises(
        wsync.LayoutError, match=r"^lm_head\.weight: it is a separate parameter, but"
    ):
        layout(model, tied)
    for use_orig in (False, True):
        for found in two.run(cases.tied_names, first, use_orig):
            assert found == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("outer", [False, True])
def test_a_head_of_its_own_that_the_texts_configuration_knows_is_delivered(outer: bool) -> None:
    """The outer configuration of a vision-language model may say what its class does by default."""
    model = _Tied(True)
    names = {"language_model.lm_head.weight", "model.embed_tokens.weight"}
    text = transformers.Qwen2Config(tie_word_embeddings=not outer)
    config = transformers.InternVLConfig(text_config=text, tie_word_embeddings=outer)
    assert set(layout(model, config).layout.names()) == names
    model.lm_head.weight = torch.nn.Parameter(torch.randn(8, 4))
    assert set(layout(model, config).layout.names()) == names
    assert set(layout(model.state_dict(), config).layout.names()) == names


def test_a_tied_head_of_a_vision_language_model_goes_by_the_name_of_the_embedding() -> None:
    text = transformers.Qwen2Config(tie_word_embeddings=True)
    config = transformers.InternVLConfig(text_config=text, tie_word_embeddings=True)
    found = layout(_Tied(True), config)
    assert found.layout.names() == ["model.embed_tokens.weight"]


def test_a_module_that_was_replaced_is_read_anew() -> None:
    model = _linears()
    found = layout(model)
    model["b"] = torch.nn.Linear(3, 3, bias=False)
    assert found.bind()[1][0] == model["b"].weight.data_ptr()
    model["b"] = torch.nn.Linear(3, 3)
    for _ in range(2):
        with pytest.raises(
            wsync.LayoutError, match=r"b\.bias: it has changed since the layout was"
        ):
            found.bind()
    model["b"] = torch.nn.Linear(3, 3, bias=False)
    del model["a"].weight
    with pytest.raises(wsync.LayoutError, match=r"a\.weight: "):
        found.bind()


@pytest.mark.parametrize("original", [True, False])
def test_buffers_that_fsdp1_casts_are_sent_as_its_state_dicts_have_them(
    two: Ranks, original: bool
) -> None:
    for found in two.run(cases.cast_buffers, original):
        assert found == [["torch.float32", "torch.float32", "torch.int64"]] * 3


@pytest.mark.parametrize("how", ["fsdp1", "fsdp1-orig"])
def test_what_lies_inside_of_a_flat_unit_has_no_layout(how: str, two: Ranks) -> None:
    for texts in two.run(cases.parts_of_a_flat_unit, how):
        assert all("it is flattened into an FSDP unit around the given" in text for text in texts)


def test_a_module_inside_of_a_unit_of_fsdp2_is_read_from_its_shards(two: Ranks) -> None:
    for shards in two.run(cases.part_of_a_unit):
        assert shards > 20


def test_extra_state_of_modules_is_no_tensor() -> None:
    class Scaled(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1.0}

        def set_extra_state(self, state: Any) -> None: ...

    layers = {name: Scaled(2, 3, False) for name in ("embed_tokens", "lm_head")}
    model = torch.nn.ModuleDict(layers)
    model["lm_head"].weight = model["embed_tokens"].weight
    config = types.SimpleNamespace(tie_word_embeddings=True)
    layout(model, config).bind(model.state_dict())  # which wants none of it
    text = r"embed_tokens\._extra_state \(dict\): not a torch tensor"
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        layout(model.state_dict(), config)


def test_a_tied_head_in_a_state_dict_has_the_values_of_the_embedding() -> None:
    config = types.SimpleNamespace(tie_word_embeddings=True)
    embedding = torch.randn(8, 4)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    found = layout(weights, config)
    assert found.layout.names() == ["model.embed_tokens.weight"]
    weights["lm_head.weight"][7, 3] = -0.0
    text = r"lm_head\.weight: it has values of its own, but the configuration says tied embeddings"
    for call in (found.bind, lambda: layout(weights, config)):
        with pytest.raises(wsync.LayoutError, match=text):
            call()


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "names for a model without config"),
        (cases.config("dense"), "names for the family 'qwen3'"),
    ],
)
def test_fused_experts_without_a_rule_are_refused(config: Any, text: str) -> None:
    with pytest.raises(wsync.UnsupportedError, match=f"{FUSED}: .*{text}"):
        layout({FUSED: torch.ones(5, 72, 64)}, config)


_LAYER = "model.layers.0."
_SEEN = "model.language_model.layers.0.mlp.experts."
_ATTENTION = {f"{_LAYER}self_attn.{name}_proj.weight": (16, 8) for name in "qkvo"}
_NORMS = {f"{_LAYER}self_attn.{name}_norm.weight": (4,) for name in "qk"}
_EXPERTS = {
    f"{_LAYER}mlp.gate.weight": (2, 8),
    f"{_LAYER}mlp.experts.gate_up_proj": (2, 6, 8),
    f"{_LAYER}mlp.experts.down_proj": (2, 8, 3),
}
_MIXTRAL = {
    "model.embed_tokens.weight": (32, 8),
    **{f"{_LAYER}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")},
    **_ATTENTION,
    **_EXPERTS,
}
_WIDE = {f"{_LAYER}self_attn.q_norm.weight": (16,)}
_VISION = {"model.language_model.embed_tokens.weight": (32, 8)}
_DEEPSTACK = {**_VISION, "model.visual.deepstack_merger_list.0.norm.weight": (8,)}
_TURNED = {f"{_SEEN}gate_up_proj": (2, 8, 6), f"{_SEEN}down_proj": (2, 3, 8)}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (
            _MIXTRAL | _NORMS,
            {f"{_LAYER}mlp.experts.1.up_proj.weight": (3, 8), f"{_LAYER}mlp.gate.weight": (2, 8)},
        ),
        (
            _MIXTRAL,
            {
                f"{_LAYER}block_sparse_moe.experts.1.w2.weight": (8, 3),
                f"{_LAYER}block_sparse_moe.gate.weight": (2, 8),
            },
        ),
        (  # a rank without the embedding
            {name: shape for name, shape in _MIXTRAL.items() if "embed_tokens" not in name},
            {f"{_LAYER}block_sparse_moe.experts.1.w2.weight": (8, 3)},
        ),
        (_MIXTRAL | _WIDE, _MIXTRAL | _WIDE),  # OLMoE or MiniMax-M2
        (_EXPERTS, _EXPERTS),  # a part of a model
        (_MIXTRAL | {f"{_LAYER}self_attn.sinks": (4,)}, _MIXTRAL),
        (
            {**_VISION, "model.visual.merger.ln_q.weight": (8,), "lm_head.weight": (32, 8)},
            {
                "model.embed_tokens.weight": (32, 8),
                "visual.merger.ln_q.weight": (8,),
                "lm_head.weight": (32, 8),
            },
        ),
        *(
            (
                {**_VISION, f"model.multi_modal_projector.{part}.weight": (8,)},
                {
                    "language_model.model.embed_tokens.weight": (32, 8),
                    f"multi_modal_projector.{part}.weight": (8,),
                },
            )
            for part in ("mm_soft_emb_norm", "linear", "patch_merger.merging_layer", "layernorm")
        ),
        # transformers 5 has other axes than the checkpoint, and 4.57 has the same
        (
            {**_DEEPSTACK, f"{_SEEN}gate_up_proj": (2, 6, 8), f"{_SEEN}down_proj": (2, 8, 3)},
            _DEEPSTACK | _TURNED,
        ),
        (_DEEPSTACK | _TURNED, _DEEPSTACK | _TURNED),
    ],
)
def test_a_dict_tells_what_transformers_has_made(
    shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = from_tensors(tensors).layout
    facts = [found.tensor(index) for index in range(found.tensor_count)]
    delivered = {name: shape for name, _, shape, _ in facts}
    assert expected.items() <= delivered.items()
    assert sum(map(math.prod, delivered.values())) == sum(map(math.prod, shapes.values()))
    known, views = RuntimeNames.of_shapes(shapes), {}
    for name, tensor in tensors.items():
        views |= known.views(name, tensor)
        if delivered.get(name, shapes[name]) != shapes[name]:
            assert torch.equal(views[name], tensor.mT)
    assert {name: tuple(view.shape) for name, view in views.items()} == delivered


def test_a_dict_is_laid_out_as_its_model() -> None:
    model, state = cases.build("fused")
    found = from_tensors(dict(model.named_parameters()))
    assert found.layout.to_bytes() == layout(model).layout.to_bytes()
    names = {found.layout.tensor(index).name for index in range(found.layout.tensor_count)}
    assert names == state.keys()


@pytest.mark.parametrize(("local", "dimension"), [(True, 1), (False, 0)])
def test_partial_sums_are_refused_by_name(four: Ranks, local: bool, dimension: int) -> None:
    for text in four.run(cases.partial_error, local):
        assert text.startswith(
            f"UnsupportedError: model.norm.weight: mesh dim {dimension} has placement Partial"
        )


@pytest.mark.parametrize("how", ["fsdp1", "fsdp1-orig"])
def test_fsdp1_over_tensor_parallelism_is_refused_by_name(four: Ranks, how: str) -> None:
    """The unit's shapes are those of the local tensors."""
    for text in four.run(cases.two_dimensional_error, how):
        assert text.startswith("UnsupportedError: 0.weight: FSDP1 has flattened a DTensor")


def test_a_tensor_that_is_cut_in_another_way_is_refused(two: Ranks) -> None:
    for text in two.run(cases.resharded_error):
        assert text.startswith("LayoutError: w: its sharding has changed since the layout was made")


def test_a_missing_tensor_is_named() -> None:
    found = layout({"a": torch.ones(1), "b": torch.ones(2)})
    with pytest.raises(wsync.LayoutError, match=r"b: not among the 1 weights given \(1 of 2"):
        found.bind({"a": torch.ones(1)})


def test_sharded_tensors_are_no_whole_tensors() -> None:
    from torch.distributed.tensor import Shard

    with pytest.raises(wsync.InvalidArgumentError, match=r"w: a DTensor .*wsync\.fsdp\.layout"):
        _played((2,), [Shard(0)], torch.ones(4, 2), from_tensors)


UPDATES = {
    "dense": ("dense", "fsdp2", {}, {}),
    "dense-hsdp": ("dense", "hsdp", {}, {}),
    "dense-fsdp-tp": ("dense", "fsdp-tp", {}, {}),
    "dense-full": ("dense", "fsdp2", {}, {"delivery": "full"}),
    "moe": ("moe", "hsdp", {}, {}),
    "moe-fused-fsdp-tp": ("fused", "fsdp-tp", {}, {}),
    "flat-fused": ("fused", "fsdp1", {}, {}),
}


@pytest.mark.parametrize("case", UPDATES.values(), ids=UPDATES)
def test_every_byte_arrives(four: Ranks, case: Any) -> None:
    facts = four.run(cases.update, *case, timeout=240)
    assert [fact["wrong"] for fact in facts] == [[]] * len(facts)
    assert {fact["version"] for fact in facts} == {"2"}
    assert facts[0]["rounds"] > 1
    if case[3].get("delivery") != "full":
        assert facts[0]["redundancy"] == 1.0


def test_slimes_updater_takes_a_layout(two: Ranks) -> None:
    for fact in two.run(cases.update_as_slime_does, timeout=240):
        assert fact == {"wrong": [], "version": 1}
