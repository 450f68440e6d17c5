"""Published sizes of the families that wsync knows: what their config.json says, how slime builds
a trainer of each, and the shapes of both sides.

Shapes are plain arithmetic here and share nothing with wsync's rules.  Of layers there is one of
each kind.  A name with ? is of a configuration that is remembered, and was not seen when the table
was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

_BASE = "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size "
_MOE = "moe_intermediate_size {experts} {shared}"
_NET = "linear_num_value_heads"
_LATENT = (
    "hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim intermediate_size vocab_size moe_intermediate_size n_routed_experts "
    "n_shared_experts"
)
_QWEN_MOE = _BASE + _MOE.format(experts="num_experts", shared="shared_expert_intermediate_size")
_GLM_MOE = _BASE + _MOE.format(experts="n_routed_experts", shared="n_shared_experts")
_LING = _BASE + _MOE.format(experts="num_experts", shared="num_shared_experts")
# by family: the fields of a row, in their order
_FIELDS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_vl", "glm4", "mimo"), _BASE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe"), _QWEN_MOE),
    "qwen3_next": f"{_QWEN_MOE} {_NET}",
    "qwen3_5": f"{_BASE} {_NET}",
    **dict.fromkeys(("qwen3_5_moe", "qwen3_6_moe"), f"{_QWEN_MOE} {_NET}"),
    "nemotron_h": _BASE
    + _MOE.format(experts="n_routed_experts", shared="moe_shared_expert_intermediate_size")
    + " mamba_num_heads mamba_head_dim n_groups ssm_state_size",
    "glm4_moe": _GLM_MOE,
    "bailing_moe_v2": _LING,
    **dict.fromkeys(("minimax_m2", "gpt_oss"), f"{_BASE} num_local_experts"),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k25", "moonlight", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32"),
        _LATENT,
    ),
}
# A row: family, model, its fields; - where config.json has none.  Embeddings are tied where the
# model's name ends in =.
_ROWS = """
llama Llama-3.2-1B= 2048 32 8 64 8192 128256
llama Llama-3.2-3B= 3072 24 8 128 8192 128256
llama Llama-3.1-8B 4096 32 8 - 14336 128256
llama Llama-3.3-70B 8192 64 8 128 28672 128256
llama Llama-3.1-405B? 16384 128 8 - 53248 128256
qwen2 Qwen2.5-0.5B= 896 14 2 - 4864 151936
qwen2 Qwen2.5-1.5B= 1536 12 2 - 8960 151936
qwen2 Qwen2.5-3B= 2048 16 2 - 11008 151936
qwen2 Qwen2.5-7B 3584 28 4 - 18944 152064
qwen2 Qwen2.5-14B? 5120 40 8 - 13824 152064
qwen2 Qwen2.5-32B 5120 40 8 - 27648 152064
qwen2 Qwen2.5-72B? 8192 64 8 - 29568 152064
qwen3 Qwen3-0.6B= 1024 16 8 128 3072 151936
qwen3 Qwen3-1.7B= 2048 16 8 128 6144 151936
qwen3 Qwen3-4B= 2560 32 8 128 9728 151936
qwen3 Qwen3-8B 4096 32 8 128 12288 151936
qwen3 Qwen3-14B 5120 40 8 128 17408 151936
qwen3 Qwen3-32B 5120 64 8 128 25600 151936
qwen2_moe Qwen1.5-MoE-A2.7B? 2048 16 16 - 5632 151936 1408 60 5632
qwen2_moe Qwen2-57B-A14B? 3584 28 4 - 18944 151936 2560 64 20480
qwen3_moe Qwen3-30B-A3B 2048 32 4 128 6144 151936 768 128 -
qwen3_moe Qwen3-235B-A22B 4096 64 4 128 12288 151936 1536 128 -
qwen3_moe Qwen3-Coder-480B-A35B? 6144 96 8 128 8192 151936 2560 160 -
qwen3_next Qwen3-Next-80B-A3B 2048 16 2 256 5120 151936 512 512 512 32
qwen3_5 Qwen3.5-0.8B= 1024 8 2 256 3584 248320 16
qwen3_5 Qwen3.5-2B=? 2048 8 2 256 6144 248320 16
qwen3_5 Qwen3.5-4B= 2560 16 4 256 9216 248320 32
qwen3_5 Qwen3.5-9B 4096 16 4 256 12288 248320 32
qwen3_5 Qwen3.5-27B 5120 24 4 256 17408 248320 48
qwen3_5_moe Qwen3.5-35B-A3B 2048 16 2 256 - 248320 512 256 512 32
qwen3_5_moe Qwen3.5-122B-A10B 3072 32 2 256 - 248320 1024 256 1024 64
qwen3_5_moe Qwen3.5-397B-A17B 4096 32 2 256 - 248320 1024 512 1024 64
qwen3_6_moe Qwen3.6-35B-A3B? 2048 16 2 256 - 248320 512 256 512 32
qwen3_vl_moe Qwen3-VL-30B-A3B? 2048 32 4 128 6144 151936 768 128 -
qwen3_vl_moe Qwen3-VL-235B-A22B? 4096 64 4 128 12288 151936 1536 128 -
qwen3_vl Qwen3-VL-2B=? 2048 16 8 128 6144 151936
qwen3_vl Qwen3-VL-4B=? 2560 32 8 128 9728 151936
qwen3_vl Qwen3-VL-8B? 4096 32 8 128 12288 151936
qwen3_vl Qwen3-VL-32B? 5120 64 8 128 25600 151936
glm4 GLM-4-9B-0414 4096 32 2 128 13696 151552
glm4 GLM-4-32B-0414 6144 48 8 128 23040 151552
glm4_moe GLM-4.5-Air 4096 96 8 128 10944 151552 1408 128 1
glm4_moe GLM-4.5 5120 96 8 128 12288 151552 1536 160 1
mimo MiMo-7B 4096 32 8 128 11008 151680
minimax_m2 MiniMax-M2.5 3072 48 8 128 1536 200064 256
gpt_oss gpt-oss-20b? 2880 64 8 64 2880 201088 32
gpt_oss gpt-oss-120b? 2880 64 8 64 2880 201088 128
bailing_moe_v2 Ling-mini-2.0? 2048 16 4 128 5120 157184 512 256 1
bailing_moe_v2 Ling-flash-2.0? 4096 32 4 128 9216 157184 1024 256 1
bailing_moe_v2 Ling-1T? 8192 64 8 128 18432 157184 2048 256 1
deepseek_v3 DeepSeek-V3 7168 128 1536 512 128 64 128 18432 129280 2048 256 1
deepseek_v32 DeepSeek-V3.2? 7168 128 1536 512 128 64 128 18432 129280 2048 256 1
deepseek_v3 Kimi-K2 7168 64 1536 512 128 64 128 18432 163840 2048 384 1
kimi_k25 Kimi-K2.5? 7168 64 1536 512 128 64 128 18432 163840 2048 384 1
moonlight Moonlight-16B-A3B 2048 16 - 512 128 64 128 11264 163840 1408 64 2
glm4_moe_lite GLM-4.7-Flash 2048 20 768 512 192 64 256 10240 154880 1536 64 1
nemotron_h Nemotron-3-Nano-30B-A3B? 2688 32 2 128 1856 131072 1856 128 3712 64 64 8 128
glm_moe_dsa GLM-5 6144 64 2048 512 192 64 256 12288 154880 2048 256 1
"""
_IN_PARTS = (
    "qwen3_5",
    "qwen3_6",
    "qwen3_vl",
    "kimi_k25",
)  # families whose config.json has a text_config


class Model(NamedTuple):
    family: str
    tied: bool
    config: dict[str, int]

    def json(self) -> dict[str, Any]:
        """config.json, but for the fields that nobody reads here."""
        text = {**self.config, "tie_word_embeddings": self.tied, "num_hidden_layers": 2}
        if not self.family.startswith(_IN_PARTS):
            return {"model_type": self.family, **text}
        return {"model_type": self.family, "text_config": text, "tie_word_embeddings": self.tied}

    def arguments(self, folder: str) -> SimpleNamespace:
        """slime's, as its scripts/models set them (624b824), over Megatron-Core 0.16's defaults."""
        said = self.config.get
        heads = said("num_attention_heads")
        dense, moe = said("intermediate_size"), said("moe_intermediate_size")
        made = {
            "num_layers": 2,
            "hidden_size": said("hidden_size"),
            "vocab_size": said("vocab_size"),
            "num_attention_heads": heads,
            "group_query_attention": "num_key_value_heads" in self.config,
            "num_query_groups": said("num_key_value_heads", 1),
            "kv_channels": said("head_dim", said("hidden_size") // heads),
            "ffn_hidden_size": dense or moe,
            "moe_ffn_hidden_size": moe or dense,
            "num_experts": experts_of(self.config) or None,
            "moe_shared_expert_intermediate_size": shared_of(self.config) or None,
            "untie_embeddings_and_output_weights": not self.tied,
            "mtp_num_layers": None,
            "hf_checkpoint": folder,
            "q_lora_rank": said("q_lora_rank"),
            "kv_lora_rank": said("kv_lora_rank", 32),
            "qk_head_dim": said("qk_nope_head_dim", 128),
            "qk_pos_emb_head_dim": said("qk_rope_head_dim", 64),
            "v_head_dim": said("v_head_dim", 128),
            # of delta nets slime builds what config.json says, and leaves the arguments alone
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "mamba_num_heads": said("mamba_num_heads"),
            "mamba_head_dim": said("mamba_head_dim", 64),
            "mamba_num_groups": said("n_groups", 8),
            "mamba_state_dim": said("ssm_state_size", 128),
        }
        return SimpleNamespace(**made)


def models() -> dict[str, Model]:
    """By name."""
    found = {}
    for line in filter(None, _ROWS.splitlines()):
        family, name, *values = line.split()
        fields = _FIELDS[family].split()
        config = {f: int(v) for f, v in zip(fields, values, strict=True) if v != "-"}
        if family == "nemotron_h":
            config["conv_kernel"] = 4
        if _NET in config:
            config |= {"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
            config |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
        found[name.rstrip("?=")] = Model(family, "=" in name, config)
    return found


def experts_of(config: dict[str, int]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((config[name] for name in names if name in config), 0)


def shared_of(config: dict[str, int]) -> int:
    """Channels of the shared experts."""
    count = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    own = config.get("shared_expert_intermediate_size")
    own = own or config.get("moe_shared_expert_intermediate_size")
    return own or count * config.get("moe_intermediate_size", 0)


class Part(NamedTuple):
    """A parameter of Megatron's: its whole shape, the axis that ranks share (-1: none), and the
    shapes of the checkpoint's tensors."""

    name: str
    shape: tuple[int, ...]
    axis: int
    tensors: dict[str, tuple[int, ...]]


def parts(model: Model) -> Iterator[Part]:
    c, family = model.config, model.family
    h, vocab = c["hidden_size"], c["vocab_size"]
    if family == "nemotron_h":
        yield from _nemotron(c)
        return
    base = (
        "model.language_model."
        if family.startswith(("qwen3_5", "qwen3_6", "qwen3_vl"))
        else "model."
    )
    base = "language_model.model." if family == "kimi_k25" else base
    ling = family == "bailing_moe_v2"
    embed = "word_embeddings" if ling else "embed_tokens"
    yield Part(
        "embedding.word_embeddings.weight",
        (vocab + 128, h),
        0,
        {f"{base}{embed}.weight": (vocab, h)},
    )
    if not model.tied:
        head = "language_model.lm_head.weight" if family == "kimi_k25" else "lm_head.weight"
        yield Part("output_layer.weight", (vocab + 128, h), 0, {head: (vocab, h)})
    latent = "kv_lora_rank" in c
    for layer in (0, 1):
        near, hf = f"decoder.layers.{layer}.", f"{base}layers.{layer}."
        if layer == 0 and _NET in c:
            attention = _delta_net(c, flat=family != "qwen3_next")
        elif latent:
            attention = _latent(c)
        else:
            attention = _grouped(c, gated=_NET in c, ling=ling)
        experts = experts_of(c)
        moe = experts and (layer == 1 or "intermediate_size" not in c or family in _ALL_MOE)
        feed = _experts(c, family, experts) if moe else _dense(c, family)
        for name, shape, axis, tensors in (*attention, *feed):
            yield Part(near + name, shape, axis, {hf + n: s for n, s in tensors.items()})


_ALL_MOE = ("minimax_m2", "gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_vl_moe")


def _nemotron(c: dict[str, int]) -> Iterator[Part]:
    """A layer of Mamba, one of attention, one of experts, which have no gate."""
    h, heads, wide = c["hidden_size"], c["mamba_num_heads"], c["mamba_num_heads"] * 64
    mixed = wide + 2 * c["n_groups"] * c["ssm_state_size"]
    for name, shape, axis in (
        ("in_proj.weight", (wide + mixed + heads, h), 0),
        ("conv1d.weight", (mixed, 1, 4), 0),
        ("A_log", (heads,), 0),
        ("out_proj.weight", (h, wide), 1),
    ):
        yield Part(
            f"decoder.layers.0.mixer.{name}",
            shape,
            axis,
            {f"backbone.layers.0.mixer.{name}": shape},
        )
    for name, shape, axis, tensors in _grouped(c, gated=False, ling=False):
        moved = {n.replace("self_attn", "backbone.layers.1.mixer"): s for n, s in tensors.items()}
        yield Part(f"decoder.layers.1.{name}", shape, axis, moved)
    for expert in range(c["n_routed_experts"]):
        up = (c["moe_intermediate_size"], h)
        for linear, shape, axis, target in (("1", up, 0, "up"), ("2", up[::-1], 1, "down")):
            name = f"decoder.layers.1.mlp.experts.linear_fc{linear}.weight{expert}"
            tensor = f"backbone.layers.1.mixer.experts.{expert}.{target}_proj.weight"
            yield Part(name, shape, axis, {tensor: shape})


def _grouped(c: dict[str, int], *, gated: bool, ling: bool) -> Iterator[Part]:
    h, heads, groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim", h // heads)
    queries, keys = heads * d * (2 if gated else 1), groups * d
    rows = {"q": (queries, h), "k": (keys, h), "v": (keys, h)}
    tensors = {f"self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
    if ling:
        tensors = {"attention.query_key_value.weight": (queries + 2 * keys, h)}
    yield Part("self_attention.linear_qkv.weight", (queries + 2 * keys, h), 0, tensors)
    out = "attention.dense.weight" if ling else "self_attn.o_proj.weight"
    yield Part("self_attention.linear_proj.weight", (h, heads * d), 1, {out: (h, heads * d)})


def _delta_net(c: dict[str, int], *, flat: bool) -> Iterator[Part]:
    """As slime has it: transformers' own module, whole on every rank."""
    h, keys, values = c["hidden_size"], 16 * 128, c[_NET] * 128
    if flat:
        rows = {"qkv": 2 * keys + values, "z": values, "b": c[_NET], "a": c[_NET]}
    else:
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * c[_NET]}
    shapes: dict[str, tuple[int, ...]] = {f"in_proj_{n}.weight": (r, h) for n, r in rows.items()}
    shapes |= {"A_log": (c[_NET],), "dt_bias": (c[_NET],), "norm.weight": (128,)}
    shapes |= {"conv1d.weight": (2 * keys + values, 1, 4), "out_proj.weight": (h, values)}
    for name, shape in shapes.items():
        tensors = {f"linear_attn.{name}": shape}
        yield Part(f"self_attention.linear_attn.{name}", shape, -1, tensors)


def _latent(c: dict[str, int]) -> Iterator[Part]:
    h, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    value = heads * c["v_head_dim"]
    rows = [("linear_kv_down_proj", (rank + c["qk_rope_head_dim"], h), -1, "kv_a_proj_with_mqa")]
    rows.append(
        ("linear_kv_up_proj", (heads * c["qk_nope_head_dim"] + value, rank), 0, "kv_b_proj")
    )
    rows.append(("linear_proj", (h, value), 1, "o_proj"))
    if low := c.get("q_lora_rank"):
        rows.append(("linear_q_down_proj", (low, h), -1, "q_a_proj"))
        rows.append(("linear_q_up_proj", (query, low), 0, "q_b_proj"))
    else:
        rows.append(("linear_q_proj", (query, h), 0, "q_proj"))
    for name, shape, axis, target in rows:
        tensors = {f"self_attn.{target}.weight": shape}
        yield Part(f"self_attention.{name}.weight", shape, axis, tensors)


def _dense(c: dict[str, int], family: str) -> Iterator[Part]:
    ffn, h = c["intermediate_size"], c["hidden_size"]
    one = {"mlp.gate_up_proj.weight": (2 * ffn, h)}
    two = {f"mlp.{name}_proj.weight": (ffn, h) for name in ("gate", "up")}
    yield Part("mlp.linear_fc1.weight", (2 * ffn, h), 0, one if family == "glm4" else two)
    yield Part("mlp.linear_fc2.weight", (h, ffn), 1, {"mlp.down_proj.weight": (h, ffn)})


def _experts(c: dict[str, int], family: str, count: int) -> Iterator[Part]:
    h, ffn = c["hidden_size"], c.get("moe_intermediate_size") or c["intermediate_size"]
    minimax, oss = family == "minimax_m2", family == "gpt_oss"
    moe = "block_sparse_moe." if minimax else "mlp."
    gate, up, down = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
    rows = (count, 2 * ffn, h), (count, h, ffn)
    columns = (count, h, 2 * ffn), (count, ffn, h)
    fused = dict.fromkeys(("qwen3_5_moe", "qwen3_6_moe"), rows)
    fused |= dict.fromkeys(("gpt_oss", "qwen3_vl_moe"), columns)
    router = "mlp.router.weight" if oss else f"{moe}gate.weight"
    yield Part("mlp.router.weight", (count, h), -1, {router: (count, h)})
    for expert in range(count):
        near = f"{moe}experts.{expert}."
        first = {f"{near}{gate}.weight": (ffn, h), f"{near}{up}.weight": (ffn, h)}
        second = {f"{near}{down}.weight": (h, ffn)}
        if family in fused:
            both, last = fused[family]
            first, second = {"mlp.experts.gate_up_proj": both}, {"mlp.experts.down_proj": last}
        yield Part(f"mlp.experts.linear_fc1.weight{expert}", (2 * ffn, h), 0, first)
        yield Part(f"mlp.experts.linear_fc2.weight{expert}", (h, ffn), 1, second)
    if shared := shared_of(c):
        own = "mlp.shared_expert." if family.startswith("qwen") else "mlp.shared_experts."
        gates = {f"{own}{name}_proj.weight": (shared, h) for name in ("gate", "up")}
        yield Part("mlp.shared_experts.linear_fc1.weight", (2 * shared, h), 0, gates)
        tensors = {f"{own}down_proj.weight": (h, shared)}
        yield Part("mlp.shared_experts.linear_fc2.weight", (h, shared), 1, tensors)
