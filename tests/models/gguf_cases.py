"""Small GGUF files of a Llama, with weights of any type."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from detcompile.models.gguf.header import TENSOR_TYPES

__all__ = ["Change", "HEADS", "HIDDEN", "KV_HEADS", "NAMES", "TEMPLATE", "TOKENS", "write"]

HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 256, 512
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk": "model.layers",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # offsets in a block
TOKENS = ["<unk>", "<bos>", "<eos>", "<turn>", *sorted(ByteLevel.alphabet()), "he", "ll"]
TEMPLATE = "{% for message in messages %}<bos>{{ message.content }}<turn>{% endfor %}"
Change = Callable[[GGUFWriter], object]


def stored(shape: tuple[int, ...], kind: str, draws: np.random.Generator) -> np.ndarray:
    """Return random weights as a file has them: quantized, or random blocks where gguf cannot quantize."""
    try:
        return quantize(draws.standard_normal(shape, dtype=np.float32) / 16, GGMLQuantizationType[kind])
    except NotImplementedError:
        of = next(each for each in TENSOR_TYPES.values() if each.name == kind)
        blocks = draws.integers(0, 256, (*shape[:-1], shape[-1] // of.block, of.size), dtype=np.uint8)
        for at in SCALES.get(kind, (0,)):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        return blocks.reshape(*shape[:-1], -1)


def write(path: Path, kinds: list[str], change: Change = lambda _: None, norm: str = "F32") -> Path:
    """Write a Llama that has a layer for each type; ``change`` may add metadata and tensors."""
    draws, writer = np.random.default_rng(0), GGUFWriter(path, "llama")
    writer.add_block_count(len(kinds))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 4 + [1] * (len(TOKENS) - 4))
    writer.add_token_merges(["h e", "l l"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    change(writer)
    weights = {"token_embd": ((len(TOKENS), HIDDEN), kinds[0]), "output_norm": ((HIDDEN,), norm)}
    for layer, kind in enumerate(kinds):
        weights |= {f"blk.{layer}.{name}": (shape, kind) for name, shape in SHAPES.items()}
        weights |= {f"blk.{layer}.{name}": ((HIDDEN,), norm) for name in ("attn_norm", "ffn_norm")}
    for name, (shape, kind) in weights.items():
        raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", stored(shape, kind, draws), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
