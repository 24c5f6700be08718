"""exact_linear: rows quantized, times a quantized weight in exact integers, scaled; see docs/exact.md.

Legend: M tokens, N output features, K input features, D digits of the weight.

    q, s = exact_quantize(x, x_digits, left)
    T    = the exact integers of q [x_digits, M, K] and w [D, N, K]; low digit times low digit is left out
    out  = (float32(T) * s) * w_scale + bias        each operation rounded once
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.exact.gpu import linear_cuda
from detcompile.templates.registration import define


def linear_cpu(
    x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU: x [M, K], w [D, N, K], w_scale [N], bias [N] -> [M, N]."""
    _check(w, x_digits)
    x = x.contiguous()
    D, N, K = w.shape
    out = torch.empty((len(x), N), dtype=torch.float32, device="cpu")
    cpu_library.library(isa).detcompile_exact_linear(
        x.data_ptr(), w.data_ptr(), w_scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        len(x), N, K, x_digits, D, cpu_library.thread_count(),
    )  # fmt: skip
    return out


def _linear_cuda(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int) -> Tensor:
    _check(w, x_digits)
    return linear_cuda(x, w, w_scale, bias, x_digits)


def _check(w: Tensor, x_digits: int) -> None:
    if not 1 <= len(w) <= x_digits:
        raise InvalidInput(
            f"detcompile::exact_linear: w has {len(w)} digits; with x_digits={x_digits} it must have 1 to {x_digits}"
        )


define(
    "exact_linear(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, int x_digits) -> Tensor",
    {
        "x": "float32 M K>0",
        "w": "contiguous int8 D N K",
        "w_scale": "contiguous float32 N",
        "bias": "contiguous float32 N",
        "x_digits": range(1, 3),
    },
    cpu=linear_cpu,
    cuda=_linear_cuda,
    fake=lambda x, w, w_scale, bias, x_digits: x.new_empty((x.shape[0], w.shape[1])),
)
