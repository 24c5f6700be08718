"""row_sum and row_var_mean: sums and moments over the last dim, in Row order, float32 inside.

Legend: R row length.

    row_sum(x)                  = round(sum of x)
    row_var_mean(x, correction) = (var, mean), both float32, in two passes:
                                  mean = sum of x / R; var = sum of (x - mean)^2 / max(R - correction, 0)

The order is row_order(R, device type, (), x.dtype): it depends on R, and on a GPU on the dtype. Leading dims are
arbitrary; rows may be strided.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define
from detcompile.templates.rows.sums_and_norms_gpu import SQUARE, row_sum_cuda, row_var_mean_cuda


def row_sum_cpu(x: Tensor, out_dtype: torch.dtype | None = None, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [...]."""
    rows, M, R = rows_of(x)
    out = torch.empty(x.shape[:-1], dtype=out_dtype or x.dtype, device="cpu")
    cpu_library.library(isa).detcompile_row_sum(
        rows, rows.stride(0), out, M, R,
        cpu_library.dtype_code(x), cpu_library.dtype_code(out), cpu_library.thread_count(),
    )  # fmt: skip
    return out


def row_var_mean_cpu(x: Tensor, correction: float, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """Run the op on the CPU, x [..., R] -> (var, mean), each [...] float32."""
    rows, M, R = rows_of(x)
    var = torch.empty(x.shape[:-1], dtype=torch.float32, device="cpu")
    mean = torch.empty_like(var)
    cpu_library.library(isa).detcompile_row_var_mean(
        rows, rows.stride(0), var, mean, max(R - correction, 0.0), M, R,
        cpu_library.dtype_code(x), cpu_library.thread_count(),
    )  # fmt: skip
    return var, mean


define(
    "row_sum(Tensor x, ScalarType? out_dtype=None) -> Tensor",
    {"x": "float ... R>0"},
    cpu=row_sum_cpu,
    cuda=row_sum_cuda,
    fake=lambda x, out_dtype=None: x.new_empty(x.shape[:-1], dtype=out_dtype or x.dtype),
)
define(
    "row_var_mean(Tensor x, float correction) -> (Tensor, Tensor)",
    {"x": "float ... R>0"},
    cpu=row_var_mean_cpu,
    cuda=row_var_mean_cuda,
    fake=lambda x, correction: tuple(x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2)),
)


def row_square_sum(x: Tensor) -> Tensor:
    """Return row_sum of the squares of x [..., R] float32, each rounded to float32 -> [...]."""
    assert x.dtype is torch.float32, "on a CPU squares of narrower dtypes would be rounded differently"
    return row_sum_cuda(x, term=SQUARE) if x.is_cuda else row_sum_cpu(x * x)


def rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x [..., R > 0] as [M, R] of unit last stride (a view if the strides allow it), M, and R."""
    R = x.shape[-1]
    M = x.numel() // R
    rows = x if x.dim() == 2 else x.reshape(M, R)
    return (rows if rows.stride(1) == 1 else rows.contiguous()), M, R
