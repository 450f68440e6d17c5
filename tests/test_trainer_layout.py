"""wsync.layout: a rank's tensors, bound anew for every update."""

import base64
import ctypes
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.agreement_cases import OPTIONS, Stock

import wsync
from wsync import LayoutError, _core
from wsync.families import registry
from wsync.families.blocks import eh_proj, mtp
from wsync.families.registry import Family
from wsync.layout import from_tensors, global_name
from wsync.messages import payload
from wsync.messages.control import WHOLE
from wsync.trainer.planning import Planning
from wsync.trainer.roster import Delivery


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


class Seen(Stock):
    """Notes the names that each bucket brings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def update_weights_from_tensor(self, **given: Any) -> tuple[bool, str]:
        bucket = payload.load(base64.b64decode(given["serialized_named_tensors"][0]))
        self.seen.append([entry.name for entry in bucket["metadata"]])
        return super().update_weights_from_tensor(**given)


@pytest.mark.parametrize("make", [from_tensors, wsync.fsdp.layout], ids=["tensors", "fsdp"])
@pytest.mark.parametrize(
    "modules",
    [
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ],
)
def test_projections_that_engines_join_come_in_one_bucket(make, modules):
    """Some of SGLang's load_weights drop those whose others come in another call."""
    weights = {
        f"model.layers.{layer}.part.{module}.weight": torch.full((rows, 64), float(layer))
        for layer in range(5)
        for module, rows in {"o_proj": 256, **dict.fromkeys(modules, 64), modules[0]: 256}.items()
    }
    engine = Seen()
    options = wsync.Options(progress=False, deadline=60, bucket_nbytes=140_000)
    with wsync.connect(make(weights), [engine], options=options) as sync:
        sync.update()
    assert len(engine.seen) > 2
    assert sorted(name for names in engine.seen for name in names) == sorted(weights)
    for names in engine.seen:
        for name in names:
            prefix, module, _ = name.rsplit(".", 2)
            others = modules if module in modules else ()
            assert all(f"{prefix}.{other}.weight" in names for other in others)


class Sized(Stock):
    """Notes the bytes and the tensors of each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def update_weights_from_tensor(self, **given: Any) -> tuple[bool, str]:
        bucket = payload.load(base64.b64decode(given["serialized_named_tensors"][0]))
        flat = bucket["flattened_tensor"]
        self.sizes.append(flat.numel())
        for part in bucket["metadata"]:
            data = flat[part.start_idx : part.end_idx].clone()
            self.tensors[part.name] = data.view(part.dtype).reshape(part.shape)
        return super().update_weights_from_tensor(**given)


def fused_experts(layer: int, experts: int = 8, hidden: int = 64, ffn: int = 32) -> dict[str, Any]:
    """A layer of Qwen3.5-MoE, 128 KiB and 64 KiB of it in fused tensors."""
    base = f"model.language_model.layers.{layer}.mlp."
    return {
        f"{base}gate.weight": torch.randn(experts, hidden),
        f"{base}experts.gate_up_proj": torch.randn(experts, 2 * ffn, hidden),
        f"{base}experts.down_proj": torch.randn(experts, hidden, ffn),
    }


def one_by_one(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts under the names of single ones."""
    found = {}
    for name, tensor in weights.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for each, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                found[f"{base}.{number}.{each}.weight"] = part
    return found


@pytest.mark.parametrize(("asked", "single"), [(1 << 17, False), ((1 << 17) - 1, True)])
def test_fused_experts_are_sent_one_by_one_where_a_bucket_has_no_room(asked, single, caplog):
    """With the other tensor of a layer, which would fit: one call has one spelling."""
    weights = fused_experts(0) | fused_experts(1)
    wanted = one_by_one(weights) if single else weights
    engine = Sized()
    options = wsync.Options(progress=False, deadline=60, delivery="stock", bucket_nbytes=asked)
    with wsync.connect(weights, [engine], options=options) as sync:
        sync.update()
    assert engine.tensors.keys() == wanted.keys()
    assert all(torch.equal(engine.tensors[name], wanted[name]) for name in wanted)
    assert len(engine.sizes) > 2 and max(engine.sizes) <= asked
    assert not [text for text in caplog.messages if "bucket" in text]


@pytest.mark.parametrize("form", ["one tensor", "transposed", "with biases"])
def test_only_what_cannot_be_split_has_a_larger_bucket_and_is_named(form, caplog):
    weights = {f"{number}.weight": torch.ones(64, 64) for number in range(20)}
    base = "model.layers.0.mlp.experts."
    large = {
        f"{base}gate_up_proj": torch.randn(8, 64, 64),
        f"{base}down_proj": torch.ones(8, 64, 32),
    }
    if form == "one tensor":
        large = {"model.embed_tokens.weight": torch.randn(512, 64)}
    elif form == "transposed":
        large[f"{base}down_proj"] = torch.ones(8, 32, 64)
    else:
        large[f"{base}down_proj_bias"] = torch.ones(8, 64)
    weights |= large
    engine = Sized()
    options = wsync.Options(progress=False, deadline=60, delivery="stock", bucket_nbytes=1 << 16)
    with wsync.connect(weights, [engine], options=options) as sync:
        sync.update()
        sync.update()
    assert all(torch.equal(engine.tensors[name], weights[name]) for name in weights)
    assert sorted(engine.sizes)[-3:] == [1 << 16, 1 << 17, 1 << 17]  # of two updates
    (text,) = (text for text in caplog.messages if "cannot be split" in text)
    assert f"{next(iter(large))} (131,072 bytes)" in text
    assert "bucket_nbytes=65536 (slime's --update-weight-buffer-size)" in text
    assert "0.weight" not in text


def test_a_stock_engine_is_told_of_tensors_without_elements() -> None:
    """Its load_weights says whether their shapes are right."""
    weights = {"a": torch.empty(0, 4), "b": torch.ones(300), "c": torch.ones(5)}
    engine = Seen()
    options = wsync.Options(progress=False, deadline=60, bucket_nbytes=1024)
    with wsync.connect(weights, [engine], options=options) as sync:
        sync.update()
    assert len(engine.seen) == 2
    assert sorted(name for names in engine.seen for name in names) == ["a", "b", "c"]


@pytest.mark.parametrize("room", ["ring_nbytes", "round_nbytes", "bucket_nbytes"])
@pytest.mark.parametrize(("nbytes", "together"), [(70_000, False), (100_000, True)])
def test_projections_come_in_one_bucket_where_it_has_room_for_them(room, nbytes, together):
    rows = {"q_proj": 256, "k_proj": 64, "v_proj": 64}  # 98,304 bytes
    weights = {f"layers.0.{name}.weight": torch.ones(count, 64) for name, count in rows.items()}
    engine = Stock()
    options = wsync.Options(progress=False, deadline=60, delivery="stock", **{room: nbytes})
    with wsync.connect(weights, [engine], options=options) as sync:
        report = sync.update()
    assert report.rounds == (1 if together else 2)


def plan_of(model: Any, delivery: Delivery, gpu: int, options: wsync.Options) -> Any:
    """For one engine that takes buckets."""
    taking = {delivery: [SimpleNamespace(workers=1)]}
    roster = SimpleNamespace(
        takes_buckets=True,
        model=model,
        workers=[SimpleNamespace(takes_buckets=True, serving_rank=0)],
        hosts=[0],
        taking=lambda d: taking.get(d, []),
    )
    planning = Planning(None, roster, [], options)
    return planning._draw([WHOLE], SimpleNamespace(ordinal=gpu), False, 0).plan(0)


@pytest.mark.parametrize("delivery", [Delivery.BROADCAST, Delivery.STOCK])
@pytest.mark.parametrize("gpu", [-1, 0])
@pytest.mark.parametrize(("experts", "hidden", "ffn"), [(256, 2048, 512), (512, 4096, 1024)])
def test_buckets_of_qwen3_5_moe_are_as_large_as_asked(delivery, gpu, experts, hidden, ffn):
    """35B-A3B and 397B-A17B, by shapes alone: an expert of each, as a trainer holds it, is a shard;
    the ring has room for four buckets."""
    builder = _core.LayoutBuilder(0)
    shapes = {"gate_up_proj": (experts, 2 * ffn, hidden), "down_proj": (experts, hidden, ffn)}
    for kind, shape in shapes.items():
        for expert in range(experts):
            name, one = f"model.layers.0.mlp.experts.{kind}", (1, *shape[1:])
            facts = ((expert, 0, 0), one, 0, 0, (0, 2 * shape[2], 2))
            builder.add_shard(name, "bfloat16", shape, *facts)
    asked = wsync.Options().bucket_nbytes
    plan = plan_of(builder.build(), delivery, gpu, wsync.Options())
    slots = [plan.slot(0, k).nbytes for k in range(plan.round_count)]
    assert 0 < max(slots) <= asked and plan.ring_nbytes(0) <= 4 * asked
    assert sum(slots) == 3 * experts * ffn * hidden * 2


@pytest.mark.parametrize("delivery", [Delivery.BROADCAST, Delivery.STOCK])
@pytest.mark.parametrize("gpu", [-1, 0])
@pytest.mark.parametrize(
    ("options", "together"),
    [({}, True), ({"round_nbytes": 1 << 28}, False), ({"bucket_nbytes": 1 << 28}, False)],
)
def test_default_rounds_have_room_for_what_engines_join(delivery, gpu, options, together):
    """Gate and up of Sarashina2-Vision-14B have more bytes than a usual round on a GPU."""
    builder = _core.LayoutBuilder(0)
    for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        shape = (13824, 5120)
        facts = ([0, 0], shape, number, 0, (10240, 2))
        builder.add_shard(f"layers.0.{name}.weight", "bfloat16", shape, *facts)
    plan = plan_of(builder.build(), delivery, gpu, wsync.Options(**options))
    manifest = plan.manifest(0)
    gate, up = (manifest.names().index(f"layers.0.{name}_proj.weight") for name in ("gate", "up"))
    rounds = [{shard.buffer for shard in manifest.shards(index)} for index in (gate, up)]
    assert (rounds[0] == rounds[1]) == together


@pytest.mark.parametrize("make", [from_tensors, wsync.fsdp.layout], ids=["tensors", "fsdp"])
def test_tensors_that_engines_join_stay_together_with_their_scales(make):
    kinds = ("weight", "weight_scale_inv")
    names = [
        f"model.layers.{layer}.self_attn.{module}.{kind}"
        for layer in (0, 1)
        for module in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")
        for kind in kinds
    ]
    layout = make({name: torch.zeros(2) for name in ["q_a_proj_of.weight", *names]}).layout
    groups = {name: layout.tensor(layout.names().index(name)).group for name in names}
    first, second = (
        {group for name, group in groups.items() if f".{layer}." in name and "_a_" in name}
        for layer in (0, 1)
    )
    assert len(first) == len(second) == len(first | second) - 1 == 1
    assert 0 not in first | second
    others = {group for name, group in groups.items() if "q_b_proj" in name}
    assert others.isdisjoint(first | second)
    assert 0 in others  # of weights that are no codes
    assert layout.tensor(layout.names().index("q_a_proj_of.weight")).group == 0
    # another rank, which has other tensors, calls them the same
    other = make({name: torch.zeros(2) for name in names[6:]}).layout
    assert {other.tensor(i).group for i in range(4)} == second


def test_slimes_updaters_take_a_model_as_slime_has_loaded_it(monkeypatch):
    family = Family(
        "own", mtp((), projection="fc"), loaders={"slime": (eh_proj("fc", swapped=True),)}
    )
    monkeypatch.setitem(registry.FAMILIES, "own", family)
    model = torch.nn.Module()
    model.mtp = torch.nn.Module()
    model.mtp.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.mtp.layers[0].eh_proj = torch.nn.Linear(8, 4, bias=False)
    args = SimpleNamespace(hidden_size=4, num_attention_heads=2, num_layers=1, vocab_size=8)
    updater = wsync.UpdateWeightFromTensor(args, [model], None, model_name="own", options=OPTIONS)
    plain = wsync.megatron.layout(model, args, model_name="own")
    for made, column in ((plain, 0), (updater._source, 4)):
        shards = made.layout.shards(made.layout.names().index("fc.weight"))
        assert next(shard.start for shard in shards if shard.offset == 0) == (0, column)


@pytest.mark.parametrize("known", [False, True])
def test_a_vision_tower_without_its_sizes_is_taken_as_it_is(known):
    """Megatron's arguments, which slime's updaters have, say nothing of it."""
    model = torch.nn.Module()
    model.vision_model = torch.nn.Module()
    model.vision_model.merger = torch.nn.Module()
    model.vision_model.merger.linear_fc1 = torch.nn.Linear(16, 16)
    args = SimpleNamespace(hidden_size=4, num_attention_heads=2, num_layers=1, vocab_size=8)
    if known:
        args.vision_config = SimpleNamespace(hidden_size=4, spatial_merge_size=2)
    layout = wsync.megatron.layout(model, args, model_name="qwen3_vl").layout
    for kind, shape in (("weight", (16, 16)), ("bias", (16,))):
        tensor = layout.tensor(layout.names().index(f"model.visual.merger.linear_fc1.{kind}"))
        assert tensor[2] == shape


def chunk_of(layer, value, **settings):
    """A virtual pipeline stage: one layer with one parameter."""
    chunk = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([torch.nn.Module()])
    chunk.decoder.layers[0].layer_number = layer + 1
    chunk.decoder.layers[0].config = SimpleNamespace(**settings)
    chunk.decoder.layers[0].pre_mlp_layernorm = torch.nn.LayerNorm(4, bias=False)
    torch.nn.init.constant_(chunk.decoder.layers[0].pre_mlp_layernorm.weight, value)
    return chunk


@pytest.fixture(params=["table", "converter"])
def chunks(request):
    """The list of a trainer's model, and its layout."""
    found = [chunk_of(0, 1.0), chunk_of(1, 2.0)]
    args = SimpleNamespace(hidden_size=4, num_attention_heads=2, num_layers=2, vocab_size=8)
    how = {"model_name": "llama"}
    if request.param == "converter":
        how = {"converter": lambda name, tensor: [(name, tensor)]}
    return found, wsync.megatron.layout(found, args, **how)


def test_a_chunk_that_replaces_another_in_the_models_list_is_read(chunks):
    model, layout = chunks
    for value in (3.0, 4.0):
        model[1] = chunk_of(1, value)
        assert [tensor[0].item() for tensor in layout.tensors()] == [1.0, value]
    model.reverse()
    with pytest.raises(LayoutError, match="the order of tensors: it has changed"):
        layout.bind()


@pytest.mark.parametrize(
    "change", [lambda model: model.pop(), lambda model: model.append(chunk_of(2, 5.0))]
)
def test_a_list_of_more_or_fewer_chunks_is_refused(chunks, change):
    model, layout = chunks
    change(model)
    with pytest.raises(
        LayoutError, match=r"decoder.layers.\d.pre_mlp_layernorm.weight: it has changed"
    ):
        layout.bind()


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
    for _ in range(3):
        backup = {name: tensor.clone() for name, tensor in backup.items()}
        table = layout.bind(backup)
        assert len(table) == 2
        assert table[0][0] == backup["module.module.model.norm.weight"].data_ptr()
    assert layout.bind(tensors)[0][0] == tensors["model.norm.weight"].data_ptr()


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


class Made(Mapping[str, torch.Tensor]):
    """Makes its tensors when they are asked for, and forgets them."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.full((1 << 16,), 3.0)
        self.made.append(weakref.ref(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2


def test_a_sent_update_keeps_nothing():
    made = Made()
    with wsync.connect(made, [Stock()], options=OPTIONS) as sync:
        sync.update()
        assert len(made.made) == 4
        assert all(ref() is None for ref in made.made)
        sync.update(Made())


def test_two_weights_of_one_name_are_refused(tensors):
    layout = from_tensors(tensors)
    weights = {f"module.{name}": tensor for name, tensor in tensors.items()}
    name = "model.proj.weight"
    assert len(layout.bind({**weights, name: weights[f"module.{name}"]})) == 2
    with pytest.raises(LayoutError, match=rf"{name} and module.{name}: two tensors, but .* {name}"):
        layout.bind({**weights, name: torch.zeros(3, 4)})
    assert len(layout.bind({**weights, "x": torch.ones(1), "module.x": torch.ones(1)})) == 2
    both = from_tensors({"a": torch.ones(1), "module.a": torch.zeros(1)})
    with pytest.raises(LayoutError, match=r"module\.a and a: two tensors"):
        both.bind({"a": torch.ones(1)})


def test_contiguous_backups_of_a_parameter_with_other_strides_are_delivered():
    whole = torch.arange(24.0).reshape(4, 6)
    layout = from_tensors({"a": whole[:, :3], "b": whole.t(), "c": whole})
    backups = {name: torch.full_like(t, 7.0).contiguous() for name, t in layout_tensors(layout)}
    backups["b"] = torch.nn.Parameter(backups["b"])
    table = layout.bind(backups)
    assert [table[i][3] for i in range(3)] == [(6, 1), (1, 6), (6, 1)]
    assert table[2][0] == backups["c"].data_ptr()
    read = (ctypes.c_float * 24).from_address(table[1][0])
    assert set(read) == {7.0}
    with pytest.raises(LayoutError, match=r"a: dtype float16 != float32"):
        layout.bind({**backups, "a": backups["a"].half()})


def layout_tensors(layout):
    return zip(layout.names, layout.tensors(), strict=True)


def test_what_deepspeed_has_partitioned_is_refused() -> None:
    """ZeRO-3 leaves large parameters without elements between passes, and small ones whole."""
    partitioned: Any = torch.nn.Parameter(torch.empty(0))
    partitioned.ds_shape = torch.Size((8, 4))
    gathered: Any = torch.nn.Parameter(torch.ones(3))
    gathered.ds_shape = torch.Size((3,))
    from_tensors({"norm.weight": gathered})
    for make in (from_tensors, wsync.fsdp.layout):
        with pytest.raises(wsync.InvalidArgumentError, match=r"q\.weight: DeepSpeed's ZeRO-3 has"):
            make({"norm.weight": gathered, "q.weight": partitioned})
