"""One line of ordinary code: what is taken, and what is said where it is not."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.agreement_cases import Stock
from support.tensor_parallel_engine import TensorParallelEngine
from support.tiny_qwen3 import draw, same

import wsync
from wsync.layout import from_tensors

QUIET = wsync.Options(deadline=60.0, progress=False)


def test_urls_numbers_and_paths_may_be_of_other_forms(
    tmp_path: Path, config: Any, server: str
) -> None:
    options = wsync.Options(
        deadline=np.float32(30),
        threads=np.int64(2),
        round_nbytes=np.int32(1 << 20),
        directory=tmp_path,  # type: ignore[arg-type]
        checkpoint=tmp_path,  # type: ignore[arg-type]
        progress=False,
    )
    assert (options.directory, options.checkpoint) == (str(tmp_path), str(tmp_path))
    assert (type(options.threads), type(options.round_nbytes)) == (int, int)
    url = server.replace("http", "HTTP")
    with wsync.connect(draw(config, 1), [url], options=QUIET) as sync:
        sync.update(version=np.int64(7))
    assert wsync.handle(url).name == server
    assert wsync.handle(server).model_info(60)["weight_version"] == "7"


def connect(weights: Any, engines: Any = ("http://x",)) -> Any:
    return wsync.connect(weights, engines)


def update(weights: Any) -> None:
    layout = from_tensors({"w": torch.ones(1)})
    updater = wsync.UpdateWeightFromTensor(
        SimpleNamespace(), layout, lambda: weights, model_name="", options=QUIET
    )
    updater.connect_rollout_engines([Stock()])
    updater.update_weights()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: connect(torch.nn.Linear(1, 1)), "^Linear: pass tensors by name, as dict"),
        (lambda: connect(torch.nn.Linear(1, 1).parameters()), "pass tensors by name, as"),
        (lambda: connect({1: torch.ones(1)}), "1: names must be str, not int"),
        (lambda: connect({}, None), "engines=None: expected a list"),
        (lambda: connect({}, [SimpleNamespace(url="http://x")]), "give its url: 'http://x'"),
        (lambda: update(torch.nn.Linear(1, 1)), "pass tensors by global name, not a Linear"),
        (lambda: update(None), "the function returned None; expected tensors by"),
    ],
)
def test_what_stands_in_anothers_place_is_named(use: Any, text: str) -> None:
    with pytest.raises(wsync.InvalidArgumentError, match=text):
        use()


def test_weights_beside_codes_are_not_said_to_lie_in_private_memory(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes are made in memory of wsync's, so sharing them would change nothing."""
    shapes = {"model.layers.0.mlp.up_proj.weight": (128, 128), "model.norm.weight": (128,)}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    options = wsync.Options(quantise=fp8, checkpoint="", progress=False)
    with wsync.connect(weights, [server], options=options) as sync:
        with pytest.raises(wsync.WsyncError, match="up_proj"):
            sync.update()
    assert "share_memory" not in caplog.text


@pytest.mark.parametrize("delivery", ["auto", "direct"])
def test_the_hard_limit_of_descriptors_counts_and_the_soft_one_is_raised(
    config: Any, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each piece of memory that is read in place takes a descriptor of the worker."""
    weights = {name: tensor.share_memory_() for name, tensor in draw(config, 1).items()}
    options = wsync.Options(deadline=60.0, progress=False, delivery=delivery)
    few, hard = 2 * len(weights) - 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with TensorParallelEngine(config, tp=2) as engine:
        for most, path in ((hard, "direct"), (few, "ring")):
            for pid in engine.pids:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, most))
            with wsync.connect(weights, engines=[engine], options=options) as sync:
                assert set(sync.update().paths.values()) == {path}
            assert same(engine.weights(), weights)
            soft = [resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in engine.pids]
            assert [limit > few for limit in soft] == [most > few] * 2
    said = [text for text in caplog.messages if "gets a ring" in text]
    assert len(said) == (engine.workers if delivery == "direct" else 0)
    for text in said:
        assert re.findall(r"\d+ pieces|may open only \d+", text) == [
            *(f"{len(weights)} pieces", f"may open only {len(weights) - 1}")
        ]
