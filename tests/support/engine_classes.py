"""The classes that SGLang and vLLM have for families of tiny_models under the same names."""

# family: the file among an engine's models, and the class in it
CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek_v3": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "mimo": ("mimo", "MiMoForCausalLM"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "kimi_k2": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "moonlight": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "kimi_k25": ("kimi_k25", "KimiK25ForConditionalGeneration"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    "step3p5": ("step3p5", "Step3p5ForCausalLM"),
    "bailing_moe_v2": ("bailing_moe", "BailingMoeV2ForCausalLM"),
}
