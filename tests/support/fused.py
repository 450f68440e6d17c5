"""A module that keeps a model's tensors the way engines do, and loads them with Python."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

BF16 = torch.bfloat16
Pairs = list[tuple[str, torch.Tensor]]

HIDDEN, HEADS, HEAD, INNER, EXPERTS, VOCAB, PADDED, RANK = 16, 4, 8, 12, 4, 13, 16, 6
SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (2 * HEAD, HIDDEN),
    "v": (2 * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    **{f"experts.{e}.gate": (INNER, HIDDEN) for e in range(EXPERTS)},
    **{f"experts.{e}.up": (INNER, HIDDEN) for e in range(EXPERTS)},
    **{f"experts.{e}.down": (HIDDEN, INNER) for e in range(EXPERTS)},
    "router": (EXPERTS, HIDDEN),
    "wide": (5, HIDDEN),
    "q_a": (RANK, HIDDEN),
    "kv_a": (RANK, HIDDEN),
    "kv_b": (HEADS * 8, RANK),
    "norm": (HIDDEN,),
    "scale": (),
}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name == "wide" else BF16)
        for name, shape in SHAPES.items()
    }


class Fused(torch.nn.Module):
    """One of `tp` workers: heads and inner width are sharded, experts too where `ep`."""

    def __init__(self, tp: int = 1, rank: int = 0, *, ep: bool = False, seed: int = 9) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        generator = torch.Generator().manual_seed(seed)

        def held(*shape: int, dtype: torch.dtype = BF16) -> torch.nn.Parameter:
            data = torch.randn(shape, generator=generator).to(dtype)
            return torch.nn.Parameter(data, requires_grad=False)

        mine = HEADS // tp * HEAD
        self.embed = held(PADDED // tp, HIDDEN)
        self.qkv = held(mine + 2 * (2 * HEAD // tp), HIDDEN)
        self.o = held(HIDDEN, mine)
        per = EXPERTS // tp if ep else EXPERTS
        inner = INNER if ep else INNER // tp
        self.first = rank * per if ep else 0
        self.w13 = held(per, 2 * inner, HIDDEN)
        self.w2t = held(per, inner, HIDDEN)  # transposed
        self.router = held(EXPERTS, HIDDEN, dtype=torch.float32)
        self.wide = held(5, HIDDEN)
        self.qkv_a = held(2 * RANK, HIDDEN)
        self.kv_b = held(HEADS * 8 // tp, RANK)
        self.norm = held(HIDDEN)
        self.scale = held(EXPERTS)
        self.w_kc = torch.zeros(HEADS // tp, 4, RANK, dtype=BF16)
        self.w_vc = torch.zeros(HEADS // tp, RANK, 4, dtype=BF16)
        self.register_buffer("rotary", torch.arange(7.0))
        where = torch.tensor(
            [e - self.first if 0 <= e - self.first < per else -1 for e in range(EXPERTS)]
        )
        self.register_buffer("expert_map", where)

    def _mine(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        size = tensor.shape[dim] // self.tp
        return tensor.narrow(dim, self.rank * size, size)

    def load_weights(self, pairs: Pairs) -> None:
        parts: dict[str, torch.Tensor] = {}
        waiting = []
        with ThreadPoolExecutor(2) as pool:
            for name, tensor in pairs:
                if name in ("q_a", "kv_a"):
                    parts[name] = tensor
                else:
                    waiting.append(pool.submit(self.load_one, name, tensor))
            for future in waiting:
                future.result()
        if len(parts) == 2:
            self.qkv_a.data.copy_(torch.cat([parts["q_a"], parts["kv_a"]]))
        if any(name == "kv_b" for name, _ in pairs):
            k, v = self.kv_b.unflatten(0, (-1, 8)).split([4, 4], dim=1)
            self.w_kc.copy_(k.transpose(1, 2).contiguous().transpose(1, 2))
            self.w_vc.copy_(v.contiguous().transpose(1, 2))

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        kind = name.split(".")[-1]
        if kind in ("q", "k", "v"):
            rows = self._mine(tensor)
            start = {"q": 0, "k": HEADS * HEAD, "v": HEADS * HEAD + 2 * HEAD}[kind] // self.tp
            self.qkv.data.narrow(0, start, rows.shape[0]).copy_(rows)
        elif kind in ("gate", "up", "down"):
            self.load_expert(int(name.split(".")[1]), kind, tensor)
        elif kind == "embed":
            size = PADDED // self.tp
            rows = tensor[self.rank * size : (self.rank + 1) * size]
            self.embed.data[: rows.shape[0]].copy_(rows)
            self.embed.data[rows.shape[0] :].fill_(0)
        elif kind == "o":
            self.o.data.copy_(self._mine(tensor, 1))
        elif kind == "scale":
            self.scale.data.copy_(tensor)  # to every element
        elif kind == "kv_b":
            self.kv_b.data.copy_(self._mine(tensor))
        else:
            getattr(self, kind).data.copy_(tensor)

    def load_expert(self, expert: int, kind: str, tensor: torch.Tensor) -> None:
        place = int(self.expert_map[expert].item())
        if place < 0:
            return
        if self.w13.shape[1] != 2 * INNER:
            tensor = self._mine(tensor, 1 if kind == "down" else 0)
        if kind == "down":
            self.w2t.data[place].copy_(tensor.t())
        else:
            inner = self.w13.shape[1] // 2
            self.w13.data[place].narrow(0, inner * (kind == "up"), inner).copy_(tensor)


def held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of everything that the module holds."""
    plain = {n: t for n, t in vars(module).items() if isinstance(t, torch.Tensor)}
    every = {**dict(module.named_parameters()), **dict(module.named_buffers()), **plain}
    return {name: tensor.detach().clone() for name, tensor in every.items()}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in sorted(one.keys() | two.keys())
        if name not in one
        or name not in two
        or one[name].shape != two[name].shape
        or bytes_of(one[name]) != bytes_of(two[name])
    ]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def changed(load: Callable[[Fused, Pairs], None], **options: int) -> Fused:
    """A module with another load_weights."""

    class Changed(Fused):
        def load_weights(self, pairs: Pairs) -> None:
            load(self, pairs)

    return Changed(**options)
