"""Run as a script: learns engines' own model classes by numbers and by a recording, and compares
them element by element.

    python probe_models.py ENGINE TREE PACKAGES CASES

As learn_models.py; of each case the last rank is looked at.  Prints a JSON list of what was found.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[3])
sys.path.insert(1, str(Path(__file__).parent.parent))

import torch
from support import tiny_models

from wsync._core import LayoutBuilder
from wsync.engine.learn.dummy_weights import MadeUpModel
from wsync.engine.learn.module_memory import ModuleMemory, whole
from wsync.engine.learn.recorded_loader import RecordedLoader
from wsync.engine.learn.regions import common_nbytes
from wsync.module_tensors.quantised_names import is_note
from wsync.probing.codes import kind_of
from wsync.probing.learn import LearntLoad, learn
from wsync.probing.numbering import Source
from wsync.sglang import SglangLoader

HOST: Any = importlib.import_module(
    {"sglang": "support.sglang_host", "vllm": "support.vllm_host"}[sys.argv[1]]
)
LOADER = SglangLoader if sys.argv[1] == "sglang" else RecordedLoader
Place = tuple[int, str, int, Any, Any, Any]  # area, name, byte, extent, strides, start


def targets_of(held: ModuleMemory) -> list[tuple[int, int, torch.Tensor]]:
    """(area, byte, tensor) of all that a load may write to, without what shares their elements."""
    found, taken = [], dict[int, list[Any]]()
    facts = sorted(
        zip(held.facts, held.tensors, strict=True),
        key=lambda pair: (pair[0][0] not in held.parameters, -pair[1].numel()),
    )
    for fact, tensor in facts:
        own = fact[0] in held.parameters or tensor.is_floating_point()
        if not own or not kind_of(tensor.dtype) or fact[4] in held.caches:
            continue
        mine, others = whole(fact), taken.setdefault(fact[4], [])
        if not any(common_nbytes(mine, other) for other in others):
            others.append(mine)
            found.append((fact[4], fact[5], tensor))
    return found


def painted(
    held: ModuleMemory, places: Iterator[Place], shapes: dict[str, Any]
) -> list[torch.Tensor]:
    """By area and byte: which element of which tensor begins there, -1: none."""
    paint = [torch.full((area.end - area.start,), -1, dtype=torch.int64) for area in held.areas]
    names = list(shapes)
    for area, name, address, extent, strides, start in places:
        number = torch.full(tuple(extent), names.index(name) << 40)
        for axis, (at, count) in enumerate(zip(start, extent, strict=True)):
            step = math.prod(shapes[name][axis + 1 :])
            number += (torch.arange(at, at + count) * step).view(
                -1, *[1] * (len(extent) - axis - 1)
            )
        paint[area].as_strided(tuple(extent), tuple(strides), address).copy_(number)
    return paint


def by_numbers(found: LearntLoad, targets: list[tuple[int, int, torch.Tensor]]) -> Iterator[Place]:
    for piece in (*found.pieces, *(each.target for each in found.copies)):
        area, offset, tensor = targets[piece.target]
        item = tensor.element_size()
        strides = [stride * item for stride in piece.strides]
        yield area, piece.name, offset + piece.offset * item, piece.extent, strides, piece.start


def recorded(loader: Any, held: ModuleMemory, shapes: dict[str, Any]) -> list[torch.Tensor]:
    recording = loader.recording
    if recording is None:
        return painted(held, iter(()), shapes)
    paint = painted(
        held,
        (
            (each.area, name, each.box.address, each.box.extent, each.box.strides, each.box.start)
            for name, pieces in recording.pieces.items()
            for each in pieces
            if each.area < len(held.areas)
        ),
        shapes,
    )
    for each in recording.copies:
        extent, source, target = (
            zip(*each.move.dims, strict=True) if each.move.dims else ((), (), ())
        )
        read = paint[each.source_area].as_strided(extent, source, each.move.source)
        paint[each.area].as_strided(extent, target, each.move.destination).copy_(read.clone())
    return paint


def run(case: dict[str, Any], config: Any, shapes: Any) -> dict[str, Any]:
    HOST.host(tp=case["tp"], ep=case["ep"], rank=case["tp"] - 1)
    options = []
    if case.get("fp8"):
        shapes = tiny_models.blockwise_fp8(shapes)
        options = learn_models().blockwise_fp8(config)
    elif sys.argv[1] == "sglang" and case["family"] in tiny_models.SAVED + tiny_models.UNKNOWN:
        config = HOST.configure(config)
    tensors = tiny_models.tensors(shapes, 0)
    builder = LayoutBuilder()
    for name, tensor in tensors.items():
        builder.add_tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    layout = builder.build()
    own, model = (HOST.build(case["family"], config, *options) for _ in range(2))
    for each in (own, model):  # as an engine has: loading may make further tensors
        each.load_weights(list(tensors.items()))
    loader = LOADER(own, ignore=("*",))
    start = time.perf_counter()
    loader.learn(layout)
    result: dict[str, Any] = {"case": case, "old_seconds": time.perf_counter() - start}
    held = ModuleMemory(model)
    targets, calls = targets_of(held), 0

    def load(pairs: Any) -> None:
        nonlocal calls
        calls += 1
        model.load_weights(pairs)

    made = [dict(MadeUpModel(layout, seed).pairs()) for seed in (0, 1)]
    start = time.perf_counter()
    found = learn(
        load,
        [tensor for *_, tensor in targets],
        [Source(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()],
        {name: t for name, t in tensors.items() if is_note(name) or not kind_of(t.dtype)},
        (lambda source: made[0][source.name], lambda source: made[1][source.name]),
    )
    result["seconds"] = time.perf_counter() - start
    forms = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = torch.cat(recorded(loader, ModuleMemory(own), forms))
    mine = torch.cat(painted(held, by_numbers(found, targets), forms))
    both = (wanted >= 0) & (mine >= 0)
    names = list(forms)
    differing = wanted[(wanted != mine) & (wanted >= 0)] >> 40
    aside = {} if loader.recording is None else loader.recording.fallback
    return result | {
        "wanted": int((wanted >= 0).sum()),
        "same": int((both & (wanted == mine)).sum()),
        "differing": sorted({names[number] for number in differing.tolist()}),
        "aside": sorted(aside),
        "computed": sorted(found.computed),
        "calls": calls,
    }


def learn_models() -> Any:
    return importlib.import_module("support.learn_models")


def main() -> None:
    tree, cases = Path(sys.argv[2]), json.loads(sys.argv[4])
    models = [learn_models().model_of(case["family"], "{}", False) for case in cases]
    HOST.load(tree)
    results = [
        run(case, copy.deepcopy(config), shapes)
        for case, (config, shapes) in zip(cases, models, strict=True)
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
