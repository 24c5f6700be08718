"""Tiny models with random weights, one for each architecture that the tests compile."""

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics

__all__ = ["ARCHITECTURES", "VOCAB_SIZE", "compiled", "random_model"]

VOCAB_SIZE = 160
MAX_CONTEXT = 2048
COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Extents that are no multiple of a tile, a warp or a vector, where the architecture allows it.
LLAMA = COMMON | {
    "hidden_size": 80,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
}
ARCHITECTURES = {
    "llama": LLAMA | {"head_dim": 20},
    "qwen3": LLAMA | {"head_dim": 32},
    "mistral": LLAMA | {"head_dim": 16, "sliding_window": 70},
    "gemma3_text": LLAMA | {"head_dim": 16, "sliding_window": 70, "query_pre_attn_scalar": 16},
    "granite": LLAMA,
    "gpt2": COMMON | {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT},
}


def random_model(name: str, dtype: torch.dtype, device: str = "cpu", **changes: object) -> PreTrainedModel:
    """A model of ARCHITECTURES in eval mode; the same weights at every call.

    Weights are ten times larger than the usual initialisation, so that a changed order changes bits.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(ARCHITECTURES[name] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.to(device=device, dtype=dtype)


@functools.cache
def compiled(
    name: str, dtype: torch.dtype, device: str = "cpu", tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
) -> CompiledModel:
    """``random_model`` compiled, once a process; "tiny" is the embedded model."""
    numerics = Numerics(tp_sizes=tp_sizes)
    if name == "tiny":
        return detcompile.compile(detcompile.load_model("tiny", dtype=dtype, device=device), numerics=numerics)
    return detcompile.compile(random_model(name, dtype, device), numerics=numerics)
