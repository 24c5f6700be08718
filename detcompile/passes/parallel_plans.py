"""Which linears of a model ranks share, and how: transformers' tensor-parallel plans, and ours where it has none.

A plan maps names of modules, with * for the layer, to styles. What a style means for a module that carries heads is
not told by the plan; shard.py knows it by the module's name.
"""

from fnmatch import fnmatch

from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel

__all__ = ["EXPERT_STYLE", "ROW_STYLES", "style_of", "tensor_parallel_plan"]

COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
ROW_STYLES = ("rowwise", "rowwise_split_input")
EXPERT_STYLE = "moe_tp_experts"  # of a module; what a rank keeps of its weights is told by the module itself
# Whole on every rank; the embedding is sharded whether or not a plan says so.
WHOLE_STYLES = ("replicated", "replicated_with_grad_allreduce", "embedding_rowwise")

FUSED = {
    "h.*.self_attention.query_key_value": "colwise",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}
HEADS = {f"layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
# Plans of architectures for which transformers has none, in its notation.
OWN_PLANS: dict[str, dict[str, str]] = {
    "bloom": FUSED,
    "falcon": FUSED,
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "phimoe"), HEADS),
    "gptj": {
        "h.*.attn.q_proj": "colwise",
        "h.*.attn.k_proj": "colwise",
        "h.*.attn.v_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    },
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
}


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Style by pattern of module names; empty where there is no plan, or one of names that no module has (llama4)."""
    config = model.config.get_text_config()
    if model.base_model_prefix and not hasattr(model, model.base_model_prefix):
        return {}
    plan = getattr(config, "base_model_tp_plan", None) or OWN_PLANS.get(config.model_type, {})
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    return {f"{prefix}{pattern}": style for pattern, style in plan.items()}


def style_of(name: str, plan: dict[str, str]) -> str:
    """'column', 'row', 'experts' or '' for a module or parameter of this name.

    Raises:
        UnsupportedModel: the plan's style is none that is known.
    """
    for pattern, style in plan.items():
        if fnmatch(name, pattern):
            if style in COLUMN_STYLES or style in ROW_STYLES:
                return "column" if style in COLUMN_STYLES else "row"
            if style == EXPERT_STYLE:
                return "experts"
            if style in WHOLE_STYLES:
                return ""
            raise UnsupportedModel(f"{name}: the tensor-parallel style {style!r} is not known; compile with tp=1")
    return ""
