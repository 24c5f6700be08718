"""Quantized checkpoints of random tiny models, in the layout of each method's tools."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.passes.modules.quantized_layouts import AWQ_NIBBLES
from tests.model_cases import random_model

__all__ = ["CHECKPOINTS", "ODD_CHECKPOINTS", "pack_words", "write_checkpoint", "write_gpt_oss", "write_mixture"]

GROUP = 32
WIDTHS = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}  # groups of 32, words of eight
Tensors = dict[str, Tensor]


def pack_words(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers -> int32 words along dim, lowest bits first, zeros past the end."""
    per = 32 // bits
    moved = numbers.long().movedim(dim, -1)
    moved = nn.functional.pad(moved, (0, -moved.shape[-1] % per)).unflatten(-1, (-1, per))
    words = (moved << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, dim).contiguous()


def quantize(w: Tensor, bits: int, group: int, symmetric: bool, scales_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """w [N, K] -> unsigned q [N, K], scales [N, G], zeros [N, G], and the matrix that they represent in float64.

    The last group of K may be shorter than the others.
    """
    k = w.shape[1]
    top, blocks = (1 << bits) - 1, nn.functional.pad(w.float(), (0, -k % group)).unflatten(1, (-1, group))
    if symmetric:
        scales = (blocks.abs().amax(-1) * 2 / top).to(scales_dtype)
        zeros = torch.full_like(scales, 1 << bits - 1).long()
    else:
        low, high = blocks.amin(-1).clamp_max(0), blocks.amax(-1).clamp_min(0)
        scales = ((high - low) / top).clamp_min(1e-4).to(scales_dtype)
        zeros = (-low / scales.float()).round().clamp(1, top).long()
    q = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top).long()
    exact = (q - zeros[..., None]).double() * scales.double()[..., None]
    return q.flatten(1)[:, :k], scales, zeros, exact.flatten(1)[:, :k]


def _gptq(
    bits: int, v2: bool, act_order: bool, w: Tensor, group: int = GROUP, unset_order: bool = False
) -> tuple[Tensors, Tensor]:
    k = w.shape[1]
    place = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
    q, scales, zeros, exact = quantize(w[:, place], bits, group, False, torch.float16)
    back = place.argsort()
    tensors = {
        "qweight": pack_words(q[:, back].t(), bits, 0),
        "qzeros": pack_words(zeros.t() - (0 if v2 else 1), bits, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.zeros(k, dtype=torch.int32) if unset_order else (back // group).int(),
    }
    return tensors, exact[:, back]


def _awq(w: Tensor) -> tuple[Tensors, Tensor]:
    q, scales, zeros, exact = quantize(w, 4, GROUP, False, torch.float16)
    interleave = lambda x: x.unflatten(1, (-1, 8))[:, :, list(AWQ_NIBBLES)].flatten(1)  # noqa: E731
    tensors = {
        "qweight": pack_words(interleave(q.t()), 4, 1),
        "qzeros": pack_words(interleave(zeros.t()), 4, 1),
        "scales": scales.t().contiguous(),
    }
    return tensors, exact


def _fp8(w: Tensor, rows: int = 16, columns: int = 32) -> tuple[Tensors, Tensor]:
    blocks = nn.functional.pad(w.float(), (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
    blocks = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-8)
    each = scales.repeat_interleave(rows, 0)[: w.shape[0]].repeat_interleave(columns, 1)[:, : w.shape[1]]
    weight = (w.float() / each).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": scales}, weight.double() * each.double()


def _compressed_fp8(w: Tensor, rows: int, columns: int) -> tuple[Tensors, Tensor]:
    tensors, exact = _fp8(w, rows, columns)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, exact


def _packed(bits: int, symmetric: bool, w: Tensor, group: int = GROUP) -> tuple[Tensors, Tensor]:
    q, scales, zeros, exact = quantize(w, bits, group, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": pack_words(q, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(zeros, bits, 0)
    return tensors, exact


def _int8(w: Tensor) -> tuple[Tensors, Tensor]:
    q, scales, _, exact = quantize(w, 8, w.shape[1], True, torch.bfloat16)
    return {"weight": (q - 128).to(torch.int8), "weight_scale": scales}, exact


def _compressed(kind: str, bits: int, form: str, **weights: object) -> dict:
    group = {"weights": {"type": kind, "num_bits": bits, **weights}, "targets": ["Linear", "Embedding"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


Make = Callable[[Tensor], tuple[Tensors, Tensor]]
CHECKPOINTS: Mapping[str, tuple[dict, Make]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        lambda w: _gptq(4, False, False, w),
    ),
    "gptq_v2, act order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda w: _gptq(4, True, True, w),
    ),
    "gptq, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq"},
        lambda w: _gptq(8, False, False, w),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}, _fp8),
    "compressed int4": (_compressed("int", 4, "pack-quantized", group_size=GROUP), lambda w: _packed(4, True, w)),
    "compressed int4 with zeros": (
        _compressed("int", 4, "pack-quantized", group_size=GROUP),
        lambda w: _packed(4, False, w),
    ),
    "compressed int8": (_compressed("int", 8, "int-quantized"), _int8),
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
BLOCKS = {"strategy": "block", "block_structure": [48, 48]}
# Widths that are not multiples of a group or a block, and settings that differ by linear.
ODD_CHECKPOINTS: Mapping[str, tuple[dict, Make]] = {
    "fp8, partial blocks": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, lambda w: _fp8(w, 48, 48)),
    "fp8, blocks of the default": ({"quant_method": "fp8"}, lambda w: _fp8(w, 128, 128)),
    "compressed int4, partial groups": (
        _compressed("int", 4, "pack-quantized", strategy="group", group_size=48),
        lambda w: _packed(4, True, w, 48),
    ),
    "compressed float8, partial blocks": (
        _compressed("float", 8, "float-quantized", **BLOCKS),
        lambda w: _compressed_fp8(w, 48, 48),
    ),
    "gptq, partial groups": (GPTQ | {"group_size": 48}, lambda w: _gptq(4, False, False, w, 48)),
    "gptq, g_idx unset": (GPTQ, lambda w: _gptq(4, False, False, w, unset_order=True)),
    "gptq, 8 bits and other groups for inputs of 160": (
        GPTQ | {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 64}, r"-:lm_head": {}}},
        lambda w: _gptq(8, False, False, w, 64) if w.shape[1] == 160 else _gptq(4, False, False, w),
    ),
}


def config_without_name(model: PreTrainedModel) -> str:
    """Return a loaded model's config without its name, the checkpoint's folder, which fingerprints do not cover."""
    return str({key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"})


def write_checkpoint(
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.float16,
    architecture: str = "qwen3",
    others: tuple[str, ...] = (),
    **changes: object,
) -> dict[str, Tensor]:
    """Write a tiny quantized model; return the float64 matrix of each of its linears.

    Args:
        name: key of CHECKPOINTS or ODD_CHECKPOINTS.
        others: modules that are quantized besides the linears of layers.
        changes: settings of the config.
    """
    config, make = {**CHECKPOINTS, **ODD_CHECKPOINTS}[name]
    model = random_model(architecture, dtype, **WIDTHS | {"attention_bias": True} | changes)
    exact: dict[str, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.normal_()
    tensors = dict(model.state_dict())
    for module in [*others, *(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")]:
        parts, exact[module] = make(tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in parts.items()}
    _write(folder, model, tensors, config, dtype)
    return exact


def _write(folder: Path, model: nn.Module, tensors: Tensors, config: dict, dtype: torch.dtype) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    settings = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": config}
    settings |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(settings))


def write_mixture(folder: Path, name: str, dtype: torch.dtype, **changes: object) -> dict[str, Tensor]:
    """Write a tiny quantized Qwen3-MoE, its experts one by one as its checkpoints have them.

    Return the plain state dict of transformers' model, whose quantized weights are dequantized.

    Args:
        name: key of CHECKPOINTS or ODD_CHECKPOINTS.
    """
    config, make = {**CHECKPOINTS, **ODD_CHECKPOINTS}[name]
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 160, "norm_topk_prob": True}
    model = random_model("qwen3_moe", dtype, **WIDTHS | sizes | {"num_hidden_layers": 1} | changes)
    plain = dict(model.state_dict())
    whole = {}
    for key, tensor in plain.items():
        stack, _, leaf = key.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        for expert, matrix in enumerate(tensor if parts and stack.endswith("experts") else ()):
            for part, rows in zip(parts, matrix.chunk(len(parts))):
                whole[f"{stack}.{expert}.{part}"] = (key, expert, rows)
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    tensors = {key: tensor for key, tensor in plain.items() if key not in {entry[0] for entry in whole.values()}}
    for linear in linears:
        parts, exact = make(tensors.pop(f"{linear}.weight"))
        tensors |= {f"{linear}.{leaf}": tensor for leaf, tensor in parts.items()}
        plain[f"{linear}.weight"] = exact.float().to(dtype)
    for linear, (_, _, rows) in whole.items():
        parts, exact = make(rows)
        tensors |= {f"{linear}.{leaf}": tensor for leaf, tensor in parts.items()}
        rows.copy_(exact.float().to(dtype))  # a view of the plain weight
    _write(folder, model, tensors, config, dtype)
    return plain


def write_gpt_oss(folder: Path, dtype: torch.dtype, **changes: object) -> dict[str, Tensor]:
    """Write a tiny gpt-oss, its experts in MXFP4. Return the plain state dict, its experts dequantized."""
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 256, "sliding_window": 70}
    model = random_model("gpt_oss", dtype, **WIDTHS | {"num_hidden_layers": 1} | sizes | changes)
    plain, generator = dict(model.state_dict()), torch.Generator().manual_seed(4)
    tensors = dict(plain)
    for key in [key for key in plain if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 125, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        numbers = torch.tensor([e2m1(code) for code in range(16)])
        values = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1).flatten(3)
        plain[key] = (values * 2.0 ** (scales.float()[..., None] - 127)).flatten(2).transpose(1, 2).to(dtype)
    _write(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, dtype)
    return plain


def e2m1(code: int) -> float:
    """Return a four-bit number by the definition: sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = (2 + mantissa) * 2.0 ** (exponent - 2) if exponent else mantissa * 0.5
    return -value if code & 8 else value
