"""expert_matmul: out[m] = x[m] @ w[ids[m]]^T (+ bias[ids[m]]), every element summed as matmul sums it.

Legend: M rows (a token and one of its experts), E experts, N output features, K input features.

Rows are taken expert by expert, ids ascending, in as many products as there are experts with rows; none is dropped. The
order of a product knows nothing of its rows (templates/matmul.py), so a row's bits depend on itself and on its expert's
weights alone. The id E stands for no expert: such a row is zeros. On a GPU there is no kernel yet.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.matmul import matmul_cpu

__all__ = ["expert_matmul_cpu", "reference_expert_matmul"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "expert_matmul(Tensor x, Tensor ids, Tensor w, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def expert_matmul_cpu(x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None, isa: str | None = None) -> Tensor:
    """The op on the CPU, x [M, K], ids [M] int64, w [E, N, K] of unit stride along N or K, bias [E, N] -> [M, N].

    Raises:
        InvalidInput: shapes or dtypes that do not fit together, or an id outside [0, E].
    """
    _check(x, ids, w, bias)
    num_experts, N = w.shape[:2]
    rows_of = torch.argsort(ids, stable=True)
    rows = x[rows_of]
    products = rows.new_zeros(len(ids), N)
    start = 0
    for expert, count in enumerate(torch.bincount(ids, minlength=num_experts + 1)[:num_experts].tolist()):
        if count:
            own = slice(start, start + count)
            of_expert = None if bias is None else bias[expert]
            products[own] = matmul_cpu(rows[own], w[expert], of_expert, None, (), isa=isa)
            start += count
    return torch.empty_like(products).index_copy_(0, rows_of, products)


_LIBRARY.impl("expert_matmul", expert_matmul_cpu, "CPU")


@torch.library.register_fake("detcompile::expert_matmul", lib=_LIBRARY)
def _(x, ids, w, bias):
    return x.new_empty((x.shape[0], w.shape[1]))


def reference_expert_matmul(x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op's value in float64, unrounded."""
    y = (w.double()[ids] @ x.double()[:, :, None])[:, :, 0]
    return y if bias is None else y + bias.double()[ids]


def _check(x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2] or ids.shape != x.shape[:1]:
        raise InvalidInput(
            f"detcompile::expert_matmul: x {tuple(x.shape)}, ids {tuple(ids.shape)} and w {tuple(w.shape)} must be "
            "[M, K], [M] and [E, N, K]. Repeat a token for each of its experts."
        )
    if x.dtype != w.dtype or ids.dtype != torch.int64:
        raise InvalidInput(
            f"detcompile::expert_matmul: x is {x.dtype}, w is {w.dtype} and ids are {ids.dtype}. The op multiplies "
            "equal dtypes and takes int64 ids: convert one."
        )
    if bias is not None and bias.shape != w.shape[:2]:
        raise InvalidInput(
            f"detcompile::expert_matmul: bias {tuple(bias.shape)} must be [E, N] = {tuple(w.shape[:2])}. Reshape it."
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= w.shape[0]:
        raise InvalidInput(
            f"detcompile::expert_matmul: ids from {int(ids.min())} to {int(ids.max())} for {w.shape[0]} experts. The "
            "router has to choose among the experts (or give their number, for none)."
        )
