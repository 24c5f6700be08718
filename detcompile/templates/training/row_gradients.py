"""Gradients of rms_norm, layer_norm and softmax over the last dim: float32 inside, sums in Row order.

Legend: R row length, n the normed row before its weight, s its scale, gw = g * weight.

    rms_norm:   dx = round((gw - n * (sum of gw * n / R)) * s)
    layer_norm: dx = round(((gw - sum of gw / R) - n * (sum of gw * n / R)) * s)
    softmax:    dx = round(y * (g - sum of g * y))

weight_rows [..., R] float32 are g times what met the weight: round(n) with round_before_weight, else n. A weight's
gradient is their token_sum, and a bias's the token_sum of g. Rounding is to x.dtype and has the derivative 1. The order
is row_order(R, device type, (), dtype) of the rows' dtype.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.training.row_gradients_gpu import (
    layer_norm_backward_cuda,
    rms_norm_backward_cuda,
    softmax_backward_cuda,
)

__all__ = ["layer_norm_backward_cpu", "rms_norm_backward_cpu", "softmax_backward_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    "rms_norm_backward(Tensor g, Tensor x, Tensor? weight, float eps, bool round_before_weight) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define("layer_norm_backward(Tensor g, Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define("softmax_backward(Tensor g, Tensor y, ScalarType dtype) -> Tensor", tags=_TAGS)


def rms_norm_backward_cpu(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """The op on the CPU, g and x [..., R] of one dtype -> dx and weight_rows [..., R].

    Raises:
        InvalidInput: rows without elements, operands that do not fit together, or a dtype without an order.
    """
    g, x, weight, dx, rows = _prepared("rms_norm_backward", g, x, weight)
    cpu_library.library(isa).detcompile_rms_norm_backward(
        g.data_ptr(), x.data_ptr(), None if weight is None else weight.data_ptr(), dx.data_ptr(), rows.data_ptr(),
        eps, round_before_weight, x.numel() // x.shape[-1], x.shape[-1],
        cpu_library.dtype_code(x), cpu_library.dtype_code(weight), cpu_library.thread_count(),
    )  # fmt: skip
    return dx, rows


def layer_norm_backward_cpu(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """The op on the CPU, g and x [..., R] of one dtype -> dx and weight_rows [..., R].

    Raises:
        InvalidInput: rows without elements, operands that do not fit together, or a dtype without an order.
    """
    g, x, weight, dx, rows = _prepared("layer_norm_backward", g, x, weight)
    cpu_library.library(isa).detcompile_layer_norm_backward(
        g.data_ptr(), x.data_ptr(), None if weight is None else weight.data_ptr(), dx.data_ptr(), rows.data_ptr(),
        eps, x.numel() // x.shape[-1], x.shape[-1],
        cpu_library.dtype_code(x), cpu_library.dtype_code(weight), cpu_library.thread_count(),
    )  # fmt: skip
    return dx, rows


def softmax_backward_cpu(g: Tensor, y: Tensor, dtype: torch.dtype, isa: str | None = None) -> Tensor:
    """The op on the CPU, g and the softmax y [..., R] of one dtype -> dx [..., R] of ``dtype``.

    Raises:
        InvalidInput: rows without elements, operands that do not fit together, or a dtype without an order.
    """
    g, y, _, dx, _ = _prepared("softmax_backward", g, y, None, dtype)
    cpu_library.library(isa).detcompile_softmax_backward(
        g.data_ptr(), y.data_ptr(), dx.data_ptr(), y.numel() // y.shape[-1], y.shape[-1],
        cpu_library.dtype_code(y), cpu_library.dtype_code(dx), cpu_library.thread_count(),
    )  # fmt: skip
    return dx


def _rms_norm_backward_cuda(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    _check("rms_norm_backward", g, x, weight)
    return rms_norm_backward_cuda(g, x, weight, eps, round_before_weight)


def _layer_norm_backward_cuda(g: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check("layer_norm_backward", g, x, weight)
    return layer_norm_backward_cuda(g, x, weight, eps)


def _softmax_backward_cuda(g: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    _check("softmax_backward", g, y, None)
    return softmax_backward_cuda(g, y, dtype)


_LIBRARY.impl("rms_norm_backward", rms_norm_backward_cpu, "CPU")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward_cuda, "CUDA")
_LIBRARY.impl("layer_norm_backward", layer_norm_backward_cpu, "CPU")
_LIBRARY.impl("layer_norm_backward", _layer_norm_backward_cuda, "CUDA")
_LIBRARY.impl("softmax_backward", softmax_backward_cpu, "CPU")
_LIBRARY.impl("softmax_backward", _softmax_backward_cuda, "CUDA")


@torch.library.register_fake("detcompile::rms_norm_backward", lib=_LIBRARY)
def _(g, x, weight, eps, round_before_weight):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)


@torch.library.register_fake("detcompile::layer_norm_backward", lib=_LIBRARY)
def _(g, x, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)


@torch.library.register_fake("detcompile::softmax_backward", lib=_LIBRARY)
def _(g, y, dtype):
    return y.new_empty(y.shape, dtype=dtype)


def _prepared(
    op: str, g: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """g, x and the weight as the library takes them, and where dx and weight_rows will be."""
    _check(op, g, x, weight)
    weight = None if weight is None else weight.contiguous()
    dx = torch.empty(x.shape, dtype=dtype or x.dtype, device="cpu")
    return g.contiguous(), x.contiguous(), weight, dx, torch.empty(x.shape, dtype=torch.float32, device="cpu")


def _check(op: str, g: Tensor, x: Tensor, weight: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or g.shape != x.shape or g.dtype != x.dtype:
        raise InvalidInput(
            f"detcompile::{op}: the gradient {g.dtype} {tuple(g.shape)} and the rows {x.dtype} {tuple(x.shape)} must "
            "be [..., R > 0] of one dtype."
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        R = x.shape[-1]
        raise InvalidInput(f"detcompile::{op}: weight {tuple(weight.shape)} must be [R] = ({R},). Reshape it.")
