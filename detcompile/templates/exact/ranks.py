"""exact_linear_all_reduce: exact_linear with K cut over the ranks of a group; the bits of one rank. See docs/exact.md.

Legend: M tokens, N output features, K this rank's input features, D digits of the weight.

    peak = the largest magnitude of a row over all ranks, as an integer
    T    = the sum over all ranks of the exact integers of x [M, K], quantized with that peak, and w [D, N, K]
    out  = (float32(T) * s) * w_scale + bias        each operation rounded once, on every rank

Maxima and sums are of integers, so a communication library may take them in any order, and K may be cut anywhere.
"""

import torch
from torch import Tensor

from detcompile.templates.device.cuda_graphs import is_alone
from detcompile.templates.exact.gpu import quantize_cuda, totals_cuda
from detcompile.templates.exact.linear import check_digits, totals_cpu
from detcompile.templates.exact.rows import quantize_cpu
from detcompile.templates.registration import define
from detcompile.torch_internals.operators import c10d


def linear_all_reduce(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int, group: str) -> Tensor:
    """Run the op on any device: x [M, K], w [D, N, K], w_scale and bias [N] of whole rows -> [M, N]."""
    check_digits("exact_linear_all_reduce", w, x_digits)
    if is_alone():
        return x.new_zeros((x.shape[0], w.shape[1]))
    peaks = _over_ranks(peaks_of(x), "max", group)
    totals = (totals_cuda if x.is_cuda else totals_cpu)(x, peaks, w, x_digits)
    return scaled(_over_ranks(totals, "sum", group), peaks, w_scale, bias, x_digits)


def peaks_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row [..., R] as bits, int32 [...]; NaN is above all."""
    return (x.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1)


def scaled(totals: Tensor, peaks: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int) -> Tensor:
    """Return (float32(T) * s) * w_scale + bias for int64 T [..., N] of rows with these peaks [...]."""
    quantize = quantize_cuda if totals.is_cuda else quantize_cpu
    _, scale = quantize(peaks.view(torch.float32)[..., None], x_digits, False)  # of a row that is the peak alone
    y = (totals.to(torch.float32) * scale[..., None]) * w_scale
    return y if bias is None else y + bias


def _over_ranks(x: Tensor, operation: str, group: str) -> Tensor:
    reduced: Tensor = c10d.wait_tensor(c10d.all_reduce(x, operation, group))
    return reduced


define(
    "exact_linear_all_reduce(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, int x_digits, str group) -> Tensor",
    {
        "x": "float32 M K>0",
        "w": "contiguous int8 D N K",
        "w_scale": "contiguous float32 N",
        "bias": "contiguous float32 N",
        "x_digits": range(1, 3),
    },
    cpu=linear_all_reduce,
    cuda=linear_all_reduce,
    fake=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[1])),
)
