"""Tensor-parallel plans: those of transformers, and ours for architectures without one.

A plan maps module names, with * for the layer, to styles. A plan does not say what a style means for a module with
heads; shard.py knows that by the module's name.
"""

from fnmatch import filter as filter_names
from fnmatch import fnmatch

from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel

COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
ROW_STYLES = ("rowwise", "rowwise_split_input")
EXPERT_STYLE = "moe_tp_experts"  # of a module, whose class decides which weights a rank keeps
# Whole on every rank. The embedding is always sharded.
WHOLE_STYLES = ("replicate", "replicated", "replicated_with_grad_allreduce", "embedding_rowwise", "local_params")


def _plan(layer: str, columns: str, rows: str) -> dict[str, str]:
    """Return styles of a layer's modules, whose names are separated by spaces."""
    styles = dict.fromkeys(columns.split(), "colwise") | dict.fromkeys(rows.split(), "rowwise")
    return {f"{layer}.{name}": style for name, style in styles.items()}


QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
GATED = "mlp.gate_proj mlp.up_proj"
HEADS = _plan("layers.*", QKV, "self_attn.o_proj")
LLAMA = HEADS | _plan("layers.*", GATED, "mlp.down_proj")
DECODER = _plan("decoder.layers.*", f"{QKV} fc1", "self_attn.out_proj fc2")  # of an encoder and a decoder, and opt
DECODER_ALONE = _plan("layers.*", f"{QKV} fc1", "self_attn.out_proj fc2")
FUSED = _plan("h.*", "self_attention.query_key_value mlp.dense_h_to_4h", "self_attention.dense mlp.dense_4h_to_h")
GPT2 = _plan("h.*", "attn.c_attn mlp.c_fc", "attn.c_proj mlp.c_proj")
ENCODER = _plan(
    "encoder.layer.*",
    "attention.self.query attention.self.key attention.self.value intermediate.dense",
    "attention.output.dense output.dense",
)
# Plans for architectures without a plan in transformers, or without one for attention, in the same notation.
ADDED_PLANS: dict[str, dict[str, str]] = {
    "afmoe": LLAMA | _plan("layers.*.mlp.shared_experts", "gate_proj up_proj", "down_proj"),
    **dict.fromkeys(("axk1", "deepseek_v3", "flint", "sarvam_mla", "youtu"), _plan("layers.*", "", "self_attn.o_proj")),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"), DECODER),
    **dict.fromkeys(("opt", "pegasus", "plbart", "trocr", "whisper"), DECODER),
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "git"), ENCODER),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), ENCODER),
    **dict.fromkeys(("biogpt", "xglm"), DECODER_ALONE),
    **dict.fromkeys(("bloom", "falcon"), FUSED),
    "codegen": _plan("h.*", "attn.qkv_proj mlp.fc_in", "attn.out_proj mlp.fc_out"),
    "ctrl": _plan(
        "h.*",
        "multi_head_attention.Wq multi_head_attention.Wk multi_head_attention.Wv ffn.0",
        "multi_head_attention.dense ffn.2",
    ),
    **dict.fromkeys(("emu3_text_model", "hunyuan_v1_dense", "stablelm"), LLAMA),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt"), GPT2),
    "gpt_neo": _plan(
        "h.*",
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj mlp.c_fc",
        "attn.attention.out_proj mlp.c_proj",
    ),
    "gpt_neox_japanese": _plan(
        "layers.*", "attention.query_key_value mlp.dense_h_to_4h", "attention.dense mlp.dense_4h_to_h"
    ),
    **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "phimoe"), HEADS),
    "gptj": _plan("h.*", "attn.q_proj attn.k_proj attn.v_proj mlp.fc_in", "attn.out_proj mlp.fc_out"),
    "modernbert-decoder": _plan("layers.*", "attn.q_proj attn.k_proj attn.v_proj mlp.Wi", "attn.Wo mlp.Wo"),
    "mpt": _plan("blocks.*", "attn.Wqkv ffn.up_proj", "attn.out_proj ffn.down_proj"),
    "nemotron": _plan("layers.*", f"{QKV} mlp.up_proj", "self_attn.o_proj mlp.down_proj"),
    "persimmon": _plan("layers.*", "self_attn.query_key_value mlp.dense_h_to_4h", "self_attn.dense mlp.dense_4h_to_h"),
    "xlm": _plan("attentions.*", "q_lin k_lin v_lin", "out_lin") | _plan("ffns.*", "lin1", "lin2"),
}


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return styles by module-name pattern; empty if nothing is cut: names match no module (llama4)."""
    config = model.config.get_text_config()
    if model.base_model_prefix and not hasattr(model, model.base_model_prefix):
        return {}
    plan = ADDED_PLANS.get(config.model_type, {}) | (getattr(config, "base_model_tp_plan", None) or {})
    base = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    names = [name for name, _ in model.named_modules()]
    for body in (base, f"{base}language_model."):  # the latter in models with an image tower
        placed = {f"{body}{pattern}": style for pattern, style in plan.items()}
        if any(style not in WHOLE_STYLES and filter_names(names, pattern) for pattern, style in placed.items()):
            return placed
    return {}


def style_of(name: str, plan: dict[str, str]) -> str:
    """Return 'column', 'row', 'experts' or '' for a module or parameter of this name.

    Raises:
        UnsupportedModel: the plan has an unknown style.
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
