"""rms_norm and layer_norm over the last dim: float32 inside, sums in Row order.

Legend: R row length.

    rms_norm:   n = h * (1 / sqrt(sum of h*h / R + eps)), h = float32(x)
                round_before_weight: out = round(round(n) * weight)     (Llama: cast, then multiply by the weight)
                otherwise:           out = round(n * weight)            (Gemma: multiply by the weight, then cast)
    layer_norm: out = round((h - mean) * (1 / sqrt(sum of (h - mean)^2 / R + eps)) * weight + bias)

Each round is to x.dtype; the square root and the division are IEEE's. weight and bias [R] are optional, and of any of
the three dtypes. The order is row_order(R, device type, (), x.dtype): it depends on R, and on a GPU on the dtype.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define
from detcompile.templates.rows.sums import rows_of
from detcompile.templates.rows.sums_and_norms_gpu import layer_norm_cuda, rms_norm_cuda


def rms_norm_cpu(
    x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [..., R]."""
    rows, M, R = rows_of(x)
    weight = None if weight is None else weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    cpu_library.library(isa).detcompile_rms_norm(
        rows, rows.stride(0), weight, out, eps, round_before_weight, M, R,
        cpu_library.dtype_code(x), cpu_library.dtype_code(weight), cpu_library.thread_count(),
    )  # fmt: skip
    return out


def layer_norm_cpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [..., R]."""
    rows, M, R = rows_of(x)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    cpu_library.library(isa).detcompile_layer_norm(
        rows, rows.stride(0), weight, bias, out, eps, M, R,
        *map(cpu_library.dtype_code, (x, weight, bias)), cpu_library.thread_count(),
    )  # fmt: skip
    return out


define(
    "rms_norm(Tensor x, Tensor? weight, float eps, bool round_before_weight) -> Tensor",
    {"x": "float ... R>0", "weight": "float R"},
    cpu=rms_norm_cpu,
    cuda=rms_norm_cuda,
    fake=lambda x, weight, eps, round_before_weight: x.new_empty(x.shape),
)
define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    {"x": "float ... R>0", "weight": "float R", "bias": "float R"},
    cpu=layer_norm_cpu,
    cuda=layer_norm_cuda,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
)


def reference_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the op's value in float64, unrounded."""
    h = x.double()
    n = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    return n if weight is None else n * weight.double()


def reference_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the op's value in float64, unrounded."""
    h = x.double()
    n = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, correction=0, keepdim=True) + eps)
    n = n if weight is None else n * weight.double()
    return n if bias is None else n + bias.double()
