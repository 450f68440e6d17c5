"""What a rank does in the tests of models with latent attention (DeepSeek-V3 and its kin).

The tensors of a checkpoint are those of transformers' DeepSeek-V3; those of MTP layers and of
indexers, which that class leaves out, have the names and shapes of the published checkpoints.
`share` cuts them for a rank by torch.cat and chunk, and shares nothing with wsync's rules.
"""

import contextlib
import re
import zlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from support import megatron_cases, megatron_cpu
from support import megatron_reference as reference

import wsync.megatron
from wsync import _core

INDEX_HEADS, INDEX_DIM = 2, 128  # slime's plugin has heads of 128 channels only
SMALL = {
    **reference.SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}


def config(family, **changes):
    """A tiny configuration; transformers 4.57 knows no other family of this kind."""
    hf = transformers.DeepseekV3Config(**{**SMALL, **changes})
    hf.model_type = family
    return hf


def checkpoint(hf, dtype, indexed=()):
    """{name: tensor} of a checkpoint; indexed: the layers that have an indexer."""
    hf.model_type = "deepseek_v3"  # for transformers
    state = reference.hf_tensors(hf)
    layers, h = hf.num_hidden_layers, hf.hidden_size
    shapes = {name: tensor.shape for name, tensor in state.items()}
    last = f"model.layers.{layers - 1}."
    for layer in range(layers, layers + (hf.num_nextn_predict_layers or 0)):
        base = f"model.layers.{layer}."
        inner = [name for name in shapes if name.startswith(last)]
        shapes |= {base + name.removeprefix(last): shapes[name] for name in inner}
        shapes |= {f"{base}{norm}.weight": (h,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{base}eh_proj.weight"] = (h, 2 * h)
    for layer in indexed:
        base = f"model.layers.{layer}.self_attn.indexer."
        shapes[f"{base}wq_b.weight"] = (INDEX_HEADS * INDEX_DIM, hf.q_lora_rank)
        shapes[f"{base}wk.weight"] = (INDEX_DIM, h)
        shapes[f"{base}weights_proj.weight"] = (INDEX_HEADS, h)
        shapes |= {f"{base}k_norm.{kind}": (INDEX_DIM,) for kind in ("weight", "bias")}
    for name, shape in shapes.items():
        if name not in state or name.endswith("e_score_correction_bias"):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            state[name] = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
    return {
        name: tensor.to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
        for name, tensor in state.items()
    }


COPIES = {  # of a layer's parameters that every rank holds whole, under both names of a norm
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
ROWS = {
    "eh_proj.weight": "eh_proj.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
DOWN = {  # whole with TransformerEngine's linear layers, cut with Megatron's own
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
}


def share(name, state, hf, engine):
    """The tensor that a rank holds under a global Megatron name."""
    tp_rank, tp, etp_rank, etp, _, _ = megatron_cases.place()
    if not re.match(r"decoder\.layers|mtp\.", name):
        rows = megatron_cases.padded_rows(hf, tp)
        return reference.share(name, state, hf, megatron_cases.place(), rows)
    match = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.(.*)", name)
    layer = int(match[2]) + (hf.num_hidden_layers if match[1] == "mtp" else 0)
    rest = re.sub(r"^(transformer_layer|mtp_model_layer)\.", "", match[3])
    base = f"model.layers.{layer}."
    if rest in COPIES:
        return state[base + COPIES[rest]]
    if rest in ROWS:
        return state[base + ROWS[rest]].chunk(tp)[tp_rank]
    if rest in DOWN:
        whole = state[base + DOWN[rest]]
        return whole if engine else whole.chunk(tp)[tp_rank]
    if rest == "self_attention.linear_proj.weight":
        return state[f"{base}self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
    native = "self_attention.core_attention.indexer."
    if rest.startswith(native):
        key = rest.removeprefix(native).removeprefix("linear_")
        return state[f"{base}self_attn.indexer.{key}"]
    plugin = re.fullmatch(r"self_attention\.((?:wq_b|wk|k_norm|weights_proj)\..*)", rest)
    if plugin:
        whole = state[f"{base}self_attn.indexer.{plugin[1]}"]
        if plugin[1].startswith("weights_proj"):
            return whole
        halves = [half for head in whole.split(128) for half in reversed(head.chunk(2))]
        return torch.cat(halves)
    linear = r"linear_fc([12])\.weight"
    expert = re.fullmatch(rf"mlp\.experts\.(?:local_experts\.(\d+)\.)?{linear}(\d*)", rest)
    if expert:
        prefix, kind = f"{base}mlp.experts.{expert[1] or expert[3]}.", expert[2]
        tp_rank, tp = etp_rank, etp
    else:
        inner = re.fullmatch(rf"mlp\.(shared_experts\.)?{linear}", rest)
        prefix, kind = f"{base}mlp.{inner[1] or ''}", inner[2]
    if kind == "2":
        return state[f"{prefix}down_proj.weight"].chunk(tp, 1)[tp_rank]
    both = [state[f"{prefix}{x}_proj.weight"].chunk(tp)[tp_rank] for x in ("gate", "up")]
    return torch.cat(both)


def megatron_config(hf, parallel, dtype, **overrides):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        layernorm_epsilon=hf.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        rope_type="rope",
        rotary_scaling_factor=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        num_moe_experts=hf.n_routed_experts,
        moe_router_topk=hf.num_experts_per_tok,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_shared_expert_intermediate_size=hf.n_shared_experts * hf.moe_intermediate_size,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=True,
        moe_router_topk_scaling_factor=hf.routed_scaling_factor,
        moe_layer_freq=[
            int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)
        ],
        mtp_num_layers=hf.num_nextn_predict_layers or None,
        **overrides,
    )


def _attention():
    """Megatron's own attention, told that values are of another width than keys: 0.16 passes that
    on, but only TransformerEngine's class takes it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, config, *args, k_channels=None, v_channels=None, **options):
            super().__init__(config, *args, **options)
            width = v_channels or config.kv_channels
            self.hidden_size_per_partition = width * self.num_attention_heads_per_partition

    return Attention


def _sparse(config, backend):
    spec = variants().get_dsa_module_spec_for_backend(config, backend)
    spec.metainfo["fuse_input_layernorm"] = False
    return spec


def variants():
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    return specs


@contextlib.contextmanager
def buildable():
    """Megatron-Core 0.16 has the parts of these models, and does not join all of them."""
    from megatron.core.models import backends

    with (
        mock.patch.object(backends, "DotProductAttention", _attention()),
        mock.patch.object(variants(), "get_experimental_attention_variant_module_spec", _sparse),
    ):
        yield


def build(family, changes, parallel, options):
    """(trainer, checkpoint): a trainer that holds a known checkpoint."""
    hf = config(family, **changes)
    dtype = getattr(torch, options.get("dtype", "float32"))
    engine = options.get("engine", False)
    native, plugin = options.get("native_indexer"), options.get("plugin_indexer")
    overrides = {"moe_grouped_gemm": options.get("grouped", False)}
    if native:
        overrides |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": INDEX_HEADS,
            "dsa_indexer_head_dim": INDEX_DIM,
            "dsa_indexer_topk": 4,
        }
    made = megatron_config(hf, megatron_cpu.Parallel(**parallel), dtype, **overrides)
    with buildable():
        trainer = megatron_cpu.build(
            hf, megatron_cpu.Parallel(**parallel), dtype=dtype, engine=engine, config=made
        )
    everywhere = range(hf.num_hidden_layers + (hf.num_nextn_predict_layers or 0))
    indexed = everywhere if native else plugin or ()
    if plugin:
        add_indexers(trainer, plugin)
    state = checkpoint(hf, dtype, indexed)
    hf.model_type = family
    with torch.no_grad():
        for name, tensor in megatron_cpu.named_weights(trainer.chunks, hf.n_routed_experts):
            value = share(name, state, hf, engine)
            assert value.shape == tensor.shape, f"{name}: {value.shape} {tensor.shape}"
            assert value.dtype == tensor.dtype, f"{name}: {value.dtype} {tensor.dtype}"
            tensor.copy_(value)
    if "mtp_model_layer" in options:
        for chunk in trainer.chunks:
            for layer in getattr(getattr(chunk, "mtp", None), "layers", ()):
                layer.mtp_model_layer = layer._modules.pop("transformer_layer")
    return trainer, state


def add_indexers(trainer, layers):
    """Parameters of the names and shapes of slime's plugin, which needs kernels of a GPU."""
    hf, dtype = trainer.hf, trainer.dtype
    shapes = {
        "wq_b": (hf.q_lora_rank, INDEX_HEADS * INDEX_DIM),
        "wk": (hf.hidden_size, INDEX_DIM),
        "weights_proj": (hf.hidden_size, INDEX_HEADS),
    }
    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            if layer.layer_number - 1 not in layers:
                continue
            for name, shape in shapes.items():
                linear = torch.nn.Linear(*shape, bias=False, dtype=dtype)
                linear.weight.parallel_mode = "duplicated"
                linear.weight.tensor_model_parallel = True
                layer.self_attention.add_module(name, linear)
            norm = torch.nn.LayerNorm(INDEX_DIM, dtype=dtype)
            layer.self_attention.add_module("k_norm", norm)


def arguments(config, hf):
    """What slime's arguments say; Megatron's default of query groups means nothing here."""
    names = (
        *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "q_lora_rank"),
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers"),
        *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    )
    return SimpleNamespace(
        **{name: getattr(config, name) for name in names},
        vocab_size=hf.vocab_size,
        num_experts=config.num_moe_experts,
        num_query_groups=3,
        group_query_attention=True,
        kv_channels=None,
        untie_embeddings_and_output_weights=True,
    )


def layout_matches(family, changes, parallel, options):
    """Compares every shard of the merged layout with the checkpoint; what the test looks at."""
    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer, state = build(family, changes, parallel, options)
        given = arguments(trainer.config, trainer.hf) if options.get("arguments") else trainer.hf
        mine = wsync.megatron.layout(trainer.chunks, given, model_name=family)
        mine.bind()
        everyone = [None] * mine.ranks
        buffers = [megatron_cases.host_bytes(tensor) for tensor in mine.tensors()]
        dist.all_gather_object(everyone, (mine.layout.to_bytes(), buffers, mine.names))
        if mine.rank:
            return list(mine.names)
        merged = _core.Layout.merge([_core.Layout.from_bytes(data) for data, _, _ in everyone])
        shards = megatron_cases.check_everything(merged, [b for _, b, _ in everyone], state)
        tensors = [merged.tensor(index) for index in range(merged.tensor_count)]
        return list(mine.names), shards, [tuple(tensor) for tensor in tensors]


def biases_stay_wide(family, changes, parallel, options):
    """The dtypes of routers' biases once Float16Module has narrowed them: in the model before the
    layout was made, in the layout, and from backups that were taken before."""
    from megatron.core.transformer.module import Float16Module

    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer, _ = build(family, changes, parallel, options)
        chunks = [Float16Module(trainer.config, chunk) for chunk in trainer.chunks]
        weights = dict(megatron_cpu.named_weights(chunks, trainer.hf.n_routed_experts))
        backups = {name: tensor.detach().clone() for name, tensor in weights.items()}
        before = {t.dtype for name, t in weights.items() if name.endswith("expert_bias")}
        mine = wsync.megatron.layout(chunks, trainer.hf)
        for chunk in chunks:  # as the next forward pass does
            for module in chunk.modules():
                getattr(module, "_maintain_float32_expert_bias", bool)()
        tables = mine.bind(), mine.bind(backups)
        places = [i for i, name in enumerate(mine.names) if name.endswith("expert_bias")]
        assert all(torch.equal(mine.tensors()[i], backups[mine.names[i]].float()) for i in places)
        found = [{table[i][1] for i in places} for table in tables]
        return [str(dtype) for dtype in before], *found


def logits_match(family, changes, parallel, options):
    """Largest difference between the trainer's and transformers' logits of one checkpoint, and the
    largest logit."""
    with megatron_cpu.groups(megatron_cpu.Parallel(**parallel)):
        trainer, state = build(family, changes, parallel, options)
        trainer.hf.model_type = "deepseek_v3"
        model = transformers.AutoModelForCausalLM.from_config(trainer.hf).eval()
        model.load_state_dict(state)
        ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = model(ids).logits
        found = trainer.logits(ids)
        return float((found - want).abs().max()), float(want.abs().max())
