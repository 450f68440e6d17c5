"""The reference of quantised weights, against other people's quantisers and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import quantise_reference as reference
from support.engines import NEWEST, engine_packages, engine_tree, results_of

SCRIPT = Path(__file__).parent / "support" / "quantise_oracles.py"
SAME = (
    *("fp8_tensor, torch", "int4, compressed-tensors", "padding, compressed-tensors"),
    *("fp8_block, compressed-tensors", "fp8_block, transformers", "fp8_ue8m0, transformers"),
    *("fp8_ue8m0, SGLang", "fp8_packed, SGLang", "mxfp8, torchao"),
)
# how many of a thousand may differ: transformers multiplies by 448 / amax instead of
# 1 / (amax / 448), torchao divides by 6 and by the second scale where Transformer Engine multiplies
ALIKE = {
    "fp8_block codes, transformers": 1,
    "nvfp4 scales, torchao": 10,
    "nvfp4 codes, torchao": 4,
}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def oracles() -> dict[str, list[int]]:
    folders = [engine_packages(), engine_tree("sglang", NEWEST), engine_tree("torchao", "0.18.0")]
    found: dict[str, list[int]] = results_of(SCRIPT, *folders, timeout=280)
    assert found.keys() == {*SAME, *ALIKE}
    return found


@pytest.mark.parametrize("name", SAME)
def test_others_compute_the_same_bits(name: str, oracles: dict[str, list[int]]) -> None:
    compared, differ = oracles[name]
    assert compared > 100 and differ == 0


@pytest.mark.parametrize("name", ALIKE)
def test_others_compute_nearly_the_same(name: str, oracles: dict[str, list[int]]) -> None:
    compared, differ = oracles[name]
    assert compared > 1000 and differ <= compared * ALIKE[name] / 1000


def test_int4_of_slime_by_hand() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor([7.0, -7.0, 3.5, 2.5, -2.5, 0.5, 0.0, 6.6])  # scale 1
    made = reference.int4_slime(weight)
    assert made.scale.tolist() == [[1.0]]
    assert [hex(word & 0xFFFFFFFF) for word in made.codes[0].tolist()] == [
        "0xf886ac1f",
        *["0x88888888"] * 3,
    ]


def test_nvfp4_by_hand() -> None:
    weight = torch.zeros(2, 16)
    weight[0, :8] = torch.tensor([2688.0, -2688.0, 112.0, 336.0, 560.0, 784.0, -1120.0, 1568.0])
    weight[1, :3] = torch.tensor([6.0, -5.0, 2.5])
    made = reference.nvfp4(weight)  # second scale 1, scales 448 and 1
    assert made.second is not None and made.second.item() == 1.0
    assert made.scale.float().tolist() == [[448.0], [1.0]]
    # ties of 0.25, 0.75, 1.25, 1.75, 2.5 and 3.5 go to the even code
    assert made.codes[0, :4].tolist() == [0xF7, 0x20, 0x42, 0x6C]
    assert made.codes[1, :3].tolist() == [0xE7, 0x04, 0x00]
    alone = reference.nvfp4(weight[1:], amax=torch.tensor(2688.0))
    assert torch.equal(alone.codes, made.codes[1:])


METHODS = {
    "fp8_block": lambda weight: reference.fp8_block(weight, (1, 32)),
    "fp8_ue8m0": lambda weight: reference.fp8_ue8m0(weight, (1, 32)),
    "fp8_packed": lambda weight: reference.fp8_packed(weight, (1, 32)),
    "fp8_tensor": reference.fp8_tensor,
    "int4": reference.int4,
    "int4_slime": reference.int4_slime,
    "mxfp8": reference.mxfp8,
    "nvfp4": reference.nvfp4,
}
# the scale, the code of the odd weight, that of the others
ODD = {
    NAN: {
        "fp8_block": (NAN, 0x7F, 0x7F),
        "fp8_ue8m0": (NAN, 0x7F, 0x7F),
        "fp8_packed": (0xFF, 0x7F, 0x7F),
        "fp8_tensor": (NAN, 0x7F, 0x7F),
        "int4": (NAN, 8, 8),
        "int4_slime": (NAN, 8, 8),
        "mxfp8": (255, 0x7F, 0x7F),
        "nvfp4": (NAN, 7, 7),
    },
    -INF: {
        "fp8_block": (INF, 0x7F, 0),
        "fp8_ue8m0": (2.0**127, 0xFE, 0),
        "fp8_packed": (0xFE, 0xFE, 0),
        "fp8_tensor": (INF, 0x7F, 0),
        "int4": (INF, 8, 8),
        "int4_slime": (INF, 8, 8),
        "mxfp8": (254, 0xFE, 0),
        "nvfp4": (448.0, 0xF, 0),
    },
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("odd", ODD)
def test_weights_that_are_no_numbers(method: str, odd: float) -> None:
    scale, own, others = ODD[odd][method]
    weight = torch.ones(1, 32)
    weight[0, 0] = odd
    made = METHODS[method](weight)
    assert made.scale.float().flatten()[0].item() == pytest.approx(scale, nan_ok=True)
    first = made.codes.contiguous().view(torch.uint8)[0, :2].tolist()
    if made.codes.dtype != reference.E4M3:
        first = [first[0] & 0xF, first[0] >> 4]
    assert first == [own, others]
