"""exact_linear_all_reduce, exact_expert_linear_all_reduce: products with K cut over ranks, with the bits of one rank.

Legend: M tokens, N output features, K this rank's input features, D digits of the weight, E experts.

    peak = the largest magnitude of a row over all ranks, as an integer
    T    = the sum over all ranks of the exact integers of x [M, K], quantized with that peak, and w [D, N, K]
    out  = (float32(T) * s) * w_scale + bias        each operation rounded once, on every rank

Maxima and sums are of integers, so their order is free and K may be cut anywhere (docs/exact.md). The communication
library adds them. GPUs that map each other's memory instead gather small ones, and each rank adds all of them.
``after`` is not read: it makes every rank run the collective that returned it before this one.
"""

from typing import Literal

import torch
from torch import Tensor

from detcompile.templates.collectives.gather import all_gather_columns
from detcompile.templates.collectives.peer_memory import peer_memory
from detcompile.templates.device.cuda_graphs import is_alone
from detcompile.templates.exact.gpu import expert_totals_cuda, quantize_cuda, totals_cuda
from detcompile.templates.exact.linear import check_digits, expert_totals_cpu, totals_cpu
from detcompile.templates.exact.rows import quantize_cpu
from detcompile.templates.experts.op import require_expert_rows
from detcompile.templates.registration import define
from detcompile.torch_internals.distributed import process_group
from detcompile.torch_internals.operators import c10d

_GATHERED = 1 << 20  # elements of the largest sum that is gathered; a library sends less for larger ones


def linear_all_reduce(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_digits: int,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """Run the op on any device: x [M, K], w [D, N, K], w_scale and bias [N] of whole rows -> [M, N]."""
    check_digits("exact_linear_all_reduce", w, x_digits)
    if is_alone():
        return x.new_zeros((x.shape[0], w.shape[1]))
    peaks = _over_ranks(peaks_of(x)[:, None], "max", group)[:, 0]
    totals = (totals_cuda if x.is_cuda else totals_cpu)(x, peaks, w, x_digits)
    return scaled(_over_ranks(totals, "sum", group), peaks, w_scale, bias, x_digits)


def expert_linear_all_reduce(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_digits: int,
    group: str,
    after: Tensor | None = None,
) -> Tensor:
    """Run the op on any device; operands as in ``linear.expert_linear_cpu``, with this rank's K -> [*ids.shape, N].

    Raises:
        InvalidInput: x's rows do not match the ids, or, on a CPU, an id is outside [0, E].
    """
    check_digits("exact_expert_linear_all_reduce", w, x_digits)
    require_expert_rows(x, ids, ())
    _, E, N, _ = w.shape
    if is_alone():
        return x.new_zeros((*ids.shape, N))
    peaks = _over_ranks(peaks_of(x).view(-1, 1), "max", group)[:, 0]
    if x.is_cuda:
        totals = expert_totals_cuda(x.flatten(0, -2), peaks, ids.flatten(), w, x_digits)
    else:
        totals = expert_totals_cpu(x, peaks, ids, w, x_digits).view(-1, N)
    known = (ids >= 0) & (ids < E)
    expert = torch.where(known, ids, 0)
    peaks = peaks.repeat_interleave(ids.numel() // max(1, len(peaks))).view(ids.shape)
    bias = None if bias is None else bias[expert]
    totals = _over_ranks(totals, "sum", group).view(*ids.shape, N)
    y = scaled(totals, peaks, w_scale[expert], bias, x_digits)
    return torch.where(known[..., None], y, 0.0)


def peaks_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row [..., R] as bits, int32 [...]; NaN is above all."""
    return (x.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1)


def scaled(totals: Tensor, peaks: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int) -> Tensor:
    """Return (float32(T) * s) * w_scale + bias for int64 T [..., N] of rows with these peaks [...]."""
    quantize = quantize_cuda if totals.is_cuda else quantize_cpu
    _, scale = quantize(peaks.view(torch.float32)[..., None], x_digits, False)  # a row of the peak alone has its scale
    y = (totals.to(torch.float32) * scale[..., None]) * w_scale
    return y if bias is None else y + bias


def _over_ranks(x: Tensor, operation: Literal["max", "sum"], group: str) -> Tensor:
    """Return the maxima or sums of integers [M, N] over the ranks."""
    if x.is_cuda and 0 < x.numel() <= _GATHERED and peer_memory(group, x.device) is not None:
        return gathered(x, operation, group)
    reduced: Tensor = c10d.wait_tensor(c10d.all_reduce(x, operation, group))
    return reduced


def gathered(x: Tensor, operation: Literal["max", "sum"], group: str) -> Tensor:
    """Return the maxima or sums of integers [M, N] over the ranks, after gathering all of them on each rank."""
    words, num_ranks = x.view(torch.int32), process_group(group).size()
    every = all_gather_columns(words, group, num_ranks * words.shape[1]).view(x.dtype).view(len(x), num_ranks, -1)
    return every.amax(1) if operation == "max" else every.sum(1)


define(
    "exact_linear_all_reduce(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, int x_digits, str group,"
    " Tensor? after=None) -> Tensor",
    {
        "x": "float32 M K>0",
        "w": "contiguous int8 D N K",
        "w_scale": "contiguous float32 N",
        "bias": "contiguous float32 N",
        "x_digits": range(1, 3),
        "after": "any *",
    },
    cpu=linear_all_reduce,
    cuda=linear_all_reduce,
    fake=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[1])),
)
define(
    "exact_expert_linear_all_reduce(Tensor x, Tensor ids, Tensor w, Tensor w_scale, Tensor? bias, int x_digits,"
    " str group, Tensor? after=None) -> Tensor",
    {
        "x": "float32 * K>0",
        "ids": "int64 ...",
        "w": "contiguous int8 D E N K",
        "w_scale": "contiguous float32 E N",
        "bias": "contiguous float32 E N",
        "x_digits": range(1, 3),
        "after": "any *",
    },
    cpu=expert_linear_all_reduce,
    cuda=expert_linear_all_reduce,
    fake=lambda x, ids, w, *rest: x.new_empty((*ids.shape, w.shape[2])),
)
