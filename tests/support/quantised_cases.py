"""What trainer ranks do in tests/test_quantised_update.py; rank 0 also runs the engine.

The references here are written from the definitions of the methods, in plain torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.errors import error_of

import wsync
from wsync import megatron
from wsync.demo import hf_reference, megatron_cpu
from wsync.demo.engines.bare_engine import ProcessEngine
from wsync.disk import newest
from wsync.trainer import quantised_image

Tensors = dict[str, torch.Tensor]


def blocks(rows: int, cols: int) -> dict[str, Any]:
    """The quantization_config of FP8 blocks."""
    return {"quant_method": "fp8", "weight_block_size": [rows, cols], "fmt": "e4m3"}


def groups(size: int) -> dict[str, Any]:
    """slime's quantization_config of INT4 groups."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "producer": {"name": "slime"},
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


def fail_once(config: Any, parallel: megatron_cpu.Parallel) -> dict[str, Any]:
    """Rank 1 fails while the ranks compare their blocks; the next update is to succeed."""
    method = "cut blocks"
    options = wsync.Options(deadline=60.0, progress=False, quantise=METHODS[method][0])

    def fail(*_: object) -> None:
        raise ValueError("a planted failure")

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
            broken = mock.patch.object(quantised_image, "_merge", fail)
            with broken if dist.get_rank() == 1 else contextlib.nullcontext():
                error = error_of(sync.update)
            kept = [n for engine in engines for n in differing(engine.weights(), expected)]
            consistent = all(engine.model_info(60)["consistent"] for engine in engines)
            paused = any(engine.paused for engine in engines)
            sync.update()
            expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
            wrong = [n for engine in engines for n in differing(engine.weights(), expected)]
    return {
        **{"error": error, "kept": kept, "consistent": consistent},
        **{"paused": paused, "wrong": wrong},
    }


def die_once(config: Any, parallel: megatron_cpu.Parallel, folder: str) -> None:
    """Rank 2 is killed before it has told what its blocks hold; the others note what they raise."""
    options = wsync.Options(deadline=60.0, progress=False, quantise=METHODS["cut blocks"][0])
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        layout = megatron.layout(trainer.chunks, config)
        sync = wsync.DiskSync(layout, folder=folder, options=options)
        sync.update()

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        broken = mock.patch.object(quantised_image, "_merge", die)
        with broken if dist.get_rank() == 2 else contextlib.nullcontext():
            text = error_of(sync.update)
        Path(folder, f"rank{dist.get_rank()}.txt").write_text(str(text))
        os._exit(0)  # groups that a rank has left cannot be taken down in order


def update_twice(
    config: Any, parallel: megatron_cpu.Parallel, exchange: str, folder: str
) -> dict[str, Any]:
    """By each method: two updates of an engine with different weights, and one through the disk;
    what differed."""
    wrong: list[str] = []
    options: dict[str, Any] = {"deadline": 60.0, "progress": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(parallel))
        trainer = megatron_cpu.build(config, parallel, dtype=torch.bfloat16)
        layout = megatron.layout(trainer.chunks, config)
        for number, (method, (given, _)) in enumerate(METHODS.items()):
            expected = quantised(hf_reference.hf_state_dict(trainer.chunks, config), method)
            engines = [ProcessEngine(shapes_of(expected))] if dist.get_rank() == 0 else []
            chosen = wsync.Options(
                **options,
                exchange=exchange,
                quantise=given,
                round_nbytes=1 << 14,
                park=number % 2 > 0,
            )
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
            wrong += [f"{method}, disk: {n}" for n in differing(found, expected)]
    return {"wrong": wrong}
