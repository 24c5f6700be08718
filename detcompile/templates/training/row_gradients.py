"""Gradients of rms_norm, layer_norm and softmax over the last dim: float32 inside, sums in Row order.

Legend: R row length, n the normed row before its weight, s its scale, gw = g * weight.

    rms_norm:   dx = round((gw - n * (sum of gw * n / R)) * s)
    layer_norm: dx = round(((gw - sum of gw / R) - n * (sum of gw * n / R)) * s)
    softmax:    dx = round(y * (g - sum of g * y))

weight_rows [..., R] float32 are g times the weight's factor: round(n) with round_before_weight, else n. A weight's
gradient is their token_sum, and a bias's gradient the token_sum of g. Rounding to x.dtype has the derivative 1. The
order is row_order(R, device type, (), dtype) of the rows' dtype.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define
from detcompile.templates.training.row_gradients_gpu import (
    layer_norm_backward_cuda,
    rms_norm_backward_cuda,
    softmax_backward_cuda,
)


def rms_norm_backward_cpu(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Run the op on the CPU, g and x [..., R] of one dtype -> dx and weight_rows [..., R]."""
    g, x, weight, dx, rows = _prepared(g, x, weight)
    cpu_library.library(isa).detcompile_rms_norm_backward(
        g, x, weight, dx, rows, eps, round_before_weight, x.numel() // x.shape[-1], x.shape[-1],
        cpu_library.dtype_code(x), cpu_library.dtype_code(weight), cpu_library.thread_count(),
    )  # fmt: skip
    return dx, rows


def layer_norm_backward_cpu(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Run the op on the CPU, g and x [..., R] of one dtype -> dx and weight_rows [..., R]."""
    g, x, weight, dx, rows = _prepared(g, x, weight)
    cpu_library.library(isa).detcompile_layer_norm_backward(
        g, x, weight, dx, rows, eps, x.numel() // x.shape[-1], x.shape[-1],
        cpu_library.dtype_code(x), cpu_library.dtype_code(weight), cpu_library.thread_count(),
    )  # fmt: skip
    return dx, rows


def softmax_backward_cpu(g: Tensor, y: Tensor, dtype: torch.dtype, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, g and the softmax y [..., R] of one dtype -> dx [..., R] of ``dtype``."""
    g, y, _, dx, _ = _prepared(g, y, None, dtype)
    cpu_library.library(isa).detcompile_softmax_backward(
        g, y, dx, y.numel() // y.shape[-1], y.shape[-1],
        cpu_library.dtype_code(y), cpu_library.dtype_code(dx), cpu_library.thread_count(),
    )  # fmt: skip
    return dx


define(
    "rms_norm_backward(Tensor g, Tensor x, Tensor? weight, float eps, bool round_before_weight) -> (Tensor, Tensor)",
    {"g": "float ... R>0", "x": "g ... R", "weight": "float R"},
    cpu=rms_norm_backward_cpu,
    cuda=rms_norm_backward_cuda,
    fake=lambda g, x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)),
)
define(
    "layer_norm_backward(Tensor g, Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    {"g": "float ... R>0", "x": "g ... R", "weight": "float R"},
    cpu=layer_norm_backward_cpu,
    cuda=layer_norm_backward_cuda,
    fake=lambda g, x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)),
)
define(
    "softmax_backward(Tensor g, Tensor y, ScalarType dtype) -> Tensor",
    {"g": "float ... R>0", "y": "g ... R"},
    cpu=softmax_backward_cpu,
    cuda=softmax_backward_cuda,
    fake=lambda g, y, dtype: y.new_empty(y.shape, dtype=dtype),
)


def _prepared(
    g: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return g, x and the weight as the library takes them, and empty dx and weight_rows."""
    weight = None if weight is None else weight.contiguous()
    dx = torch.empty(x.shape, dtype=dtype or x.dtype, device="cpu")
    return g.contiguous(), x.contiguous(), weight, dx, torch.empty(x.shape, dtype=torch.float32, device="cpu")
