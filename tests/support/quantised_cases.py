"""What trainer ranks do in tests/test_quantised_update.py; rank 0 also runs the engine.

The references here are written from the definitions of the methods, in plain torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import hf_reference, megatron_cpu
from support.errors import error_of
from support.weights_only_engine import ProcessEngine

import wsync
from wsync import megatron
from wsync.disk import newest
from wsync.trainer import quantised_image
from wsync.trainer.quantised_image import Image

Tensors = dict[str, torch.Tensor]


def blocks(rows: int, cols: int) -> dict[str, Any]:
    """The quantization_config of FP8 blocks."""
    return {"quant_method": "fp8", "weight_block_size": [rows, cols], "fmt": "e4m3"}


def groups(size: int, symmetric: bool = True) -> dict[str, Any]:
    """The quantization_config of INT4 groups, which are slime's where they are symmetric."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "producer": {"name": "slime" if symmetric else "any"},
    }


PER_TENSOR: dict[str, Any] = {"quant_method": "fp8"}


def fp8_blocks(weight: torch.Tensor, rows: int, cols: int) -> Tensors:
    """float8 codes and a float32 scale for each block, whose last ones may be smaller."""
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // cols))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            block = weight[place].float()
            scales[i, j] = block.abs().max().clamp(min=1e-10) / 448.0
            codes[place] = (block / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scales}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max().clamp(min=1e-12).float() / 448.0
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale.view(1)}


def fp8_packed(weight: torch.Tensor) -> Tensors:
    """float8 codes, and for each row the exponents of four blocks' scales in an int32."""
    rows, cols = weight.shape
    scales = torch.zeros(rows, -(-cols // 512) * 4, dtype=torch.uint8)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(0, rows, 128):
        for j in range(0, cols, 128):
            block = weight[i : i + 128, j : j + 128].float()
            most = block.abs().max().clamp(min=1e-4) / 448.0
            power = torch.exp2(torch.ceil(torch.log2(most)))
            codes[i : i + 128, j : j + 128] = (block / power).to(torch.float8_e4m3fn)
            scales[i : i + 128, j // 128] = int(torch.log2(power)) + 127
    return {"": codes, "_scale_inv": scales.view(torch.int32)}


def int4_groups(weight: torch.Tensor, size: int) -> Tensors:
    rows, cols = weight.shape
    parts = weight.float().view(rows, cols // size, size)
    seventh = torch.tensor(1 / 7, dtype=torch.float32)
    scales = (parts.abs().amax(2) * seventh).clamp(min=1e-5)
    codes = (parts / scales[:, :, None]).round().clamp(-7, 7).to(torch.int64).view(rows, -1, 8) + 8
    words = sum(codes[:, :, i] << (4 * i) for i in range(8))
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor(weight.shape)
    return {"_packed": packed, "_scale": scales.to(weight.dtype), "_shape": shape}


# a quantization_config and what it makes of a weight, by the suffix of each tensor's name
METHODS: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "whole blocks": (blocks(8, 16), lambda w: fp8_blocks(w, 8, 16)),
    "cut blocks": (blocks(24, 40), lambda w: fp8_blocks(w, 24, 40)),
    "one block": (blocks(128, 128), lambda w: fp8_blocks(w, 128, 128)),
    "per tensor": (PER_TENSOR, fp8_tensor),
    "packed": (blocks(128, 128) | {"transform_ue8m0": True}, fp8_packed),
    "int4": (groups(16), lambda w: int4_groups(w, 16)),
    "int4, cut groups": (groups(32), lambda w: int4_groups(w, 32)),
}


def quantised(weights: Tensors, method: str) -> Tensors:
    """A whole model's tensors as they are delivered."""
    made: Tensors = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            parts = METHODS[method][1](weight)
            made |= {name + suffix: part.contiguous() for suffix, part in parts.items()}
        else:
            made[name] = weight
    return made


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names whose bytes differ, or that one side lacks."""
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or found[name].shape != expected[name].shape
        or not torch.equal(
            found[name].contiguous().view(torch.uint8),
            expected[name].contiguous().view(torch.uint8),
        )
    ]


def shapes_of(tensors: Tensors) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _fail(*_: object) -> None:
    raise ValueError("a planted failure")


def _no_memory(nbytes: int, *_: object) -> None:
    raise wsync.NoMemoryError(f"Memory: {nbytes} bytes are not there")


# what one rank cannot do while it quantises
FAULTS: Mapping[str, Callable[[], Any]] = {
    "merge": lambda: mock.patch.object(quantised_image, "_merge", _fail),
    "memory": lambda: mock.patch.object(quantised_image._core, "Memory", _no_memory),
}


def fail_once(config: Any, parallel: megatron_cpu.Parallel, fault: str) -> dict[str, Any]:
    """Rank 1 fails while the ranks quantise; the next update is to succeed."""
    method = "cut blocks"
    options = wsync.Options(deadline=60.0, progress=False, park=True, quantise=METHODS[method][0])
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        layout = megatron.layout(trainer.chunks, config)
        expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
        engines = [ProcessEngine(shapes_of(expected))] if dist.get_rank() == 0 else []
        for engine in engines:
            stack.callback(engine.close)
        with wsync.connect(layout, engines, options=options) as sync:
            sync.update()
            trainer.randomize(5)
            with FAULTS[fault]() if dist.get_rank() == 1 else contextlib.nullcontext():
                error = error_of(sync.update)
            kept = [what_is_held(engine, expected) for engine in engines]
            paused = any(engine.paused for engine in engines)
            sync.update()
            expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
            wrong = [n for engine in engines for n in differing(engine.weights(), expected)]
    return {"error": error, "kept": kept, "paused": paused, "wrong": wrong}


def what_is_held(engine: ProcessEngine, expected: Tensors) -> tuple[list[str], bool, str]:
    """What of an engine's weights differs from what is expected, whether these are of one update,
    and of which version."""
    info = engine.model_info(60)
    return differing(engine.weights(), expected), info["consistent"], info["weight_version"]


def die_once(config: Any, parallel: megatron_cpu.Parallel, place: str, folder: str) -> None:
    """Rank 2 is killed at a place of an update; the others note what they raise, and rank 0 what
    the engine has then, and after an update from a trainer of one process."""
    method = "cut blocks"
    options = wsync.Options(deadline=60.0, progress=False, quantise=METHODS[method][0])
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        layout = megatron.layout(trainer.chunks, config)
        expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
        engines = [ProcessEngine(shapes_of(expected))] if dist.get_rank() == 0 else []
        sync = wsync.connect(layout, engines, options=options)
        sync.update()
        trainer.randomize(5)
        weights = hf_reference.hf_state_dict(trainer.chunks, config)
        with dying(place) if dist.get_rank() == 2 else contextlib.nullcontext():
            found: dict[str, Any] = {"error": error_of(sync.update)}
        for engine in engines:
            found["kept"] = what_is_held(engine, expected)
            with mock.patch.object(dist, "is_initialized", return_value=False):
                again = wsync.connect(weights, [engine], options=options)
            with again:
                again.update(version=7)
            found["after"] = what_is_held(engine, quantised(weights, method))
            engine.close()
        Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
        os._exit(0)  # groups that a rank has left cannot be taken down in order


def dying(place: str) -> Any:
    """Has this process killed before ranks compare what blocks hold ("amaxes"), before it makes
    codes of that ("codes"), or before any are sent ("rounds")."""
    owner, name = (Image, "fill") if place == "rounds" else (quantised_image, "_merge")
    original = getattr(owner, name)

    def die(*given: Any) -> None:
        if place != "amaxes":
            original(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    return mock.patch.object(owner, name, die)


def update_twice(
    config: Any, parallel: megatron_cpu.Parallel, exchange: str, folder: str
) -> dict[str, Any]:
    """By each method: two updates of an engine with different weights, and one through the disk;
    what differed.  exchange: "direct" for none."""
    wrong: list[str] = []
    options: dict[str, Any] = {"deadline": 60.0, "progress": False}
    way: dict[str, Any] = {"exchange": exchange, "round_nbytes": 1 << 14}
    if direct := exchange == "direct":
        way = {"delivery": "direct"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        for chunk in trainer.chunks if direct else ():
            chunk.share_memory()
        layout = megatron.layout(trainer.chunks, config)
        for number, (method, (given, _)) in enumerate(METHODS.items()):
            expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
            engines = [ProcessEngine(shapes_of(expected))] if dist.get_rank() == 0 else []
            chosen = wsync.Options(**options, **way, quantise=given, park=number % 2 > 0)
            with (
                contextlib.ExitStack() as closing,
                wsync.connect(layout, engines, options=chosen) as sync,
            ):
                for engine in engines:
                    closing.callback(engine.close)
                for seed in (number, number + 100):
                    trainer.randomize(seed)
                    sync.update()
                    expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
                    for engine in engines:
                        wrong += [f"{method}: {n}" for n in differing(engine.weights(), expected)]
            kept = str(Path(folder) / str(number))
            Path(kept).mkdir(exist_ok=True)
            dist.barrier()
            written = wsync.Options(**options, quantise=given)
            with wsync.DiskSync(layout, folder=kept, options=written) as disk:
                disk.update()
            found: Tensors = {}
            for path in newest(kept).glob("*.safetensors"):
                found |= load_file(path)
            if method == "packed":  # for engines' memory: files have scales as they come
                expected = quantised(
                    hf_reference.hf_state_dict(trainer.chunks, config), "one block"
                )
            wrong += [f"{method}, disk: {n}" for n in differing(found, expected)]
    return {"wrong": wrong}
