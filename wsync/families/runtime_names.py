"""Checkpoint names of run-time parameters: the names that engines know.

In transformers, some parameters have other names and forms than in their checkpoints.  Since 4.52,
a language model with a vision tower has the prefix `model.language_model.`.  Since 5, the experts
of a layer are fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from wsync import _core
from wsync.families.blocks import HF_LAYER, fused_experts, renamed
from wsync.families.registry import TOGETHER, Family, read_sizes
from wsync.families.rules import Expansion, Rule, ShardPlacement
from wsync.module_tensors.names import FUSED, group_of, group_of_parts

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_SEEN_EXPERTS: Final = "model.language_model.layers.{layer}.mlp.experts."
_SPARSE: Final = f"{HF_LAYER}block_sparse_moe."
_SPARSE_RULES: Final = (
    *fused_experts(f"{_SPARSE}experts.", ("w1", "w3", "w2"), size="ffn"),
    renamed(f"{HF_LAYER}mlp.gate.weight", "experts h", f"{_SPARSE}gate.weight"),
    renamed(
        f"{HF_LAYER}mlp.e_score_correction_bias", "experts", f"{_SPARSE}e_score_correction_bias"
    ),
)
# Parameters with the names of the checkpoint's tensors, but another order of axes.
_TURNED: Final = (
    renamed(
        f"{_SEEN_EXPERTS}gate_up_proj",
        "experts (gate:moe_ffn | up:moe_ffn) h",
        f"{_SEEN_EXPERTS}gate_up_proj experts h (gate | up)",
    ),
    renamed(
        f"{_SEEN_EXPERTS}down_proj",
        "experts h moe_ffn",
        f"{_SEEN_EXPERTS}down_proj experts moe_ffn h",
    ),
)
_LLAVA: Final = {
    r"model\.language_model\.": "language_model.model.",
    r"lm_head\.": "language_model.lm_head.",
    r"model\.(?=vision_tower\.|multi_modal_projector\.)": "",
}
_QWEN_VL: Final = {r"model\.language_model\.": "model.", r"model\.(?=visual\.)": ""}
_FUSED: Final = (
    *("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next"),
)

# By model_type: rules from run-time names of transformers to names of checkpoints, if they differ
# (transformers 5.23, `conversion_mapping.py`).  A parameter keeps its name if no rule matches, or
# if it has the form of the checkpoint's tensor already, as in transformers 4.57.
_TABLES: Sequence[tuple[Sequence[str], tuple[Rule, ...], Mapping[str, str]]] = (
    (_FUSED, fused_experts(), {}),
    (("olmoe",), fused_experts(size="ffn"), {}),
    (("mixtral", "minimax_m2"), _SPARSE_RULES, {}),
    (("gpt_oss", "qwen3_5_moe"), (), {}),  # fused in checkpoints, too
    (("qwen3_vl_moe",), _TURNED, {}),
    (("qwen2_vl", "qwen2_5_vl"), (), _QWEN_VL),
    (("llava", "gemma3", "internvl", "mistral3", "paligemma", "aya_vision"), (), _LLAVA),
)
RUNTIME: Mapping[str, Family] = {
    name: Family(name, rules, copied=copied) for names, rules, copied in _TABLES for name in names
}

# Projectors of gemma3, paligemma, mistral3 and aya_vision.  Those of LLaVA and InternVL are left
# out: cohere2_vision and lfm2_vl use the same names, also in checkpoints.
_LIKE_LLAVA: Final = re.compile(
    r"model\.multi_modal_projector\.(mm_|linear\.|patch_merger\.|layernorm\.)"
)

# All parts of Mixtral's layers, and parts that occur only in models whose checkpoints hold experts
# one by one.
_LAYER: Final = re.compile(r"model\.layers\.\d+\.(.+)")
_MIXTRAL: Final = re.compile(
    r"(input|post_attention)_layernorm\.weight|mlp\.gate\.(weight|e_score_correction_bias)|"
    r"mlp\.experts\.(gate_up|down)_proj|self_attn\.[qkvo]_proj\.(weight|bias)"
)
_ONE_BY_ONE: Final = {
    "mlp.shared_expert_gate.weight",
    "mlp.shared_experts.gate_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.q_norm.weight",
}


class RuntimeNames:
    """Maps from run-time parameters to the tensors of checkpoints, which engines know.

    kind: a model_type of RUNTIME.  For any other text, there are no rules.
    """

    def __init__(self, kind: str, sizes: Mapping[str, int]) -> None:
        self.family = RUNTIME.get(kind)
        self._sizes = sizes
        self._expansions: dict[int, Expansion] = {}

    @classmethod
    def of_config(cls, config: Any, names: Iterable[str] = ()) -> RuntimeNames:
        """The rules for a Hugging Face configuration.  For None, there are no rules.

        Raises UnsupportedError if `names` has fused experts for which there are no rules.
        """
        kind = str(getattr(config, "model_type", None) or "")
        found = cls(kind, read_sizes(config) if kind in RUNTIME else {})
        fused = next((name for name in names if name.endswith(FUSED)), "")
        if found.family is None and fused:
            known = f"the family {kind!r}" if kind else "a model without config"
            raise _core.UnsupportedError(
                f"{fused}: one parameter holds all experts, and wsync does not know the engines' "
                f"names for {known}"
            )
        return found

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> RuntimeNames:
        """The rules for a model, if the names and shapes of all its tensors tell its kind."""
        wide = "embed_tokens.weight", ".input_layernorm.weight"  # a rank may have only one of these
        hidden = next((s[-1] for n, s in shapes.items() if n.endswith(wide)), 0)
        kind, sizes = _kind_of(shapes), {"h": hidden}
        for name, shape in shapes.items():
            if name.endswith(FUSED[0]) and len(shape) == 3:
                width = shape[1] if shape[2] == hidden else shape[2]
                sizes |= {"experts": shape[0], "moe_ffn": width // 2, "ffn": width // 2}
                if kind == "qwen3_vl_moe" and shape[2] != hidden:
                    kind = ""  # transformers 4 holds experts as checkpoints do
                break
        return cls(kind, sizes)

    def maps(
        self, name: str, dtype: str, shape: Shape, regions: Sequence[_core.Region]
    ) -> list[_core.Map]:
        """The maps of a parameter's elements; only the maps that meet its regions."""
        found = self._expansion(name, shape)
        if found is None:
            zeros, axes = (0,) * len(shape), tuple(range(len(shape)))
            name = self._plain(name)
            group = group_of(name, TOGETHER) or group_of_parts(name, dtype)
            return [(name, "", shape, zeros, zeros, shape, axes, group)]
        expansion, numbers = found
        return expansion.maps(ShardPlacement(shape, tuple(regions)), numbers, TOGETHER)

    def views(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The checkpoint's tensors as views of a whole parameter, by name."""
        found = self._expansion(name, tuple(tensor.shape))
        if found is None:
            return {self._plain(name): tensor}
        expansion, numbers = found
        views: dict[str, Tensor] = {}
        for piece in expansion.pieces:
            view, known = tensor.detach(), [axis for axis in piece.axes if axis >= 0]
            for axis, (start, extent) in enumerate(zip(*piece.source_box(), strict=True)):
                view = view.narrow(axis, start, extent)
            order = [*(axis for axis in range(view.dim()) if axis not in known), *known]
            views[piece.name.format(**numbers)] = view.permute(order).view(piece.shape)
        return views

    def _plain(self, name: str) -> str:
        return (self.family and self.family.copy_of(name)) or name

    def _expansion(self, name: str, shape: Shape) -> tuple[Expansion, dict[str, int]] | None:
        """The rule of a parameter, or None if it has the form of the checkpoint's tensor."""
        found = None if self.family is None else self.family.match(name)
        if self.family is None or found is None:
            return None
        rule, numbers = found
        if id(rule) not in self._expansions:
            self._expansions[id(rule)] = self.family.expand(rule, name, self._sizes)
        expansion = self._expansions[id(rule)]
        if expansion.shape == shape:
            return expansion, numbers
        if any((p.name.format(**numbers), p.shape) == (name, shape) for p in expansion.pieces):
            return None
        raise _core.LayoutError(f"{name}: shape {shape} != {expansion.shape} by the configuration")


def _kind_of(shapes: Mapping[str, Sequence[int]]) -> str:
    """The model_type of RUNTIME that these tensors show; "" if they show none."""
    if "model.visual.merger.ln_q.weight" in shapes:
        return "qwen2_vl"
    if any(name.startswith("model.visual.deepstack_merger_list.") for name in shapes):
        return "qwen3_vl_moe"
    if any(map(_LIKE_LLAVA.match, shapes)):
        return "llava"
    parts = {found[1] for name in shapes if (found := _LAYER.fullmatch(name))}
    fused = {"input_layernorm.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj"} <= parts
    norms = (shapes[n] for n in shapes if n.endswith(".self_attn.q_norm.weight"))
    rows = (shapes[n] for n in shapes if n.endswith(".self_attn.q_proj.weight"))
    if not fused or any(norm[0] == row[0] for norm, row in zip(norms, rows, strict=False)):
        return ""  # both OLMoE and MiniMax-M2 normalise all heads together
    if parts & _ONE_BY_ONE:
        return "qwen3_moe"
    return "mixtral" if all(map(_MIXTRAL.fullmatch, parts)) else ""
