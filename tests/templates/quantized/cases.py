"""Quantized weights for the template tests: every format, scales of every shape."""

import torch

from detcompile.templates.quantized.weights import QuantizedWeight, pack_nibbles

__all__ = ["FORMATS", "quantized_weight"]

# name: dtype of w, group, rows (0: all of them), "zeros", "mins" or neither, dtype of the scales
FORMATS = {
    "int4, groups of 128": (torch.uint8, 128, 1, "zeros", torch.float16),
    "int4, groups of 64, symmetric": (torch.uint8, 64, 1, "", torch.bfloat16),
    "int4, groups of 32": (torch.uint8, 32, 1, "zeros", torch.float16),
    "int4, groups of 32, mins": (torch.uint8, 32, 1, "mins", torch.float16),
    "int4, channels": (torch.uint8, 0, 1, "", torch.float32),
    "int8, channels": (torch.int8, 0, 1, "", torch.float32),
    "int8, groups of 128": (torch.int8, 128, 1, "zeros", torch.float16),
    "int8, groups of 48": (torch.int8, 48, 1, "zeros", torch.bfloat16),
    "int8, groups of 16, mins": (torch.int8, 16, 1, "mins", torch.bfloat16),
    "fp8, blocks of 128": (torch.float8_e4m3fn, 128, 128, "", torch.float32),
    "fp8, blocks of 16 x 24": (torch.float8_e4m3fn, 24, 16, "", torch.bfloat16),
    "fp8, channels": (torch.float8_e4m3fn, 0, 1, "", torch.float32),
    "fp8, one scale": (torch.float8_e4m3fn, 0, 0, "", torch.float32),
}


def quantized_weight(name: str, n: int, k: int, device: str = "cpu", seed: int = 0) -> QuantizedWeight:
    """Return a random weight [n, k] of one of FORMATS."""
    w_dtype, group, rows, offset, s_dtype = FORMATS[name]
    group, rows = group or k, rows or n
    generator = torch.Generator().manual_seed(seed)
    shape = (-(-k // group), -(-n // rows))
    if w_dtype is torch.uint8:
        w = pack_nibbles(torch.randint(0, 16, (n, k), generator=generator))
    elif w_dtype is torch.int8:
        w = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    else:
        spread = torch.randn(n, k, generator=generator) * torch.exp(3 * torch.randn(n, k, generator=generator))
        w = spread.clamp(-448, 448).to(torch.float8_e4m3fn)
    zeros = torch.randint(-3, 18, shape, generator=generator).to(torch.int16) if offset == "zeros" else None
    scales = (torch.randn(shape, generator=generator).exp() * 0.01).to(s_dtype)
    mins = torch.randn(shape, generator=generator).to(s_dtype) if offset == "mins" else None
    parts = (None if part is None else part.to(device) for part in (w, scales, zeros, mins))
    return QuantizedWeight(*parts, k, group, rows)  # type: ignore[arg-type]
