"""SGLang's whole server on a CPU: uvicorn, tokenizer manager, schedulers and detokenizer, in
processes of their own, with stand-ins for its kernels (sglang_site)."""

from __future__ import annotations

from pathlib import Path

import requests
from support import servers
from support.server_models import PATIENCE

NEWEST = "sglang0523"
_SITE = Path(__file__).with_name("sglang_site")
_MODELS = ("llama", "llama_eagle3", "mimo", "mimo_mtp", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


class Server(servers.Server):
    """settings: tp, the number of workers; port, of a server that is gone; arguments, further
    ones."""

    module = "sglang.launch_server"

    def _arguments(self, meeting: int) -> list[str]:
        dtype = str(self.model.dtype).removeprefix("torch.")  # or it makes float32 float16
        further = self._settings.get("arguments", ())
        words = [
            *(
                "--model-path",
                self.model.folder,
                "--device",
                "cpu",
                "--dtype",
                dtype,
                "--tp-size",
                self.workers,
            ),
            *("--host", "127.0.0.1", "--port", self.port, "--nccl-port", meeting),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
            *("--disable-overlap-schedule", "--disable-radix-cache"),
            *("--max-total-tokens", 8192, "--max-running-requests", 4),
            *("--custom-weight-loader", "wsync.sglang.load_weights", *further),
        ]
        return list(map(str, words))


class Awake(Server):
    """One that may not be able to generate, and whose workers do not sleep: with data-parallel
    attention they hear of a request a second later then."""

    def _arguments(self, meeting: int) -> list[str]:
        return [word for word in super()._arguments(meeting) if word != "--sleep-on-idle"]

    def _healthy(self) -> bool:
        return requests.get(self.url + "/model_info", timeout=PATIENCE).ok


class Drafting(Awake):
    """One that drafts tokens with the model in the folder that the setting `draft` names, or with
    its own layers.  It generates nothing: on a CPU drafts need kernels."""

    def _arguments(self, meeting: int) -> list[str]:
        words = super()._arguments(meeting)
        draft = self._settings.get("draft")
        words += ["--speculative-algorithm", "EAGLE3" if draft else "EAGLE"]
        words += ["--speculative-draft-model-path", str(draft or self.model.folder)]
        words += ["--speculative-num-steps", "1", "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", "2"]
        return [*words, "--speculative-draft-attention-backend", "intel_amx"]


class Served(Server):
    """As `wsync serve` starts it."""

    module = "wsync"

    def _arguments(self, meeting: int) -> list[str]:
        further = self._settings.get("arguments", ())
        return ["serve", "sglang", "--port", str(self.port), *further]


class Nursery(servers.Nursery):
    def __init__(self, folder: Path, log: Path) -> None:
        """folder: what `packages` has said."""
        super().__init__("sglang", environment(folder), log)


def plain_environment(folder: Path) -> dict[str, str]:
    """A user's, who has installed SGLang."""
    return servers.environment(folder, without=("SGLANG",))


def environment(folder: Path) -> dict[str, str]:
    models = sorted(path.stem for path in (folder / "sglang/srt/models").glob("*.py"))
    # an older version runs with the newest one's packages
    folders = (folder, folder.with_name(NEWEST))
    return servers.environment(_SITE, *folders, without=("SGLANG",)) | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",  # for each worker one; it binds nothing
        # the others take a worker longer to import than all else
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(name for name in models if name not in _MODELS),
    }
