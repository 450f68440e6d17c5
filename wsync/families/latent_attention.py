"""Latent attention: DeepSeek-V3 and V3.2, Kimi-K2 and K2.5, Moonlight, GLM-4.7-Flash, GLM-5.

Names and row orders follow Megatron-Core 0.16 (`transformer/multi_latent_attention.py`,
`transformer/experimental_attention_variant/dsa.py`), slime's plugin (`slime_plugins/models/glm5`)
and the checkpoints of deepseek-ai, moonshotai and zai-org.  No rows are permuted: rotary
channels are reordered only when the embedding is applied.  The number of query groups is not used.
"""

from __future__ import annotations

from wsync.families import blocks
from wsync.families.rules import Rule

# SGLang joins the two (deepseek_v2.py), and drops one that comes without the other.
LATENT_TOGETHER = (("q_a_proj", "kv_a_proj_with_mqa"),)

LATENT_ATTENTION: tuple[Rule, ...] = blocks.attention_rules(
    # Without q_lora_rank (Moonlight), queries have one projection.
    ("linear_q_proj.weight", "*(heads qk:nope+rope) h", "q_proj.weight"),
    # TransformerEngine's linear layers hold these two whole; Megatron's own layers hold parts.
    ("linear_q_down_proj.weight", "~q_lora h", "q_a_proj.weight"),
    ("linear_kv_down_proj.weight", "~kv_a:kv_lora+rope h", "kv_a_proj_with_mqa.weight"),
    ("linear_q_up_proj.weight", "*(heads qk:nope+rope) q_lora", "q_b_proj.weight"),
    ("linear_kv_up_proj.weight", "*(heads kv:nope+dv) kv_lora", "kv_b_proj.weight"),
    ("linear_proj.weight", "h *(heads dv)", "o_proj.weight"),
    # A norm has one of two names, as in blocks.py.
    ("(linear_q_up_proj.layer_norm_|q_layernorm.)weight", "q_lora", "q_a_layernorm.weight"),
    ("(linear_kv_up_proj.layer_norm_|kv_layernorm.)weight", "kv_lora", "kv_a_layernorm.weight"),
)


# Every rank holds the whole indexer.  Layers that use another layer's choice of tokens have none.
# Megatron-Core keeps the order of checkpoints.  slime's plugin stores the second half of each
# head's 128 channels before the first half, in the order of its rotary embedding.
_HALVES = "(second:64 | first:64)"
INDEXER: tuple[Rule, ...] = (
    *blocks.layer_rules(
        ("linear_wq_b.weight", "rows:? q_lora", "wq_b.weight"),
        ("linear_wk.weight", "rows:? h", "wk.weight"),
        ("linear_weights_proj.weight", "rows:? h", "weights_proj.weight"),
        ("k_norm.weight", "rows:?", "k_norm.weight"),
        ("k_norm.bias", "rows:?", "k_norm.bias"),
        part="self_attention.core_attention.indexer.",
        target="self_attn.indexer.",
    ),
    *blocks.layer_rules(
        ("weights_proj.weight", "rows:? h", "weights_proj.weight"),
        ("wq_b.weight", f"(n:? {_HALVES}) q_lora", "wq_b.weight (n (first | second)) q_lora"),
        ("wk.weight", f"{_HALVES} h", "wk.weight (first | second) h"),
        ("k_norm.weight", _HALVES, "k_norm.weight (first | second)"),
        ("k_norm.bias", _HALVES, "k_norm.bias (first | second)"),
        part="self_attention.",
        target="self_attn.indexer.",
    ),
)

_LAYER = (
    *LATENT_ATTENTION,
    *blocks.NORMS,
    *blocks.DENSE_MLP,
    *blocks.EXPERTS,
    *blocks.UNGATED_SHARED_EXPERTS,
)

# A checkpoint also has copies of embedding and head in each MTP layer.  Engines use the model's
# own tensors instead, and trainers hold no copies.
DEEPSEEK: tuple[Rule, ...] = (*blocks.EMBEDDING, *_LAYER, *blocks.mtp(_LAYER))
_SPARSE_LAYER = (*_LAYER, *INDEXER)
DEEPSEEK_SPARSE: tuple[Rule, ...] = (*blocks.EMBEDDING, *_SPARSE_LAYER, *blocks.mtp(_SPARSE_LAYER))

# Kimi-K2.5 is a DeepSeek-V3 with a vision tower.  Every rank holds the whole vision tower.
KIMI_K25 = blocks.moved(DEEPSEEK, ("", "(language_model.|)"), ("", "language_model."))
KIMI_VISION = {rf"{name}\.": f"{name}." for name in ("vision_tower", "mm_projector")}
