"""A model of small tensors whose parts and parameters are as an engine has them.

They are those of SGLang's class for Qwen3-30B-A3B: queries, keys and values in one parameter, and
the experts of a layer in two.  Of 18,867 tensors that is 435 parameters in 678 modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

_QKV = re.compile(r"\.([qkv])_proj\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
# parts without a parameter, by what stands beside them
_BESIDE = {"qkv_proj": ("rotary_emb", "attn"), "experts": ("topk",)}


def place_of(name: str) -> tuple[str, int]:
    """The path of the parameter that a tensor of a checkpoint is in, and its number there."""
    if found := _QKV.search(name):
        return f"{name[: found.start()]}.qkv_proj.weight", "qkv".index(found[1])
    if found := _EXPERT.search(name):
        at, expert = f"{name[: found.start()]}.experts", int(found[1])
        if found[2] == "down":
            return f"{at}.w2_weight", expert
        return f"{at}.w13_weight", 2 * expert + (found[2] == "up")
    return name, 0


class FusedModel(torch.nn.Module):
    """names: of the tensors; each is `values` numbers in bfloat16."""

    def __init__(self, names: Iterable[str], values: int) -> None:
        super().__init__()
        rows: dict[str, int] = {}
        for path, number in map(place_of, names):
            rows[path] = max(rows.get(path, 0), number + 1)
        for path, count in rows.items():
            *parts, leaf = path.split(".")
            home: torch.nn.Module = self
            for part in parts:
                for beside in (part, *_BESIDE.get(part, ())):
                    if beside not in home._modules:
                        home.add_module(beside, torch.nn.Module())
                home = home.get_submodule(part)
            data = torch.zeros(count, values, dtype=torch.bfloat16)
            home.register_parameter(leaf, torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            path, number = place_of(name)
            parameters[path].data[number].copy_(tensor)

    def pieces(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of these names, where they lie."""
        parameters = dict(self.named_parameters())
        places = {name: place_of(name) for name in names}
        return {name: parameters[path].data[number] for name, (path, number) in places.items()}
