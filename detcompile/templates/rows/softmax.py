"""softmax, log_softmax and logsumexp over the last dim: float32 inside, the sum of exponentials in Row order.

Legend: R row length, m the row's maximum, s = sum of exp(x - m) in row_order(R, device type, radices, x.dtype).

    softmax     = round(exp(x - m) / s)
    log_softmax = round((x - m) - log(s))
    logsumexp   = m + log(s), float32

The exponential and the logarithm are the template's. For a 16-bit softmax a GPU uses its approximations of 2^x and of
1 / s: relative errors of 2^-22, of (m - x) 2^-23 from the rounded exponent of 2, and of 2^-23 are small compared to the
rounding; an exponential below 2^-126 is 0. Entries may be -inf. As in torch, a row of only -inf gives NaN, and
logsumexp -inf. Radices split a row into leaves of ceil(R / leaves) elements, for a vocabulary sharded over ranks. On a
GPU each leaf or chunk is summed relative to its own maximum, and the sums are then scaled to the row's maximum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define
from detcompile.templates.rows.softmax_gpu import log_softmax_cuda, logsumexp_cuda, softmax_cuda
from detcompile.templates.rows.sums import rows_of

_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}  # enum Kind of softmax.cpp


def softmax_cpu(
    x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int] | None, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [..., R] of out_dtype (default x.dtype)."""
    return _launch("softmax", x, torch.empty(x.shape, dtype=out_dtype or x.dtype, device="cpu"), radices, isa)


def log_softmax_cpu(
    x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int] | None, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [..., R] of out_dtype (default x.dtype)."""
    return _launch("log_softmax", x, torch.empty(x.shape, dtype=out_dtype or x.dtype, device="cpu"), radices, isa)


def logsumexp_cpu(x: Tensor, radices: Sequence[int] | None, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., R] -> [...] float32."""
    return _launch("logsumexp", x, torch.empty(x.shape[:-1], dtype=torch.float32, device="cpu"), radices, isa)


def _fake(x, out_dtype, radices):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


define(
    "softmax(Tensor x, ScalarType? out_dtype, int[] radices) -> Tensor",
    {"x": "float ... R>0"},
    cpu=softmax_cpu,
    cuda=softmax_cuda,
    fake=_fake,
)
define(
    "log_softmax(Tensor x, ScalarType? out_dtype, int[] radices) -> Tensor",
    {"x": "float ... R>0"},
    cpu=log_softmax_cpu,
    cuda=log_softmax_cuda,
    fake=_fake,
)
define(
    "logsumexp(Tensor x, int[] radices) -> Tensor",
    {"x": "float ... R>0"},
    cpu=logsumexp_cpu,
    cuda=logsumexp_cuda,
    fake=lambda x, radices: x.new_empty(x.shape[:-1], dtype=torch.float32),
)


def _launch(kind: str, x: Tensor, out: Tensor, radices: Sequence[int] | None, isa: str | None) -> Tensor:
    rows, M, R = rows_of(x)
    radices = radices or ()  # AOTInductor passes None for an empty list
    cpu_library.library(isa).detcompile_softmax(
        _KINDS[kind], rows, rows.stride(0), out, M, R, cpu_library.radices_array(tuple(radices)), len(radices),
        cpu_library.dtype_code(x), cpu_library.dtype_code(out), cpu_library.thread_count(),
    )  # fmt: skip
    return out
