"""token_matmul, token_sum and token_scatter: gradients of weights, as exact sums over tokens.

Legend: T rows, N K features, L leaves, V rows of a table, D its width.

    token_matmul(g [T, N], x [T, K], leaves [L + 1])  ->  [N, K]   sum over rows of g[t, n] x[t, k]
    token_sum(g [T, N])                               ->  [N]      sum over rows of g[t, n]
    token_scatter(g [T, D], ids [T], V)               ->  [V, D]   sum over the rows of each id

Each in float64, in the order Exact: a leaf is a float32 sum, rounded once to a multiple of 2^grid (to nearest even),
and multiples are added exactly. The result does not depend on the grouping of leaves into calls or their order; results
of calls may be added in float64 in any order.

A leaf of token_matmul is rows leaves[i] to leaves[i + 1] (times rows_a_token), a float32 chain in the matmul_order of
their number; rows outside all leaves are not read. In the other operations each row is a leaf. Elements beyond
exactness are +inf, and those with a nonfinite term are NaN: see training.exactness.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import COARSEST_GRID, FINEST_GRID
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.op import pack_call
from detcompile.templates.registration import define
from detcompile.templates.training.exactness import limit_of, magic_of
from detcompile.templates.training.token_sums_gpu import token_matmul_cuda, token_scatter_cuda, token_sum_cuda

GRID = -44  # the default of Numerics.token_grid


def token_matmul_cpu(
    g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1, grid: int = GRID, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU, g [T, N], x [T, K], leaves [L + 1] int32 -> [N, K] float64.

    Raises:
        InvalidInput: leaves do not ascend within the rows.
    """
    out = torch.empty((g.shape[1], x.shape[1]), dtype=torch.float64, device="cpu")
    g_NT, x_KT, leaves = g.t().contiguous(), x.contiguous().t(), leaves.contiguous()
    nowhere = torch.empty(0, dtype=torch.float32, device="cpu")  # the kernel allocates a leaf's product itself
    call = pack_call(g_NT, x_KT, None, None, nowhere, ())
    bad = cpu_library.library(isa).detcompile_token_matmul(
        call, leaves, len(leaves) - 1, rows_a_token, magic_of(grid), limit_of(grid), out
    )
    if bad >= 0:
        raise InvalidInput(
            f"detcompile::token_matmul: leaf {bad}, rows {leaves[bad]} to {leaves[bad + 1]} (times {rows_a_token}), is "
            f"not an ascending range within {g.shape[0]} rows. Use leaves from training.packing.leaf_table."
        )
    return out


def token_sum_cpu(g: Tensor, grid: int = GRID, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, g [T, N] -> [N] float64."""
    g = g if g.stride(1) == 1 else g.contiguous()
    out = torch.empty(g.shape[1], dtype=torch.float64, device="cpu")
    cpu_library.library(isa).detcompile_token_sum(
        g, g.stride(0), out, *g.shape, magic_of(grid), limit_of(grid),
        cpu_library.dtype_code(g), cpu_library.thread_count(),
    )  # fmt: skip
    return out


def token_scatter_cpu(g: Tensor, ids: Tensor, num_rows: int, grid: int = GRID, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, g [T, D], ids [T] integers -> [V, D] float64.

    Raises:
        InvalidInput: an id is outside [0, V).
    """
    g = g if g.stride(1) == 1 else g.contiguous()
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty((num_rows, g.shape[1]), dtype=torch.float64, device="cpu")
    bad = cpu_library.library(isa).detcompile_token_scatter(
        g, g.stride(0), ids, out, g.shape[0], num_rows, g.shape[1],
        magic_of(grid), limit_of(grid), cpu_library.dtype_code(g), cpu_library.thread_count(),
    )  # fmt: skip
    if bad >= 0:
        raise InvalidInput(
            f"detcompile::token_scatter: id {int(ids[bad])} at row {bad} is outside the table's [0, {num_rows}). Check "
            "that the tokenizer belongs to this model."
        )
    return out


_GRID_RANGE = range(FINEST_GRID, COARSEST_GRID + 1)


define(
    f"token_matmul(Tensor g, Tensor x, Tensor leaves, int rows_a_token=1, int grid={GRID}) -> Tensor",
    {
        "g": "float T N",
        "x": "g T K",
        "leaves": "int32 L+1",
        "rows_a_token": range(1, 2**31),
        "grid": _GRID_RANGE,
    },
    cpu=token_matmul_cpu,
    cuda=token_matmul_cuda,
    fake=lambda g, x, *rest: g.new_empty((g.shape[1], x.shape[1]), dtype=torch.float64),
)
define(
    f"token_sum(Tensor g, int grid={GRID}) -> Tensor",
    {"g": "float T N", "grid": _GRID_RANGE},
    cpu=token_sum_cpu,
    cuda=token_sum_cuda,
    fake=lambda g, *rest: g.new_empty((g.shape[1],), dtype=torch.float64),
)
define(
    f"token_scatter(Tensor g, Tensor ids, int num_rows, int grid={GRID}) -> Tensor",
    {"g": "float T D", "ids": "integer T", "num_rows": range(2**31), "grid": _GRID_RANGE},
    cpu=token_scatter_cpu,
    cuda=token_scatter_cuda,
    fake=lambda g, ids, num_rows, *rest: g.new_empty((num_rows, g.shape[1]), dtype=torch.float64),
)


def reference_token_matmul(g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1) -> Tensor:
    """Return the op's value in float64, without a grid."""
    rows = slice(int(leaves[0]) * rows_a_token, int(leaves[-1]) * rows_a_token)
    return g[rows].double().t() @ x[rows].double()
