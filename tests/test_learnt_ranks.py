"""SGLang's and vLLM's own workers, updated by Megatron trainers of other parallel sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support import learnt_cases, own_family
from support.engines import engine_packages, engine_tree
from support.megatron_cpu import Parallel
from support.procs import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[("sglang", "0.5.17"), ("sglang", "newest"), ("vllm", "0.33.0")]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    engine, version = request.param
    engine_tree(engine, version)
    engine_packages()
    with Ranks(4, path=sys.path) as started:
        started.run(learnt_cases.start, engine, version, timeout=240)
        yield started
        started.run(learnt_cases.stop)


TIED = {"tie_word_embeddings": True}
EXPERTS = Parallel(tp=2, pp=2, ep=2, etp=1)


@pytest.mark.parametrize(
    ("family", "changes", "parallel", "ep", "delivery"),
    [
        ("llama", {}, Parallel(tp=2, pp=2), 1, "auto"),
        ("qwen3", {}, Parallel(tp=1, pp=2), 1, "auto"),
        ("qwen3", TIED, Parallel(tp=2, pp=2), 1, "auto"),
        ("qwen3", TIED, Parallel(tp=2, pp=2), 1, "direct"),
        ("qwen3_moe", {}, EXPERTS, 1, "auto"),
        ("qwen3_moe", {}, EXPERTS, 2, "auto"),
        ("qwen3_moe", {}, EXPERTS, 2, "direct"),
        ("qwen3_moe", {}, Parallel(ep=4, etp=1), 2, "auto"),
        # which is registered by the trainers alone
        (own_family.NAME, {}, EXPERTS, 1, "auto"),
    ],
)
def test_every_worker_holds_what_its_own_loading_gives(
    family: str, changes: dict[str, Any], parallel: Parallel, ep: int, delivery: str, ranks: Ranks
) -> None:
    case = (family, changes, parallel, ep, delivery)
    facts = ranks.run(learnt_cases.update_twice, *case, timeout=240)
    assert [fact["wrong"] for fact in facts] == [[]] * 4
    assert facts[0]["redundancy"] == 1.0
    assert (facts[0]["rounds"] > 1) == (delivery == "auto")
    assert facts[0]["delivered_nbytes"] < 1.2 * facts[0]["model_nbytes"]
