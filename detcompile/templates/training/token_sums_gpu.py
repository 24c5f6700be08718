"""token_matmul, token_sum and token_scatter on the GPU: exact sums, so that tiles, splits and atomics change no bit.

Legend: T rows, N K features, L leaves, BT BN BK tile sizes, V rows of a table, D its width.

A leaf of token_matmul is one fp32 accumulator that walks the rows upwards through ``tl.dot``, as matmul's do; float32
operands take a fresh one each 128 rows. What may change its bits is compared by the gate. The accumulators of a tile's
leaves meet in float64 registers.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.device.cuda_graphs import graph_seconds
from detcompile.templates.device.gate import Gate, bytes_of, heavy_tailed
from detcompile.templates.device.integers import cdiv
from detcompile.templates.device.launcher import launcher
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul.kernels import grouped
from detcompile.templates.training.exactness import limit_of, magic_of
from detcompile.templates.training.token_schedules import TokenProblem, TokenTiles, candidates, reference_schedule

__all__ = [
    "TOKEN_MATMUL",
    "run_token_matmul",
    "token_matmul_cuda",
    "token_problem",
    "token_scatter_cuda",
    "token_sum_cuda",
    "tune_token_matmul",
]

FP32_BLOCK = tl.constexpr(128)
_ROWS_AT_ONCE = 1 << 24  # numbers of token_scatter's float64 copy
_ROWS_A_PROGRAM = 512  # of token_sum


@triton.jit
def on_grid(x, most, GRID: tl.constexpr):
    """fp32 -> float64 multiples of 2^GRID; +inf for magnitudes beyond `most`, NaN for what is not finite."""
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (52 + GRID)
    rounded = (x.to(tl.float64) + MAGIC) - MAGIC
    infinite = (x - x).to(tl.float64) + float("inf")
    return tl.where(tl.abs(x) <= most, rounded, infinite)


@triton.jit
def _step(acc, g_N, x_K, t, end, n_ok, k_ok, g_stride, x_stride, BT: tl.constexpr, TAIL: tl.constexpr):
    """acc + g[t : t + BT]^T @ x[t : t + BT]; with TAIL rows from `end` on are zeros."""
    row = t + tl.arange(0, BT)
    g_ok, x_ok = n_ok[None, :], k_ok[None, :]
    if TAIL:
        g_ok, x_ok = g_ok & (row < end)[:, None], x_ok & (row < end)[:, None]
    at = row.to(tl.int64)[:, None]
    g = tl.load(g_N[None, :] + at * g_stride, mask=g_ok, other=0.0)
    x = tl.load(x_K[None, :] + at * x_stride, mask=x_ok, other=0.0)
    return tl.dot(tl.trans(g), x, acc, input_precision="ieee")


@triton.jit
def _leaf(
    g_N, x_K, start, end, n_ok, k_ok, g_stride, x_stride,
    BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """fp32 sum over rows start..end: [BN, BK]."""
    acc = tl.zeros((BN, BK), tl.float32)
    if BLOCKED:
        for block in range(start, end, FP32_BLOCK):
            part = tl.zeros((BN, BK), tl.float32)
            for t in range(block, tl.minimum(block + FP32_BLOCK, end), BT):
                part = _step(part, g_N, x_K, t, end, n_ok, k_ok, g_stride, x_stride, BT, True)
            acc = acc + part
    else:
        whole = start + (end - start) // BT * BT
        for t in range(start, whole, BT):
            acc = _step(acc, g_N, x_K, t, end, n_ok, k_ok, g_stride, x_stride, BT, False)
        if whole < end:
            acc = _step(acc, g_N, x_K, whole, end, n_ok, k_ok, g_stride, x_stride, BT, True)
    return acc


@triton.jit(do_not_specialize=["L", "rows_a_token"])
def token_matmul_kernel(
    g_ptr, x_ptr, leaves_ptr, out_ptr, L, rows_a_token, N, K, g_stride, x_stride,
    GRID: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
    BLOCKED: tl.constexpr,
):  # fmt: skip
    """One tile of out [N, K] float64, over all leaves."""
    LIMIT: tl.constexpr = 2.0 ** (51 + GRID)
    tile_n, tile_k = grouped(tl.program_id(0), N, K, BN, BK, GROUP)
    n = tile_n * BN + tl.arange(0, BN)
    k = tile_k * BK + tl.arange(0, BK)
    n_ok, k_ok = n < N, k < K
    total = tl.zeros((BN, BK), tl.float64)
    most = LIMIT / L
    start = tl.load(leaves_ptr) * rows_a_token
    for leaf in range(L):
        end = tl.load(leaves_ptr + leaf + 1) * rows_a_token
        acc = _leaf(g_ptr + n, x_ptr + k, start, end, n_ok, k_ok, g_stride, x_stride, BN, BK, BT, BLOCKED)
        total += on_grid(acc, most, GRID)
        start = end
    pointers = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(pointers, total, mask=n_ok[:, None] & k_ok[None, :])


@triton.jit(do_not_specialize=["T"])
def token_sum_kernel(
    g_ptr, sums_ptr, magnitudes_ptr, T, N, g_stride,
    GRID: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of up to ROWS rows (axis 1) of BC columns (axis 0): [programs, N] float64."""
    LIMIT: tl.constexpr = 2.0 ** (51 + GRID)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * ROWS
    sums, magnitudes = tl.zeros((BC,), tl.float64), tl.zeros((BC,), tl.float64)
    for start in range(first, tl.minimum(first + ROWS, T), BR):
        row = start + tl.arange(0, BR)
        ok = (row < T)[:, None] & (column < N)[None, :]
        g = tl.load(g_ptr + row.to(tl.int64)[:, None] * g_stride + column[None, :], mask=ok, other=0.0)
        rounded = on_grid(g.to(tl.float32), LIMIT, GRID)
        sums += tl.sum(rounded, 0)  # exact, so that its order is no matter
        magnitudes += tl.sum(tl.abs(rounded), 0)
    at = tl.program_id(1) * N + column
    tl.store(sums_ptr + at, sums, mask=column < N)
    tl.store(magnitudes_ptr + at, magnitudes, mask=column < N)


def token_matmul_cuda(g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1, grid: int = -44) -> Tensor:
    """g [T, N], x [T, K], leaves [L + 1] int32 -> [N, K] float64. Leaves are taken as they are, without a look at them.

    Raises:
        ScheduleError: during CUDA graph capture, if no launch of this problem came before it.
    """
    g, x = _unit_rows(g), _unit_rows(x)
    if len(leaves) == 1 or g.shape[1] == 0 or x.shape[1] == 0:
        return g.new_zeros((g.shape[1], x.shape[1]), dtype=torch.float64)
    schedule = TOKEN_MATMUL.schedule(token_problem(g, x, grid), g.device)
    return run_token_matmul(schedule, g, x, leaves, rows_a_token, grid)


def run_token_matmul(
    schedule: TokenTiles, g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1, grid: int = -44
) -> Tensor:
    """The op under one schedule, gate or no gate: for tests, the gate itself and benchmarks."""
    g, x = _unit_rows(g), _unit_rows(x)
    N, K = g.shape[1], x.shape[1]
    out = torch.empty((N, K), dtype=torch.float64, device=g.device)
    programs = cdiv(N, schedule.block_n) * cdiv(K, schedule.block_k)
    launcher(token_matmul_kernel)[(programs,)](
        g, x, leaves, out, len(leaves) - 1, rows_a_token, N, K, g.stride(0), x.stride(0), GRID=grid,
        BN=schedule.block_n, BK=schedule.block_k, BT=schedule.block_t, GROUP=schedule.group,
        BLOCKED=g.dtype is torch.float32, num_warps=schedule.warps, num_stages=schedule.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def token_sum_cuda(g: Tensor, grid: int = -44) -> Tensor:
    """g [T, N] -> [N] float64."""
    g = _unit_rows(g)
    T, N = g.shape
    if T == 0 or N == 0:
        return g.new_zeros(N, dtype=torch.float64)
    parts = cdiv(T, _ROWS_A_PROGRAM)
    sums, magnitudes = (torch.empty((parts, N), dtype=torch.float64, device=g.device) for _ in range(2))
    launcher(token_sum_kernel)[(cdiv(N, 64), parts)](
        g, sums, magnitudes, T, N, g.stride(0), GRID=grid, ROWS=_ROWS_A_PROGRAM, BR=32, BC=64, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    total = sums.sum(0)
    return total.where((magnitudes.sum(0) <= limit_of(grid)) | total.isnan(), float("inf"))


def token_scatter_cuda(g: Tensor, ids: Tensor, num_rows: int, grid: int = -44) -> Tensor:
    """g [T, D], ids [T] -> [V, D] float64. A row of the table is +inf where its rows' largest magnitudes add up to more
    than the limit."""
    out = g.new_zeros((num_rows, g.shape[1]), dtype=torch.float64)
    bounds = g.new_zeros(num_rows, dtype=torch.float64)
    magic, limit, ids = magic_of(grid), limit_of(grid), ids.long()
    step = max(1, _ROWS_AT_ONCE // max(1, g.shape[1]))
    for start in range(0, len(g), step):
        rows = g[start : start + step].double()
        finite = rows.where(rows.isfinite(), float("nan"))
        on_grid = (finite + magic) - magic
        out.index_add_(0, ids[start : start + step], on_grid)
        bounds.index_add_(0, ids[start : start + step], rows.nan_to_num(0.0, 0.0, 0.0).abs().amax(1))
    return torch.where(((bounds <= limit)[:, None]) | out.isnan(), out, float("inf"))


@functools.lru_cache(4096)  # launches wait for the host
def _problem(dtype: torch.dtype, n: int, k: int, grid: int, aligned: bool) -> TokenProblem:
    return TokenProblem(dtype=str(dtype).removeprefix("torch."), n=n, k=k, grid=grid, aligned=aligned)


def token_problem(g: Tensor, x: Tensor, grid: int = -44) -> TokenProblem:
    """What the schedule of a launch may depend on; no number of rows is part of it."""
    aligned = all(rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0 for rows in (g, x))
    return _problem(g.dtype, g.shape[1], x.shape[1], grid, aligned)


def probe_bits(problem: TokenProblem, device: torch.device) -> Callable[[TokenTiles], bytes]:
    """The gate's probe: what a schedule makes of leaves of many lengths, among rows that are in none."""
    generator = torch.Generator(device).manual_seed(22)
    lengths = (3, 1, 130, 64, 0, 257, 512, 1024)
    leaves = torch.tensor([2, *(2 + sum(lengths[: i + 1]) for i in range(len(lengths)))], dtype=torch.int32)
    T, dtype = int(leaves[-1]) + 3, getattr(torch, problem.dtype)

    def draw(width: int) -> Tensor:
        width = min(width, 320 + width % 16)
        rows = heavy_tailed(T, width, generator=generator, spread=0.5) * 0.02
        if not problem.aligned:
            rows = torch.nn.functional.pad(rows, (0, 1 + width % 2))[:, :width]
        return rows.to(dtype)

    g, x, given = draw(problem.n), draw(problem.k), leaves.to(device)
    return lambda schedule: bytes_of(run_token_matmul(schedule, g, x, given, 1, problem.grid))


TOKEN_MATMUL = Gate(
    family="token_matmul",
    sources=(__file__, matmul_kernels.__file__),
    reference=reference_schedule,
    candidates=candidates,
    probe=probe_bits,
)


def tune_token_matmul(problem: TokenProblem, device: torch.device, T: int, leaf: int = 1024) -> TokenTiles:
    """Times every admitted schedule on T rows in leaves of ``leaf``; later launches of the problem take the winner."""
    dtype = getattr(torch, problem.dtype)
    g, x = (torch.randn(T, width, device=device).to(dtype) * 0.02 for width in (problem.n, problem.k))
    leaves = torch.tensor([*range(0, T, leaf), T], dtype=torch.int32, device=device)

    def seconds(schedule: TokenTiles) -> float:
        return graph_seconds([functools.partial(run_token_matmul, schedule, g, x, leaves, 1, problem.grid)] * 2)

    return TOKEN_MATMUL.tune(problem, device, seconds)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
