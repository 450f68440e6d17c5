"""What the transformers engine lets in: its key, and the bounds of its requests' bodies."""

import asyncio
from typing import Any

import httpx
import pytest
from support import tiny_qwen3
from transformers import AutoModelForCausalLM

from wsync.engine.transformers import create_app

KEY = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(AutoModelForCausalLM.from_config(tiny_qwen3.dense()), api_key="k")


def ask(app: Any, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, past sockets and clients that would mend it."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


# --- the key --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["engine", "engine/health?", "engine/health#", "/health?", ""])
def test_no_host_header_stands_for_the_key(app: Any, host: str) -> None:
    answer = ask(app, "GET", "/model_info", headers={"Host": host})
    assert answer.status_code == 401
    assert ask(app, "GET", "/model_info", headers={"Host": host, **KEY}).status_code == 200


@pytest.mark.parametrize("path", ["/healthy", "/health/", "/health/../model_info", "/health%2f"])
def test_no_path_but_healths_own_is_open(app: Any, path: str) -> None:
    assert ask(app, "GET", path).status_code == 401
    assert ask(app, "GET", "/health").status_code == 200
