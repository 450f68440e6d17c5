"""What SGLang's model classes import, without the CUDA packages that it depends on."""

from __future__ import annotations

VERSION = "0.5.23"  # that the demo has been seen with
# as pip takes them with --no-deps; vLLM's model classes need no more
PACKAGES = (
    *("transformers==5.19.0", "huggingface_hub<2", "tokenizers", "safetensors", "regex"),
    *("psutil", "pybase64", "orjson", "msgspec", "einops", "pyzmq", "pillow", "dill", "gguf"),
    *("compressed-tensors", "requests", "hf-xet", "typer", "shellingham", "rich", "click"),
    *("httpx", "httpcore", "h11", "anyio", "sniffio", "pyyaml", "loguru"),
    *("aiohttp", "multidict", "yarl", "aiosignal", "frozenlist", "propcache", "attrs"),
    "aiohappyeyeballs",
)


def how_to_get(folder: str = "sglang-files") -> str:
    """The commands that bring them, for a shell."""
    wanted = " ".join(f"'{package}'" for package in (f"sglang=={VERSION}", *PACKAGES))
    return (
        f"pip install --no-deps --target {folder} {wanted}\n"
        f"wsync demo --engine sglang --engine-path {folder}"
    )
