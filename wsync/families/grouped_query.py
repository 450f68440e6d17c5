"""Families with grouped-query attention that differ from Llama and Qwen in names and experts.

    glm4            GLM-4: transformers 4.57 (`modeling_glm4.py`), slime's `hf_to_megatron/glm.py`
    glm4_moe        GLM-4.5 to 4.7: `modeling_glm4_moe.py`, Megatron-Bridge's `glm45_bridge.py`
    gpt_oss         gpt-oss: `modeling_gpt_oss.py`, `gpt_oss_bridge.py`
    mimo            MiMo-7B, Qwen2's layers: slime's `megatron_to_hf/mimo.py`, `mimo_bridge.py`
    minimax_m2      MiniMax-M2, M2.1 and M2.5: transformers 5 (`modeling_minimax_m2.py`), slime's
                    plugin `minimax_m2.py`, Megatron-Bridge's `minimax_m2_provider.py`
    bailing_moe_v2  Ling 2.0: Megatron-Bridge 0.6.2 (`bailing_moe2_bridge.py`) and the modelling
                    code it ships (`modeling_bailing_moe_v2.py`)

GLM-5 and GLM-4.7-Flash have latent attention: see latent_attention.py.
"""

from __future__ import annotations

from wsync.families import blocks
from wsync.families.rules import Rule

_GATE_UP = "(*gate:ffn | *up:ffn) h"
# A layer has four norms: one before and one after each half.  Megatron-Core has the two norms after
# the halves only with slime's patch of TransformerLayer, which uses the checkpoint's names.
GLM4: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    *blocks.ATTENTION,
    *blocks.layer_rules(
        ("mlp.linear_fc1.weight", _GATE_UP, "mlp.gate_up_proj.weight (gate | up) h"),
        ("mlp.linear_fc2.weight", "h *ffn", "mlp.down_proj.weight"),
        ("post_self_attn_layernorm.weight", "h", "post_self_attn_layernorm.weight"),
        ("post_mlp_layernorm.weight", "h", "post_mlp_layernorm.weight"),
    ),
)

# The first layers are dense (first_k_dense_replace).  Queries and keys have norms in the largest
# model only (use_qk_norm).
_GLM4_LAYER = (
    *blocks.ATTENTION,
    *blocks.DENSE_MLP,
    *blocks.EXPERTS,
    *blocks.UNGATED_SHARED_EXPERTS,
)
GLM4_MOE: tuple[Rule, ...] = (*blocks.EMBEDDING, *_GLM4_LAYER, *blocks.mtp(_GLM4_LAYER))

# An expert's size is the configuration's intermediate_size.  In the checkpoint, one tensor holds
# the columns of an expert's gate and up projections in turn.
GPT_OSS: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    *blocks.ATTENTION,
    *blocks.layer_rules(
        # One offset for each head.  Megatron cuts it, but does not mark it as tensor-parallel.
        ("self_attention.core_attention.softmax_offset", "~(g n)", "self_attn.sinks"),
        *blocks.linear("mlp.router", "experts", "h", "mlp.router"),
    ),
    *blocks.layer_rules(
        (
            blocks.expert_names("linear_fc1.weight"),
            "(two:2 *ffn) h",
            "gate_up_proj expert h (ffn two)",
        ),
        (
            blocks.expert_names("linear_fc1.bias"),
            "(two:2 *ffn)",
            "gate_up_proj_bias expert (ffn two)",
        ),
        (blocks.expert_names("linear_fc2.weight"), "h *ffn", "down_proj expert ffn h"),
        (blocks.expert_names("linear_fc2.bias"), "h", "down_proj_bias expert h"),
        target="mlp.experts.",
    ),
)

_MIMO_MTP = "model.mtp_layers.{mtp}."
MIMO: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    *blocks.ATTENTION,
    *blocks.DENSE_MLP,
    *blocks.mtp(
        (*blocks.ATTENTION, *blocks.DENSE_MLP),
        _MIMO_MTP,
        enorm=f"{_MIMO_MTP}token_layernorm",
        hnorm=f"{_MIMO_MTP}hidden_layernorm",
        projection=f"{_MIMO_MTP}input_proj",
        norm=f"{_MIMO_MTP}final_layernorm",
        swapped=True,  # the checkpoint's columns take the hidden state, then the embedding
    ),
)

MINIMAX_M2: tuple[Rule, ...] = (
    *blocks.EMBEDDING,
    # Queries and keys are normalised over all heads.  slime calls the norms q_norm and k_norm, and
    # every rank has them whole.  Megatron-Bridge gives each rank the part of its heads; if there
    # are fewer key heads than ranks, several ranks get the same part.
    *blocks.attention_rules(
        ("(q_norm|q_layernorm).weight", "~(g n d)", "q_norm.weight"),
        ("(k_norm|k_layernorm).weight", "~(g d)", "k_norm.weight"),
    ),
    *blocks.ATTENTION,
    *blocks.routed_experts("block_sparse_moe.", ("w1", "w3", "w2"), bias="e_score_correction_bias"),
)

_LING_LAYER: tuple[Rule, ...] = (
    *blocks.layer_rules(
        *blocks.linear(
            "linear_qkv", blocks.QKV_ROWS, "h", "query_key_value (g n d | g k d | g v d)"
        ),
        *blocks.linear("linear_proj", "h", "*(g n d)", "dense"),
        ("q_layernorm.weight", "d", "query_layernorm.weight"),
        ("k_layernorm.weight", "d", "key_layernorm.weight"),
        part="self_attention.",
        target="attention.",
    ),
    *blocks.NORMS,
    *blocks.DENSE_MLP,
    *blocks.routed_experts(bias="gate.expert_bias"),
    *blocks.UNGATED_SHARED_EXPERTS,
)
BAILING_MOE_V2: tuple[Rule, ...] = (
    *blocks.embedding("model.word_embeddings"),
    *_LING_LAYER,
    *blocks.mtp(_LING_LAYER, norm=f"{blocks.HF_LAYER}final_layernorm"),
)
