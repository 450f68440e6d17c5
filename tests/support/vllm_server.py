"""vLLM on a CPU: its own build for CPUs, with its kernels, in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import servers
from support.server_models import Checkpoint
from support.sglang_server import NEWEST as SGLANG

from wsync.demo import cpu_server

NEWEST = "vllm0320"
_SITE = Path(__file__).with_name("vllm_site")
KV_CACHE_NBYTES = 1 << 26
PROBE = "support.vllm_probe.Probe"
_EXTENSION = "wsync.vllm.WorkerExtension"


class Server(servers.Server):
    """vLLM's server.  settings: tp, the number of workers; port, of a server that is gone;
    extension, the class that its workers get; arguments, further ones."""

    module = "vllm.entrypoints.openai.api_server"

    def _arguments(self, meeting: int) -> list[str]:
        given, dtype = self._settings.get, str(self.model.dtype).removeprefix("torch.")
        words = [
            *("--model", self.model.folder, "--dtype", dtype),
            *("--host", "127.0.0.1", "--port", self.port, "--tensor-parallel-size", self.workers),
            *("--worker-extension-cls", given("extension", _EXTENSION)),
            *("--skip-tokenizer-init", "--enable-scale-out", "--enforce-eager"),
            *("--kv-cache-memory-bytes", KV_CACHE_NBYTES, "--max-num-seqs", 4),
            *given("arguments", ()),
        ]
        return list(map(str, words))

    def hold(self, count: int) -> None:
        """Has its engine make no more than so many tokens of an answer until it is next told to
        pause; of a server that a Nursery has started."""
        file = self.log.with_name(self.log.name + ".new")
        file.write_text(str(count))
        file.rename(self.log.with_name(self.log.name + ".hold"))


class Served(Server):
    """With the arguments that `wsync serve` gives."""

    def _arguments(self, meeting: int) -> list[str]:
        words = cpu_server.command("vllm", str(self.model.folder), self.port)[1]
        assert words[:2] == ["-m", self.module]
        return words[2:]


class Nursery(servers.Nursery):
    def __init__(self, folder: Path, log: Path) -> None:
        """folder: what `packages` has said."""
        super().__init__("vllm", environment(folder), log)


def offline(start: servers.Starter, kind: str, folder: Path, models: list[Checkpoint]) -> Any:
    """What an engine of a process of its own said before and after updates; see vllm_offline.py.

    folder: for its log.  models: what it starts with, and what it is updated to."""
    log, out = folder / f"{kind}.log", folder / f"{kind}.json"
    places = [str(model.folder) for model in models]
    session = start(log, "support.vllm_offline", [kind, str(out), *places])
    servers.await_that(lambda: session not in servers.members(session), f"{kind} has ended")
    servers.kill(session)
    assert out.exists(), servers.tail(log)
    return json.loads(out.read_text())


def transfer(start: servers.Starter, server: Server, model: Checkpoint, version: str) -> int:
    """How many bytes a trainer of two ranks has delivered; see vllm_transfer.py."""
    log, out = server.log.with_name(f"{version}.log"), server.log.with_name(f"{version}.out")
    port = str(servers.free_ports(1)[0])
    out.write_text(port)
    given = [server.url, str(server.workers), str(model.folder), version, str(out)]
    session = start(log, "support.vllm_transfer", given)
    servers.await_that(lambda: session not in servers.members(session), f"{version} has ended")
    servers.kill(session)
    assert out.read_text() != port, servers.tail(log)
    return int(out.read_text())


def environment(folder: Path) -> dict[str, str]:
    # SGLang's and vLLM's packages are the same, but for a few
    folders = (folder, folder.with_name(SGLANG), Path(__file__).parents[1])
    return servers.environment(_SITE, *folders, without=("VLLM",)) | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
