"""Build a tiny random model of each causal-LM architecture: its default configuration with sizes shrunk by name.

Every layer kind that a default configuration lists is kept at least once; windows and the tables of rotary positions
become shorter than the sequences that tools/model_checks.py runs. OVERRIDES holds the exceptions.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["ARCHITECTURES", "MAX_CONTEXT", "OUTSIDE", "VOCAB_SIZE", "WINDOW", "tiny_config", "tiny_model"]

ARCHITECTURES: dict[str, str] = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))  # model type -> class name
VOCAB_SIZE = 160
MAX_POSITIONS = 256
MAX_CONTEXT = 240  # what is compiled for: some models start to count at a later row of their table
WINDOW = 48

_HEADS, _HEAD_DIM, _HIDDEN, _MLP, _EXPERTS = 4, 16, 64, 96, 4
# Sizes by the names that configurations give them; only what is larger shrinks.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "word_embed_proj_dim"), _HIDDEN),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "dim_model_base"), _HIDDEN),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "backbone_hidden_size", "out_hidden_size"), _HIDDEN),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads",
         "indexer_n_heads", "index_n_heads"),
        _HEADS,
    ),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "attention_head_size", "kv_channels"), _HEAD_DIM),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim", "global_head_dim", "attention_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "swa_head_dim", "query_pre_attn_scalar"), _HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": 24,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(
        ("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "d_inner", "dim_ff",
         "dff", "n_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size",
         "prefix_dense_intermediate_size"),
        _MLP,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"),
        32,
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), _EXPERTS
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "n_group", "num_expert_group",
         "top_k_experts"),
        2,
    ),
    **dict.fromkeys(("topk_group", "num_nextn_predict_layers", "first_k_dense_replace", "num_ngram"), 1),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"),
        2,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length",
         "max_source_positions", "max_target_positions"),
        MAX_POSITIONS,
    ),
    "original_max_position_embeddings": 64,
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention",
         "attention_chunk_size", "keep_window_size"),
        WINDOW,
    ),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": _HEADS,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "laurel_rank", "adapter_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size"), _HEAD_DIM),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("index_topk", "index_topk_blocks"), WINDOW),
    "hidden_size_global": 2 * _HIDDEN,
    "patch_size": 4,
    "image_size": 16,
    "floor_scale": 32,  # positions from which queries are scaled
    "rel_extent": 32,
}  # fmt: skip
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOST_KINDS = 4  # a longer list numbers the layers; the configuration makes a new one for fewer layers

_TWO_EXPERTS = {"n_routed_experts": _EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1}
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Exceptions: values without a default, lists that several sizes share, both kinds of layers.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blenderbot": {"max_position_embeddings": MAX_POSITIONS},
    "blt": {
        "encoder_hash_byte_group_vocab": 200,
        "global_config": {"hidden_size": 2 * _HIDDEN, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
                          "num_hidden_layers": 2, "intermediate_size": _MLP, "max_position_embeddings": MAX_POSITIONS,
                          "encoder_cross_output_size": None},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": _MLP, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {**_TWO_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": _HIDDEN, "adapter_out_dim": _HIDDEN},
    "dots3_note_vision_encoder": {"adapter_in_dim": _HIDDEN, "adapter_out_dim": _HIDDEN, "num_hidden_layers": 2,
                                  "mlp_layer_types": ["dense", "sparse"]},
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": [_MLP] * 4, "activation_sparsity_pattern": [0.95, 0.0] * 2},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None, "H_cycles": 1, "L_cycles": 2},
    "hunyuan_v1_dense": {"head_dim": _HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": _HEAD_DIM, "num_experts": _EXPERTS, "moe_topk": 2},
    "inkling_text": {"log_scaling_n_floor": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "ministral": {"head_dim": _HEAD_DIM},
    "nemotron": {"head_dim": _HEAD_DIM, "num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_n_heads": _HEADS, "indexer_kv_heads": 1, "indexer_head_dim": _HEAD_DIM,
                       "indexer_budget": WINDOW, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third layer attends
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {"shape_vocab_size": VOCAB_SIZE, "pronunciation_vocab_size": VOCAB_SIZE},
    "xlm": {"causal": True},  # as in its causal checkpoints; the default is bidirectional
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
              "attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 32},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
               "attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 32, "hybrid_layer_ids": [1, 2]},
}  # fmt: skip

# Architectures whose eager forward does not run from input_ids alone, or not with what the tests install.
OUTSIDE = {
    "gemma3n": "its vision tower needs Pillow and timm, which are not installed here; the text model is gemma3n_text",
    "gemma4_assistant": "drafts over the hidden states and keys of another model",
    "gemma4_unified_assistant": "drafts over the hidden states and keys of another model",
    "musicgen": "takes audio codes of several codebooks, and a configuration of three models",
    "musicgen_melody": "takes audio codes of several codebooks, and a configuration of three models",
}


def tiny_config(model_type: str) -> Any:
    """Return the configuration of a tiny model of this type."""
    default = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(model_type, **(_shrunk(default) | OVERRIDES.get(model_type, {})))


def tiny_model(model_type: str, implementation: str | None = None) -> PreTrainedModel:
    """Return a tiny model in eval mode on the CPU in float32; the weights are the same at every call.

    Args:
        implementation: of attention and experts; "eager" is the model's own code, where "sdpa" leaves out soft caps.

    Weights are several times larger than the usual initialization, so that a changed order changes bits; what is
    initialized to one constant (biases, sinks) gets values that differ.
    """
    torch.manual_seed(0)
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32, **chosen).eval()
    if implementation is not None and model._can_set_experts_implementation():
        model.set_experts_implementation(implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() > 1 and float(parameter.std()) > 0:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _shrunk(config: Any) -> dict[str, Any]:
    """Return keywords for the configuration's class: the sizes of SIZES, fewer layers; sub-configurations likewise."""
    given = config.to_dict()
    changes: dict[str, Any] = {}
    for name, value in given.items():
        sub = getattr(config, name, None) if isinstance(value, Mapping) else None
        if hasattr(sub, "to_dict") and hasattr(sub, "model_type"):
            given_by_name = OVERRIDES.get(sub.model_type, {})
            named = {"model_type": sub.model_type} if sub.model_type else {}
            changes[name] = {**_shrunk(sub), **given_by_name, **named}
        elif _is_size(value) and name in SIZES:
            changes[name] = min(value, SIZES[name])
        elif name in KEY_HEADS and _is_size(value):
            heads = given.get("num_attention_heads") or value
            changes[name] = 1 if value == 1 else _HEADS if value >= heads else 2
        elif isinstance(value, Mapping) and "rope" in name:
            changes[name] = _shrunk_rope(value)
        elif name in TOKENS and value is not None:
            changes[name] = TOKENS[name]
        elif name == "is_decoder":
            changes[name] = True
    if changes.get("head_dim") and given.get("head_dim") == given.get("qk_rope_head_dim"):
        changes["head_dim"] = changes["qk_rope_head_dim"]  # another name for it
    return changes | _fewer_layers(config, given)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrunk_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with tables for short heads and a threshold within the sequences."""
    shrunk: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            shrunk[name] = _shrunk_rope(value)
        elif name == "original_max_position_embeddings":
            shrunk[name] = 64
        elif name.endswith("_factor") and isinstance(value, list):
            shrunk[name] = value[: _HEAD_DIM // 2]
        else:
            shrunk[name] = value
    return shrunk


def _fewer_layers(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the per-layer lists, cut to layers that contain each kind once."""
    layers = getattr(config, "num_hidden_layers", None)
    if not _is_size(layers):
        return {}
    lists = {
        name: list(value)
        for name, value in given.items()
        if isinstance(value, (list, tuple)) and len(value) == layers and len(set(map(str, value))) <= MOST_KINDS
    }
    if not lists:
        return {}
    chosen: list[int] = []
    for values in lists.values():
        for kind in dict.fromkeys(map(str, values)):
            if not any(str(values[i]) == kind for i in chosen):
                chosen.append(next(i for i in range(layers) if str(values[i]) == kind))
    chosen += [i for i in range(layers) if i not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    accepted = set(inspect.signature(type(config).__init__).parameters) | set(given)
    count = {"num_hidden_layers": len(chosen)} if "num_hidden_layers" in accepted else {}
    return count | {name: [values[i] for i in chosen] for name, values in lists.items()}
