"""expert_matmul: out[t, c] = x[t] @ w[ids[t, c]]^T (+ bias[ids[t, c]]), every element summed like matmul's.

Legend: T tokens, C experts chosen by each, E experts, N output features, K input features; M = T * C rows.

    expert_matmul_partial(x, ids, w, radices, tp) -> float32: one rank's subtree of Tree(K, ...), without a bias

Rows are processed expert by expert, ids ascending; none is dropped. A product's order, including its tree with radices,
does not depend on its rows (templates/matmul/op.py), so a row's bits depend only on the row and its expert's weights.
The id E means no expert: such a row is zeros. On a GPU this holds for every id outside [0, E), because the host never
reads them (gpu.py).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import matmul_order
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.experts.gpu import expert_matmul_cuda
from detcompile.templates.matmul.op import pack_call
from detcompile.templates.registration import define


def expert_matmul_cpu(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    bias: Tensor | None,
    radices: Sequence[int] | None = (),
    out_dtype: torch.dtype | None = None,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU.

    x [T, K] or [T, C, K], ids [T, C] int64, w [E, N, K] of unit stride along N or K, bias [E, N] -> [T, C, N] in
    out_dtype (default x.dtype). The choices of a token share its row of x, or have one each; C may be omitted.

    Raises:
        InvalidInput: x's rows do not match the ids, or an id is outside [0, E].
        NumericsError: K does not split into prod(radices) leaves.
    """
    radices = tuple(radices or ())  # AOTInductor passes None for an empty list
    require_expert_rows(x, ids, radices)
    num_experts, N = w.shape[:2]
    require_expert_ids(ids, num_experts)
    if w.stride(2) != 1 and w.stride(1) != 1:
        w = w.contiguous()
    flat = ids.flatten()
    rows_of = torch.argsort(flat, stable=True)
    rows = x.flatten(0, -2)
    choices = max(1, len(flat) // max(1, len(rows)))
    rows = rows[rows_of // choices]
    counts = torch.bincount(flat, minlength=num_experts + 1)
    products = rows.new_empty((len(flat), N), dtype=out_dtype or x.dtype)
    products[len(flat) - int(counts[num_experts]) :] = 0
    bias = None if bias is None else bias.contiguous()
    if num_experts:
        call = pack_call(rows, w[0], None if bias is None else bias[0], None, products, radices)
        cpu_library.library(isa).detcompile_expert_matmul(call, counts, num_experts, w.stride(0))
    return torch.empty_like(products).index_copy_(0, rows_of, products).view(*ids.shape, N)


def _expert_matmul_cuda(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    bias: Tensor | None,
    radices: Sequence[int] | None = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    radices = tuple(radices or ())
    require_expert_rows(x, ids, radices)
    return expert_matmul_cuda(x, ids, w, bias, radices, out_dtype)


define(
    "expert_matmul(Tensor x, Tensor ids, Tensor w, Tensor? bias, int[] radices=[]) -> Tensor",
    {"x": "float * K", "ids": "int64 ...", "w": "x E N K", "bias": "float E N"},
    cpu=expert_matmul_cpu,
    cuda=_expert_matmul_cuda,
    fake=lambda x, ids, w, *rest: x.new_empty((*ids.shape, w.shape[1])),
)
define(
    "expert_matmul_partial(Tensor x, Tensor ids, Tensor w, int[] radices, int tp) -> Tensor",
    {"x": "float * K", "ids": "int64 ...", "w": "x E N K", "tp": range(1, 2**31)},
    cpu=lambda x, ids, w, radices, tp: expert_matmul_cpu(x, ids, w, None, radices, torch.float32),
    cuda=lambda x, ids, w, radices, tp: _expert_matmul_cuda(x, ids, w, None, radices, torch.float32),
    fake=lambda x, ids, w, *rest: x.new_empty((*ids.shape, w.shape[1]), dtype=torch.float32),
)


def reference_expert_matmul(x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the op's value in float64, unrounded."""
    rows = x.double() if x.dim() > ids.dim() else x.double()[:, None].expand(*ids.shape, -1)
    y = (w.double()[ids] @ rows[..., None])[..., 0]
    return y if bias is None else y + bias.double()[ids]


def require_expert_ids(ids: Tensor, num_experts: int) -> None:
    """Reject ids outside [0, E]. The host reads them, so this is for CPUs."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) <= num_experts:
        raise InvalidInput(
            f"detcompile::expert_matmul: ids from {int(ids.min())} to {int(ids.max())} for {num_experts} experts. The "
            "router must choose among the experts (or pass their number, for none)."
        )


def require_expert_rows(x: Tensor, ids: Tensor, radices: tuple[int, ...]) -> None:
    """Reject rows of x that do not fit the ids, and a K that does not split into leaves."""
    if ids.dim() == 0 or x.shape[:-1] not in (ids.shape, ids.shape[:1]):
        raise InvalidInput(
            f"detcompile::expert_matmul: x {tuple(x.shape)} must be [T, K] or [T, C, K] for ids [T, C] = "
            f"{tuple(ids.shape)}. Flatten the tokens."
        )
    if x.shape[-1] % math.prod(radices):
        matmul_order(x.shape[-1], x.dtype, radices)  # raises, with the tp_sizes that fit
