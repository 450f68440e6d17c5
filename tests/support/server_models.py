"""Small checkpoints for servers, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from support import draft_models

from wsync.demo import cpu_server

_SIZES = {**cpu_server.SIZES, "max_position_embeddings": 8192}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
PATIENCE = 240.0  # seconds for whatever a busy machine is to do
PROMPT = [5, 17, 42, 99, 7]


@dataclass
class Checkpoint:
    """Weights in a folder and in memory."""

    folder: Path
    model: Any
    weights: dict[str, torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.model.dtype
        return found

    def tokens(self, count: int) -> list[int]:
        """The most likely ones after PROMPT."""
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        answer: list[int] = found[0, len(PROMPT) :].tolist()
        return answer

    def says(self, tokens: Sequence[int]) -> list[bool]:
        """For each token after PROMPT whether it is the most likely one after those before it, but
        for rounding."""
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + list(tokens)])).logits[0]
        return likely(logits[len(PROMPT) - 1 : -1], tokens)


def likely(logits: torch.Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each has the largest of the logits, but for rounding."""
    part = 1e-3 if logits.dtype == torch.float32 else 0.1
    largest = logits.max(-1).values
    found = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    answer: list[bool] = (found >= largest - part * largest.abs()).tolist()
    return answer


def kept(tokens: list[int], changed: int, old: Checkpoint, new: Checkpoint) -> bool:
    """Whether the old weights may have made tokens[:changed], and the new ones the others, from
    what had been computed for the earlier ones."""
    with torch.no_grad():
        before = PROMPT + tokens[: changed - 1]
        cache = old.model(torch.tensor([before]), use_cache=True).past_key_values
        rest = torch.tensor([tokens[changed - 1 : -1]])
        logits = new.model(rest, past_key_values=cache).logits[0]
    return all(old.says(tokens[:changed])) and all(likely(logits, tokens[changed:]))


def recomputed(tokens: list[int], changed: int, old: Checkpoint, new: Checkpoint) -> bool:
    """The same where everything is computed anew."""
    return all(old.says(tokens[:changed])) and all(new.says(tokens)[changed:])


def checkpoint(
    folder: Path, seed: int, *, experts: bool, dtype: torch.dtype, tied: bool = False
) -> Checkpoint:
    """Weights so large that rounding does not change the tokens.  tied: the head is the embedding,
    and has no name of its own."""
    sizes = {**_SIZES, "tie_word_embeddings": tied}
    if experts:
        config: Any = transformers.Qwen3MoeConfig(**sizes, **_EXPERTS)
    else:
        config = transformers.Qwen3Config(**sizes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.3 if tensor.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return Checkpoint(folder, model, weights)


def predicting(folder: Path, seed: int) -> Checkpoint:
    """A model of MiMo's kind: Qwen2 and a layer of multi-token prediction, which has no place in
    transformers."""
    model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES))
    torch.manual_seed(seed)
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    shapes |= draft_models.layer_tensors("mimo", shapes, _SIZES["num_hidden_layers"])
    weights = {name: torch.randn(shape) for name, (shape, _) in shapes.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | own))
    return Checkpoint(folder, model, weights)


def eagle3(folder: Path) -> Path:
    """A checkpoint of a model that drafts tokens for one of `checkpoint`, with EAGLE3."""
    vocabulary, hidden, inner = (
        int(_SIZES[name]) for name in ("vocab_size", "hidden_size", "intermediate_size")
    )
    queries, keys = (
        int(_SIZES[name] * _SIZES["head_dim"])
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    matrices = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocabulary, hidden),
        "embed_tokens": (vocabulary, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = matrices | dict.fromkeys(("norm", *(f"midlayer.{name}" for name in norms)), (hidden,))
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": True}
    config = _SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": vocabulary,
        "eagle_config": layers,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder
