"""Quantised checkpoints into SGLang's and vLLM's own model classes, and what these refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import quantised_models, tiny_models
from support.engines import NEWEST, engine_results
from support.quantised_models import EXPERTS, Method
from support.vllm_engine import VllmEngine
from support.workers import ThreadEngine

import wsync
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.ring_loaders import CallingLoader, ModuleLoader
from wsync.module_tensors.names import group_of_parts, without_scales
from wsync.sglang import SglangLoader
from wsync.sync import Sync
from wsync.vllm.reload_rehearsal import Rehearsal

SCRIPT = Path(__file__).parent / "support" / "sglang_quantised.py"
OPTIONS = wsync.Options(deadline=60, progress=False, round_nbytes=1 << 19, ring_nbytes=1 << 20)
FP8 = ("fp8_block", (128, 128))
FINER = ("fp8_block", (64, 64))
PACKED = ("fp8_packed", (128, 128))
WHOLE = ("fp8_tensor", (0, 0))
MX = ("mxfp8", (1, 32))
NV = ("nvfp4", (1, 16))
INT4 = ("int4", (1, 32))
ZERO = ("int4_zero", (1, 32))
INT4_EXPERTS = ("int4", (1, 32), EXPERTS)
COARSER_EXPERTS = ("int4", (1, 128), EXPERTS)
KV_B = {
    f"model.layers.{layer}.self_attn.kv_b_proj.{part}"
    for layer in (0, 1)
    for part in ("weight", "weight_scale_inv")
}

Fields = tuple[Any, ...]
# (family, method, path): what goes through load_weights itself, by a part of its names
SGLANG: dict[tuple[str, Fields, str], str] = {
    ("qwen3", FP8, "learnt"): "",
    ("qwen3", FP8, "session"): "",
    ("qwen3_moe", FP8, "session"): "",
    ("qwen3_moe", FP8, "bucket"): "",
    ("deepseek_v3", FP8, "session"): "kv_b_proj",
    ("deepseek_v3", FP8, "bucket"): "",
    ("deepseek_v3", FP8, "disk"): "",
    ("qwen3_moe", INT4_EXPERTS, "session"): "",
    ("qwen3_moe", COARSER_EXPERTS, "session"): "",
    ("deepseek_v3", INT4_EXPERTS, "session"): "",
    ("qwen3_moe", INT4_EXPERTS, "bucket"): "",
    ("qwen3_moe", INT4_EXPERTS, "disk"): "",
    ("qwen3", INT4, "learnt"): "",
    ("qwen3", ZERO, "learnt"): "",
    ("qwen3", WHOLE, "learnt"): "",
    ("qwen3", MX, "session"): "",
    ("qwen3_moe", MX, "learnt"): "",
    ("qwen3", NV, "learnt"): "",
    ("qwen3", PACKED, "session"): "",
    ("qwen3_moe", PACKED, "session"): "",
    ("qwen3_moe", PACKED, "bucket"): "",
}
SLOW = {
    ("qwen3", FP8, "session"),
    ("deepseek_v3", FP8, "session"),
    ("qwen3", ZERO, "learnt"),
    ("qwen3", WHOLE, "learnt"),
    ("qwen3", PACKED, "session"),
    ("qwen3_moe", FP8, "bucket"),
    ("deepseek_v3", FP8, "bucket"),
    ("deepseek_v3", FP8, "disk"),
    ("qwen3_moe", COARSER_EXPERTS, "session"),
    ("deepseek_v3", INT4_EXPERTS, "session"),
    ("qwen3_moe", INT4_EXPERTS, "bucket"),
    ("qwen3_moe", INT4_EXPERTS, "disk"),
    ("qwen3_moe", MX, "learnt"),
    ("qwen3_moe", PACKED, "session"),
    ("qwen3_moe", PACKED, "bucket"),
}
QKV = "model.layers.0.self_attn.q_proj"
FUSED = "model.layers.0.self_attn.qkv_proj"
# (family, trainer, engine, path, tensors that are not sent): parts of what is said
REFUSED: dict[tuple[str, Fields | None, Fields | None, str, str], tuple[str, ...]] = {
    ("qwen3", None, FP8, "session", ""): (
        "model.layers.0.mlp.gate_proj.weight (bfloat16 (256, 256)) to model.layers.0.mlp."
        "gate_up_proj.weight (float8_e4m3fn (512, 256))",
    ),
    ("qwen3", FP8, None, "learnt", ""): (
        f"{QKV}.weight_scale_inv (float32 (4, 2)): KeyError: '{FUSED}.weight_scale_inv'",
    ),
    ("qwen3_moe", FP8, None, "learnt", ""): (
        "experts.0.up_proj.weight (float8_e4m3fn (256, 256)) to model.layers.0.mlp.experts."
        "w13_weight (bfloat16 (2, 512, 256))",
    ),
    ("qwen3", FP8, FINER, "session", ""): (
        f"{QKV}.weight_scale_inv (float32 (4, 2)): AssertionError",
    ),
    ("qwen3", MX, FP8, "session", ""): (
        f"{QKV}.weight_scale_inv (uint8 (512, 8)): AssertionError",
    ),
    ("qwen3", WHOLE, FP8, "session", ""): (
        f"{QKV}.weight_scale (float32 (1,))",
        f"KeyError: '{FUSED}.weight_scale'",
    ),
    ("qwen3", FP8, FP8, "session", "_scale_inv$"): (
        "the trainer delivers nothing for model.layers.0.mlp.down_proj.weight_scale_inv",
    ),
    ("qwen3", FP8, PACKED, "session", ""): (
        f"{FUSED}.weight_scale_inv: its scales are packed as UE8M0, but the trainer's are not",
        '"transform_ue8m0": True in the trainer\'s quantization_config',
    ),
    ("qwen3", PACKED, FP8, "session", ""): (
        f"{QKV}.weight_scale_inv (int32 (512, 2)): AssertionError",
    ),
    ("qwen3", INT4, None, "learnt", ""): (
        f"{QKV}.weight_packed (int32 (512, 32))",
        f"KeyError: '{FUSED}.weight_packed'",
    ),
    ("qwen3", None, INT4, "learnt", ""): (
        f"{QKV}.weight (bfloat16 (512, 256))",
        f"KeyError: '{FUSED}.weight'",
    ),
    ("qwen3_moe", None, INT4_EXPERTS, "session", ""): (
        "the trainer delivers nothing for model.layers.0.mlp.experts.w13_weight_packed",
        "none of the delivered model.layers.0.mlp.experts.0.down_proj.weight, ",
    ),
    ("qwen3_moe", INT4_EXPERTS, COARSER_EXPERTS, "session", ""): (
        ".weight_scale (bfloat16 (256, 8)): RuntimeError",
    ),
    ("qwen3", ZERO, INT4, "learnt", ""): (
        f"{QKV}.weight_zero_point (int32 (64, 8))",
        f"KeyError: '{FUSED}.weight_zero_point'",
    ),
    ("qwen3", INT4, ZERO, "learnt", ""): (
        "the trainer delivers nothing for model.layers.0.mlp.down_proj.weight_zero_point",
    ),
    # SGLang cannot load these a second time
    ("qwen3", INT4, INT4, "session", ""): (
        f"{FUSED}.weight_packed: CompressedTensorsLinearMethod has replaced it after loading",
    ),
    ("qwen3", WHOLE, WHOLE, "session", ""): (
        f"{FUSED}.weight: Fp8LinearMethod has replaced it after loading",
    ),
}


def named(row: tuple[Any, ...]) -> str:
    """A name for a row."""
    parts = [part if isinstance(part, str) else part and part[0] for part in row]
    return "-".join(str(part) for part in parts if part != "")


Results = dict[tuple[Any, ...], dict[str, Any]]  # by row
ANEW = ("deepseek_v3", FP8, "learnt")
QUICK = [("qwen3", None, FP8), ("qwen3", FP8, None), ("qwen3", FP8, PACKED), ("qwen3", None, INT4)]
CASES: dict[tuple[Any, ...], dict[str, Any]] = {
    **{row: {"family": row[0], "method": row[1], "path": row[2], "gpu": True} for row in SGLANG},
    **{
        row: {"family": row[0], "method": row[2], "trainer": row[1], "path": row[3]}
        | {"drop": row[4] or "^$"}
        for row in REFUSED
    },
    ANEW: {"family": ANEW[0], "method": ANEW[1], "path": ANEW[2]},
}


@pytest.fixture(scope="module")
def sglang(request: pytest.FixtureRequest) -> Results:
    """What one process makes of the cases of the tests that run."""
    items: Any = request.session.items
    rows = {item.callspec.params.get("row") for item in items if hasattr(item, "callspec")}
    cases = {row: case for row, case in CASES.items() if row in rows}
    results = engine_results(SCRIPT, "sglang", NEWEST, [*cases.values()])
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW), id=named(row)) for row in SGLANG],
)
def test_sglang_holds_what_its_own_loading_gives(sglang: Results, row: tuple[Any, ...]) -> None:
    found, aside = sglang[row], SGLANG[row]
    assert found.get("differing") == [[], []], found
    if row[2] == "disk":
        return
    assert (found["reason"], found["redundancy"], found["same_place"]) == ("", 1.0, 0)
    assert all(aside and aside in name for name in found["fallback"])
    assert bool(found["fallback"]) == bool(aside)
    assert aside != "kv_b_proj" or set(found["fallback"]) == KV_B


@pytest.mark.slow
@pytest.mark.parametrize("row", [ANEW], ids=named)
def test_a_scale_that_the_loader_makes_anew_is_learnt(
    sglang: Results, row: tuple[Any, ...]
) -> None:
    """As SGLang does of kv_b_proj without a GPU."""
    assert sglang[row]["reason"] == ""
    assert sglang[row]["differing"] == [[], []]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] * (row[:3] not in QUICK), id=named(row))
        for row in REFUSED
    ],
)
def test_sglang_is_not_sent_another_form(sglang: Results, row: tuple[Any, ...]) -> None:
    for part in REFUSED[row]:
        assert part in sglang[row].get("error", ""), sglang[row]


# (family, method), and why vLLM reloads whole tensors
VLLM: dict[tuple[str, Fields], str] = {
    ("qwen3", FP8): "",
    ("qwen3_moe", FP8): "",
    ("deepseek_v3", FP8): "",
    ("qwen3", ZERO): "qkv_proj.weight_packed was made as torch.int32 (768, 32) and is now ",
    ("qwen3_moe", INT4): "qkv_proj.weight_packed was made as torch.int32 (768, 32) and is now ",
    (
        "qwen3_moe",
        COARSER_EXPERTS,
    ): "experts.w13_weight_packed was made as torch.int32 (2, 512, 32)",
}
UNLIKE: dict[tuple[str, Fields | None, Fields | None, str], tuple[str, ...]] = {
    ("qwen3", None, FP8, ""): (
        "down_proj.weight (bfloat16 (256, 256)) to model.layers.0.mlp.down",
    ),
    ("qwen3", FP8, FINER, ""): (f"{QKV}.weight_scale_inv (float32 (4, 2)): RuntimeError",),
    ("qwen3", FP8, FP8, "_scale_inv$"): (
        "nothing for model.layers.0.mlp.down_proj.weight_scale_inv",
    ),
    # what attention makes of the lost weights is no reason to reload
    ("deepseek_v3", FP8, FP8, "model.norm"): ("nothing for model.norm.weight",),
    # where layers are made anew: before that
    ("qwen3", None, INT4, ""): (f"load_weights fails at {QKV}.weight (bfloat16 (512, 256)): ",),
    ("qwen3", INT4, ZERO, ""): ("nothing for model.layers.0.mlp.down_proj.weight_zero_point",),
    ("qwen3", INT4, INT4, "_scale$"): (
        "model.layers.0.mlp.down_proj.weight_packed, ",
        "the trainer delivers codes, but no scales",
    ),
    ("qwen3_moe", INT4_EXPERTS, COARSER_EXPERTS, ""): ("weight_scale (bfloat16 (256, 8))",),
    # layers that are made anew would have any memory in place of what is not loaded
    ("qwen3_moe", INT4, INT4, "0.*k_proj"): (
        "0.self_attn.qkv_proj.weight_packed (16384 of its 98304 bytes)",
    ),
    ("qwen3_moe", INT4, INT4, "0.*experts.1.up_proj"): ("0.mlp.experts.routed_experts.w13_weight",),
}


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmEngine]:
    made = VllmEngine(tp=1)
    yield made
    made.close()


def prepare(engine: VllmEngine, family: str, method: Fields | None) -> tiny_models.Shapes:
    """Has the engine serve a model that is quantised so; its checkpoint without that."""
    changes = quantised_models.SIZES[family]
    engine.prepare(family, method=method or (), changes=changes)
    return tiny_models.checkpoint(family, tiny_models.config(family, **changes))


def published(plain: tiny_models.Shapes, method: Fields | None, seed: int) -> dict[str, Any]:
    made = tiny_models.tensors(plain, seed)
    return made if method is None else Method(*method).quantise(made)


def check_update(engine: VllmEngine, sync: Sync, weights: dict[str, Any], folder: Path) -> None:
    assert sync.update(weights).redundancy == 1.0
    torch.save(weights, folder / "weights")
    # vLLM's reload leaves a fused layer the shape that comes first; nobody reads it
    differing = engine.differing(str(folder / "weights"))
    assert [[n for n in one if not n.endswith("weight_shape")] for one in differing] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("row", VLLM, ids=named)
def test_vllm_holds_what_its_own_loading_gives(
    vllm: VllmEngine, row: tuple[str, Fields], tmp_path: Path
) -> None:
    family, method = row
    plain = prepare(vllm, family, method)
    places = vllm.collective_rpc("places")
    with wsync.connect(published(plain, method, 0), engines=[vllm], options=OPTIONS) as sync:
        for seed in (1, 2):
            check_update(vllm, sync, published(plain, method, seed), tmp_path)
    [[reason, _]] = vllm.collective_rpc("reasons")
    assert VLLM[row] in reason and bool(VLLM[row]) == bool(reason)
    assert vllm.collective_rpc("places") == places


@pytest.mark.slow
@pytest.mark.parametrize("row", UNLIKE, ids=named)
def test_vllm_is_not_sent_another_form(vllm: VllmEngine, row: Fields, tmp_path: Path) -> None:
    """Its weights stay what they were, and the right ones are taken after that."""
    family, trainer, engine, drop = row
    plain = prepare(vllm, family, engine)
    weights = published(plain, trainer, 0)
    weights = {n: t for n, t in weights.items() if not drop or not re.search(drop, n)}
    before = vllm.collective_rpc("found")
    with wsync.connect(weights, engines=[vllm], options=OPTIONS) as sync:
        with pytest.raises(wsync.WsyncError) as raised:
            sync.update()
    for part in UNLIKE[row]:
        assert part in str(raised.value)
    if (trainer, engine) not in ((None, FP8), (FP8, FINER), (FP8, FP8)):
        assert vllm.collective_rpc("found") == before
    with wsync.connect(published(plain, engine, 0), engines=[vllm], options=OPTIONS) as sync:
        check_update(vllm, sync, published(plain, engine, 2), tmp_path)
    [[reason, _]] = vllm.collective_rpc("reasons")
    assert not reason or engine != FP8


def weights_of(engine: VllmEngine) -> dict[str, int]:
    """Where they lie."""
    [places] = engine.collective_rpc("places")
    return {path: place for path, place in places.items() if path.endswith("weight")}


@pytest.mark.slow
def test_a_vllm_whose_reload_has_failed_takes_the_next_update(vllm: VllmEngine) -> None:
    """Layers that wait for tensors get back the ones that they had."""
    vllm.prepare("qwen3", shuffled="model.layers.0.mlp.gate_up_proj")
    with wsync.connect(vllm.weights(0), engines=[vllm], options=OPTIONS) as sync:
        sync.update(vllm.weights(1))
        places = weights_of(vllm)
        vllm.collective_rpc("set_broken", args=(True,))
        with pytest.raises(wsync.WsyncError, match="no kernel for this"):
            sync.update(vllm.weights(2))
        vllm.collective_rpc("set_broken", args=(False,))
        sync.update(vllm.weights(3))
    assert vllm.differing(3) == [[]]
    assert weights_of(vllm) == places  # where CUDA graphs look for them


class Packed(torch.nn.Module):
    """One fused module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_packed = torch.nn.Parameter(torch.zeros(8, 2).int(), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.zeros(8, 2), requires_grad=False)
        self.weight_shape = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.calls: dict[str, int] = {}

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            part, rows = name.rpartition(".")[2], name.startswith("b") * 4
            if part != "weight_shape":
                getattr(self, part).data[rows:][:4].copy_(tensor)
                continue
            self.weight_shape.data[0].copy_(tensor)
            self.calls[name] = self.calls.get(name, 0) + 1


def packed() -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight_{part}": tensor
        for name in "ab"
        for part, tensor in (
            ("packed", torch.randint(9, (4, 2), dtype=torch.int32)),
            ("scale", torch.rand(4, 2)),
            ("shape", torch.tensor([4, 16])),
        )
    }


def test_shapes_of_packed_tensors_are_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_KEEP", "weight_shape")
    module = Packed()
    loader = RecordedLoader(module)
    calls = []
    with wsync.connect(packed(), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for _ in range(2):
            weights = packed()
            sync.update(weights)
            calls.append(module.calls["b.weight_shape"])
            both = [weights[f"{name}.weight_packed"] for name in "ab"]
            assert torch.equal(module.weight_packed, torch.cat(both))
            assert module.weight_shape[0].tolist() == [4, 16]
    assert loader.learnt is not None and calls[0] == calls[1]


def test_what_sglang_restores_without_values_cannot_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would pack once more what it has packed."""
    monkeypatch.setenv("WSYNC_KEEP", "weight_*")
    module = Packed()
    weights = {"a.weight_scale": torch.rand(4, 2), "b.weight_scale": torch.rand(4, 2)}
    with wsync.connect(
        weights, engines=[ThreadEngine([SglangLoader(module)])], options=OPTIONS
    ) as sync:
        sync.update()
        module._original_shapes = {"weight_packed": (8, 2)}
    with (
        wsync.connect(
            weights, engines=[ThreadEngine([SglangLoader(module)])], options=OPTIONS
        ) as sync,
        pytest.raises(wsync.WsyncError, match=r"nothing for weight_packed \(64 of its 64 bytes\)"),
    ):
        sync.update()


def rehearse(load: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    module = torch.nn.Linear(2, 2, device="meta")
    model = wsync.layout.from_tensors({"a.weight": torch.zeros(4, 2)}).layout

    def load_weights(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            load(module.weight.data, tensor)

    Rehearsal(model).run(module, load_weights)


def test_a_rehearsal_names_what_was_at_work() -> None:
    def loader(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        assert parameter.shape == tensor.shape

    text = r"load_weights fails at a.weight \(float32 \(4, 2\)\): AssertionError"
    with pytest.raises(wsync.LayoutError, match=text):
        rehearse(loader)


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a.weight": ((40, 24), torch.float8_e4m3fn),
    "a.weight_scale_inv": ((3, 2), torch.float32),
    "b.weight": ((8, 32), torch.float8_e5m2),
    "b.weight_scale": ((1,), torch.float32),
    "c.weight_packed": ((6, 5), torch.int32),
    "c.weight_scale": ((6, 2), torch.bfloat16),
    "c.weight_shape": ((2,), torch.int64),
    "d.weight": ((4, 8), torch.uint8),
    "d.weight_scale": ((4, 1), torch.float8_e4m3fn),
    "d.weight_scale_2": ((), torch.float32),
    "e.weight": ((3, 32), torch.float8_e4m3fn),
    "e.weight_scale_inv": ((3, 1), torch.float8_e8m0fnu),
    "f.weight_scale_inv": ((3, 1), torch.uint8),
    "g.down_proj": ((2, 8, 8), torch.float8_e4m3fn),  # in one parameter
    "g.down_proj_scale_inv": ((2, 1, 1), torch.float32),
    "f.count": ((), torch.int64),
    "f.byte": ((), torch.uint8),
}


def any_bytes(seed: int) -> dict[str, torch.Tensor]:
    """Tensors whose bytes are random, infinite and NaN or not."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, dtype) in SHAPES.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        found[name] = data.view(dtype).reshape(shape)
        if name.endswith("_shape"):
            rows, words = SHAPES[name.replace("_shape", "_packed")][0]
            found[name] = torch.tensor([rows, 8 * words], dtype=dtype)
    return found


class Holder(torch.nn.Module):
    """Has a parameter for each tensor, of its name."""

    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            stem, _, last = name.rpartition(".")
            if stem not in self._modules:
                self.add_module(stem, torch.nn.Module())
            data = torch.zeros(shape, dtype=dtype)
            part = torch.nn.Parameter(data, requires_grad=False)
            self.get_submodule(stem).register_parameter(last, part)


class Loading(Holder):
    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in pairs:
            parameters[name].data.copy_(tensor)


def check_bytes(found: dict[str, torch.Tensor], seed: int) -> None:
    wanted = any_bytes(seed)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        mine = found[name].detach().reshape(-1).view(torch.uint8)
        assert torch.equal(mine, tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(
    ("kind", "how"), [(Loading, RecordedLoader), (Loading, CallingLoader), (Holder, ModuleLoader)]
)
def test_every_dtype_reaches_a_module(
    kind: type[Holder], how: type[RecordedLoader | CallingLoader | ModuleLoader]
) -> None:
    module = kind()
    loader = how(module)
    with wsync.connect(any_bytes(0), engines=[ThreadEngine([loader])], options=OPTIONS) as sync:
        for seed in (1, 2):
            sync.update(any_bytes(seed))
            check_bytes(dict(module.named_parameters()), seed)
    if isinstance(loader, RecordedLoader):
        assert loader.learnt is not None and not loader.computed()


def test_codes_and_scales_of_a_weight_stay_together() -> None:
    groups = {name: group_of_parts(name, str(SHAPES[name][1])[6:]) for name in SHAPES}
    by_stem = {name[0]: group for name, group in groups.items() if name.startswith(tuple("abcdeg"))}
    assert len(set(by_stem.values()) - {0}) == 6
    assert all(group == by_stem[name[0]] for name, group in groups.items() if name[0] in by_stem)
    plain = ["a.weight", "weight", "a.bias", "a.weight_norm", "a.weight_scale.b", "a.experts.up"]
    assert [group_of_parts(name, "bfloat16") for name in plain] == [0] * 6
    layout = wsync.layout.from_tensors(any_bytes(0)).layout
    facts = [layout.tensor(index) for index in range(layout.tensor_count)]
    assert {name: group for name, _, _, group in facts} == groups


def test_codes_without_scales_are_known_by_name() -> None:
    known = {name: str(dtype)[6:] for name, (_, dtype) in SHAPES.items()}
    assert without_scales(known.items()) == []
    del known["a.weight_scale_inv"], known["c.weight_scale"]
    assert without_scales(known.items()) == ["a.weight", "c.weight_packed"]
    del known["g.down_proj_scale_inv"]
    known["g.up_proj_scale_inv"] = "float32"  # of another parameter
    assert without_scales(known.items())[2:] == ["g.down_proj"]
    known["g.down_proj_scale"] = "float32"  # by another tool
    assert without_scales(known.items())[2:] == []
