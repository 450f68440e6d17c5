"""What trainer ranks do in tests/test_quantised_ranks.py; rank 0 also runs the engines."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from support import hf_reference, latent_cases, megatron_cpu, quantise_reference, tiny_models
from support.quantised_models import SIZES, Method, Tensors
from support.sglang_sessions import SglangSessions
from support.vllm_engine import VllmEngine

import wsync
from wsync import megatron
from wsync.trainer import quantised_image

_started: list[Any] = []


def start() -> None:
    """Starts the engines' workers; without a collective, for they take their time."""
    if dist.get_rank() == 0:
        _started.extend([SglangSessions(), VllmEngine(tp=1)])


def stop() -> None:
    while _started:
        _started.pop().close()


class Case(NamedTuple):
    """A model, its trainers and engines.

    method: the fields of a Method.  changes: of the model.  slime: codes are to be slime's.
    odd: some weights are infinite or no numbers at the second update.
    cut: modules of engines of whose blocks trainers' ranks hold parts.
    """

    family: str
    method: tuple[Any, ...]
    changes: dict[str, Any]
    parallel: megatron_cpu.Parallel
    engines: tuple[str, ...]
    slime: bool = False
    odd: bool = False
    cut: tuple[str, ...] = ()


def engines_of(case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    """Engines that serve the model, by name, on rank 0; changes: all that there are of it."""
    found: dict[str, Any] = {}
    if not _started:
        return found
    sglang, vllm = _started
    known = {
        "sglang": sglang,
        "sglang, learnt": sglang.alone(0, stock=False),
        "sglang, stock": sglang.alone(1, stock=True),
        "vllm": vllm,
    }
    for name in case.engines:
        found[name] = known[name]
        found[name].prepare(case.family, method=case.method, changes=changes)
    return found


def published(weights: Tensors, method: Method, slime: bool) -> Tensors:
    """The quantised checkpoint of a model, by the reference that shares nothing with wsync."""
    found: Tensors = {}
    for name, weight in weights.items():
        if not method.chooses(name, weight):
            found[name] = weight
        elif method.kind == "fp8_block":
            made = quantise_reference.fp8_block(weight, tuple(method.block), reciprocal=slime)
            found |= {name: made.codes, f"{name}_scale_inv": made.scale}
        else:
            rule = quantise_reference.int4_slime if slime else quantise_reference.int4
            made = rule(weight, method.block[1])
            found |= {f"{name}_packed": made.codes, f"{name}_scale": made.scale}
            found[f"{name}_shape"] = torch.tensor(weight.shape)
    return found


def differing(engine: Any, weights: Tensors) -> list[str]:
    """What an engine holds that its own loading of a checkpoint would have made otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        torch.save(weights, path)
        found = {path for each in engine.differing(str(path)) for path in each}
    if isinstance(engine, VllmEngine):
        # its reload leaves a fused layer the shape that comes first; nobody reads it
        found = {path for path in found if not path.endswith("weight_shape")}
    return sorted(found)


def _without_transformer_engine() -> Any:
    """Latent attention asks whether a module is one of its, be it there or not."""
    from megatron.core.transformer import multi_latent_attention as attention

    return mock.patch.object(attention, "TELinear", type("TELinear", (), {}))


class Trainer:
    """A Megatron trainer of this rank, and the checkpoint of what it holds."""

    def __init__(self, family: str, config: Any, parallel: megatron_cpu.Parallel) -> None:
        self.config, self.latent = config, family == "deepseek_v3"
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if self.latent:
            self.shapes = tiny_models.checkpoint(family, config)
            options["config"] = latent_cases.megatron_config(config, parallel, torch.bfloat16)
        with latent_cases.buildable(), _without_transformer_engine():
            self.made = megatron_cpu.build(config, parallel, **options)
        self.layout = megatron.layout(self.made.chunks, config)

    def renew(self, seed: int, odd: bool) -> Tensors:
        """Other weights; collective.  odd: some of the last rank are no numbers."""
        if not self.latent:
            self.made.randomize(seed)
            if odd and dist.get_rank() == dist.get_world_size() - 1:
                weights = dict(self.made.chunks[0].named_parameters())
                with torch.no_grad():
                    for last, value in (("qkv", torch.nan), ("proj", -torch.inf)):
                        name = f"decoder.layers.0.self_attention.linear_{last}.weight"
                        weights[name][-1, -1] = value
                    weights["decoder.layers.0.mlp.linear_fc2.weight"][-1, -1] = torch.inf
            return hf_reference.hf_state_dict(self.made.chunks, self.config)
        state = tiny_models.tensors(self.shapes, seed)
        names = megatron_cpu.named_weights(self.made.chunks, self.config.n_routed_experts)
        with torch.no_grad():
            for name, tensor in names:
                tensor.copy_(latent_cases.share(name, state, self.config, False))
        return state


def update(case: Case) -> dict[str, Any]:
    """Two updates of all engines at once, with different weights.

    wrong: what differs in an engine from its own loading of a reference's checkpoint.  unmerged:
    the same after a third update, in which ranks that hold parts of blocks did not compare them.
    learnt: of an engine, see below.
    """
    method, changes = Method(*case.method), {**SIZES[case.family], **case.changes}
    config = tiny_models.config(case.family, **changes)
    given = method.config(config) | ({"producer": {"name": "slime"}} if case.slime else {})
    options = wsync.Options(
        deadline=120.0, progress=False, quantise=given, round_nbytes=1 << 19, ring_nbytes=1 << 20
    )
    engines = engines_of(case, changes)
    found: dict[str, Any] = {"wrong": {name: [] for name in engines}, "unmerged": {}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.on_cpu())
        stack.enter_context(megatron_cpu.groups(case.parallel))
        trainer = Trainer(case.family, config, case.parallel)
        handed = list(engines.values())
        sync = stack.enter_context(wsync.connect(trainer.layout, handed, options=options))

        def updated(seed: int) -> dict[str, list[str]]:
            weights = trainer.renew(seed, case.odd and seed == 2)
            sync.update()
            expected = published(weights, method, case.slime) if engines else {}
            return {name: differing(engine, expected) for name, engine in engines.items()}

        for seed in (1, 2):
            for name, paths in updated(seed).items():
                found["wrong"][name] += paths
        if case.cut:
            with mock.patch.object(quantised_image, "_merge", lambda *_: None):
                found["unmerged"] = updated(3)
    return found | {"learnt": {name: learnt(engine) for name, engine in engines.items()}}


def learnt(engine: Any) -> list[Any]:
    """Why an engine loads whole tensors, "" if it does not, and those that it loads so even then;
    nothing of one without wsync's loader."""
    if isinstance(engine, VllmEngine):
        [[reason, _]] = engine.collective_rpc("reasons")
        return [reason, []]
    if not engine.load_formats:
        return []
    names = {name for each in engine.ask("fallback") for name in each}
    return ["".join(engine.ask("reason")), sorted(names)]
