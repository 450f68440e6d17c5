"""An `sglang.Engine` in the trainer's own process, as verl has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import SGLANG_VERSIONS, engine_tree

from wsync import InvalidArgumentError, UnsupportedError
from wsync.handles.base import handle
from wsync.handles.sglang import SglangHandle
from wsync.messages import payload

SCRIPT = Path(__file__).parent / "support" / "sglang_engine.py"


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_every_worker_unpickles_its_own_tensors(version: str) -> None:
    tree = engine_tree("sglang", version)
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(tree)],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "equal": [True] * 4,
        # closing requests carry the version, and go through the tokenizer manager
        "forms": ["LocalSerializedTensor", "Tensor"],
        "handle": "SglangHandle",
        "version": "2",
        "open": False,
    }


class Engine:
    """An engine that only notes what it is given."""

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: Any = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        self.seen = (named_tensors, load_format, flush_cache)
        return True, "Success"


def test_stock_buckets_are_one_payload_per_worker() -> None:
    engine = Engine()
    found = handle(engine, workers=2)
    assert isinstance(found, SglangHandle)
    found.update_weights(
        [b"\x80one", b"\x80two"], load_format="flattened_bucket", weight_version=None, timeout=5
    )
    assert engine.seen == (["gG9uZQ==", "gHR3bw=="], "flattened_bucket", False)


def test_an_sglang_without_the_form_is_named() -> None:
    with pytest.raises(UnsupportedError, match="has no LocalSerializedTensor"):
        handle(Engine()).update_weights(
            [payload.control(b"x")], load_format="a.b", weight_version=None, timeout=5
        )


def test_workers_with_different_names_are_refused() -> None:
    lists = [payload.named_tensors([(name, torch.ones(1))]) for name in "ab"]
    with pytest.raises(InvalidArgumentError, match="payloads of 2 workers name different"):
        payload.per_worker(lists)
