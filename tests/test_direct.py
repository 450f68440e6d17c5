"""Updates that engine workers copy out of the trainer's own memory."""

from __future__ import annotations

from typing import Any

from support.tiny_qwen3 import Weights, draw, same

import wsync
from wsync.demo.engines.tensor_parallel_engine import TensorParallelEngine

OPTIONS = wsync.Options(deadline=60.0, progress=False, delivery="direct")


def shared(weights: Weights) -> Weights:
    for tensor in weights.values():
        tensor.share_memory_()
    return weights


def test_every_byte_arrives(config: Any, engine: TensorParallelEngine) -> None:
    weights = shared(draw(config, 1))
    with wsync.connect(weights, engines=[engine], options=OPTIONS) as sync:
        report = sync.update(version=7)
        assert same(engine.weights(), weights)
        for seed in (2, 3):
            for name, tensor in draw(config, seed).items():
                weights[name].copy_(tensor)
            report = sync.update()
            assert same(engine.weights(), weights)
    assert (report.rounds, report.ring_nbytes, report.sent_nbytes) == (1, 0, 0)
