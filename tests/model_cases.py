"""Tiny models with random weights, one for each architecture that the tests compile."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics
from detcompile.models.hub import EMBEDDED
from detcompile.passes import program_source
from detcompile.passes.programs.aot import run_plainly

__all__ = [
    "ARCHITECTURES", "CANONICAL", "STATEFUL", "VOCAB_SIZE", "certified", "compiled", "random_model", "without_inductor",
]  # fmt: skip

VOCAB_SIZE = 160
MAX_CONTEXT = 2048
COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Extents that are not multiples of a tile, a warp or a vector, if the architecture allows it.
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
    # a small cap, so that scores of these weights reach it
    "gemma2": LLAMA
    | {"head_dim": 16, "sliding_window": 70, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    # sinks, and every fourth layer without a window and without positions
    "granite_swa": LLAMA | {"num_hidden_layers": 4, "sliding_window": 70, "attention_multiplier": 0.25},
    "phi3": LLAMA,
    "gpt_neox": LLAMA | {"head_dim": 20},
    "opt": LLAMA | {"ffn_dim": 176, "word_embed_proj_dim": 80},
    "olmo2": LLAMA,
    "cohere": LLAMA,
    "bloom": COMMON | {"hidden_size": 80, "n_layer": 2, "n_head": 4},
    "falcon": LLAMA | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": COMMON | {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT, "rotary_dim": 12},
}
# Programs that tests share: a test that needs any compiled model takes one of these.
CANONICAL = {
    ("llama", torch.bfloat16),
    ("qwen3", torch.float32),
    ("qwen3", torch.bfloat16),
    ("gpt2", torch.float32),
    ("gemma2", torch.bfloat16),
    ("granite_swa", torch.float32),
    ("mamba2", torch.float32),
}
# Layers that carry a state from token to token: convolutions, Mamba-2, gated delta nets, RWKV; some beside attention.
STATEFUL = {
    "lfm2": LLAMA | {"layer_types": ["conv", "full_attention"], "head_dim": 20},
    "mamba2": COMMON
    | {"hidden_size": 80, "num_heads": 5, "head_dim": 32, "state_size": 24, "n_groups": 1, "num_hidden_layers": 2}
    | {"chunk_size": 64},
    # weights and activations halved a layer, as transformers does it every sixth
    "rwkv": COMMON
    | {"hidden_size": 80, "attention_hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 2}
    | {"rescale_every": 1},
    "qwen3_next": LLAMA
    | {"head_dim": 20, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 20},
}


def random_model(name: str, dtype: torch.dtype, device: str = "cpu", **changes: object) -> PreTrainedModel:
    """Return a model of ARCHITECTURES (others have LLAMA's sizes) in eval mode; every call gives the same weights.

    Weights are ten times larger than the usual initialization, so that a changed order changes bits.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **((ARCHITECTURES | STATEFUL).get(name, LLAMA) | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            if path.endswith("sinks"):  # they start as zeros
                parameter.copy_(torch.linspace(-1.0, 4.0, len(parameter)))
    return model.to(device=device, dtype=dtype)


def compiled(
    name: str, dtype: torch.dtype, device: str = "cpu", tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
) -> CompiledModel:
    """Return ``random_model`` compiled, once a process; "tiny" is the embedded model, "tiny-draft" its draft model."""
    return _compiled(name, dtype, device, tp_sizes)


@functools.cache  # distinguishes a default from the same value passed
def _compiled(name: str, dtype: torch.dtype, device: str, tp_sizes: tuple[int, ...]) -> CompiledModel:
    numerics = Numerics(tp_sizes=tp_sizes)
    if name in EMBEDDED:
        return detcompile.compile(detcompile.load_model(name, dtype=dtype, device=device), numerics=numerics)
    return detcompile.compile(random_model(name, dtype, device), numerics=numerics, max_context=MAX_CONTEXT)


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """Run compiled graphs operation by operation inside the block, which halves the time to compile."""
    with mock.patch.object(program_source, "compile_fx_inner", run_plainly):
        yield


def certified(model: PreTrainedModel, **options: Any) -> CompiledModel:
    """Return ``compile(model)`` without Inductor."""
    with without_inductor():
        return detcompile.compile(model, **options)
