"""token_matmul, token_sum and token_scatter on the GPU: exact sums, so tiles, splits and atomics change no bit.

Legend: T rows, N K features, L leaves, BT BN BK tile sizes, V rows of a table, D its width.

A leaf of token_matmul is one fp32 accumulator over ascending rows through ``tl.dot``, as in matmul; float32 operands
start a new accumulator every 128 rows. The gate compares everything that may change a leaf's bits. A leaf's magnitude
may be at most 2^(45 + grid); otherwise that row of the gradient is +inf within a whole tile.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile.templates.attention.operands import unit_rows
from detcompile.templates.device.cuda_graphs import graph_seconds
from detcompile.templates.device.gate import Gate, bytes_of, heavy_tailed
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.matmul import hopper_tile
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.training import token_hopper, token_kernels
from detcompile.templates.training.token_schedules import TokenProblem, TokenTiles, candidates, reference_schedule

_ROWS_A_PROGRAM = 512  # for token_sum
_KERNELS = (token_kernels, token_hopper, matmul_kernels, hopper_tile)


def token_matmul_cuda(g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1, grid: int = -44) -> Tensor:
    """Run g [T, N], x [T, K], leaves [L + 1] int32 -> [N, K] float64. Leaves are not checked.

    Raises:
        ScheduleError: during CUDA graph capture, if this problem was never launched before.
    """
    g, x = unit_rows(g), unit_rows(x)
    if len(leaves) == 1 or g.shape[1] == 0 or x.shape[1] == 0:
        return g.new_zeros((g.shape[1], x.shape[1]), dtype=torch.float64)
    schedule = TOKEN_MATMUL.schedule(token_problem(g, x, grid), g.device)
    return run_token_matmul(schedule, g, x, leaves, rows_a_token, grid)


def run_token_matmul(
    schedule: TokenTiles, g: Tensor, x: Tensor, leaves: Tensor, rows_a_token: int = 1, grid: int = -44
) -> Tensor:
    """Run the op under one schedule without asking the gate: for tests, the gate itself and benchmarks."""
    g, x = unit_rows(g), unit_rows(x)
    N, K = g.shape[1], x.shape[1]
    out = torch.empty((N, K), dtype=torch.float64, device=g.device)
    kinds = {"GRID": grid, "UPPER_BITS": _bits(46 + grid), "LOWER_BITS": _bits(23 + grid)}
    if schedule.hopper:
        token_hopper.launch(schedule, g, x, leaves, out, rows_a_token, kinds)
        return out
    programs = cdiv(N, schedule.block_n) * cdiv(K, schedule.block_k)
    operands: tuple[Tensor | TensorDescriptor, ...] = g, x
    if schedule.tma:
        widths = (schedule.block_n, schedule.block_k)
        operands = tuple(TensorDescriptor.from_tensor(r, [schedule.block_t, w]) for r, w in zip((g, x), widths))
    launcher(token_kernels.token_matmul_kernel)[(programs,)](
        *operands, leaves, out, len(leaves) - 1, rows_a_token, N, K, g.stride(0), x.stride(0), **kinds,
        BN=schedule.block_n, BK=schedule.block_k, BT=schedule.block_t, GROUP=schedule.group,
        BLOCKED=g.dtype is torch.float32, TMA=schedule.tma, ON_GPU=g.is_cuda, num_warps=schedule.warps,
        num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _bits(exponent: int) -> int:
    """Return the bits of 1.5 * 2^exponent in float32."""
    return (127 + exponent) << 23 | 1 << 22


def token_sum_cuda(g: Tensor, grid: int = -44) -> Tensor:
    """Run g [T, N] -> [N] float64."""
    g = unit_rows(g)
    T, N = g.shape
    if T == 0 or N == 0:
        return g.new_zeros(N, dtype=torch.float64)
    parts = cdiv(T, _ROWS_A_PROGRAM)
    sums, magnitudes = (torch.empty((parts, N), dtype=torch.float64, device=g.device) for _ in range(2))
    launcher(token_kernels.token_sum_kernel)[(cdiv(N, 128), parts)](
        g, sums, magnitudes, T, N, g.stride(0), GRID=grid, ROWS=_ROWS_A_PROGRAM, BR=8, BC=128, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty(N, dtype=torch.float64, device=g.device)
    launcher(token_kernels.token_total_kernel)[(cdiv(N, 16),)](
        sums, magnitudes, out, parts, N, GRID=grid, BR=64, BC=16, num_warps=4, enable_fp_fusion=False
    )
    return out


def token_scatter_cuda(g: Tensor, ids: Tensor, num_rows: int, grid: int = -44) -> Tensor:
    """Run g [T, D], ids [T] in [0, V) -> [V, D] float64."""
    g, (T, D) = unit_rows(g), g.shape
    out = g.new_zeros((num_rows, D), dtype=torch.float64)
    if T and D:
        ascending, order = ids.long().sort()
        ends = torch.searchsorted(ascending, ascending, right=True)
        launcher(token_kernels.token_scatter_kernel)[(T, cdiv(D, 512))](
            g, ascending, order, ends, out, D, g.stride(0), GRID=grid, BR=4, BC=512, num_warps=8, enable_fp_fusion=False
        )
    return out


@functools.lru_cache(4096)  # the GPU waits for the host's launches
def _problem(dtype: torch.dtype, n: int, k: int, grid: int, aligned: bool, hopper: bool) -> TokenProblem:
    return TokenProblem(dtype=str(dtype).removeprefix("torch."), n=n, k=k, grid=grid, aligned=aligned, hopper=hopper)


def token_problem(g: Tensor, x: Tensor, grid: int = -44) -> TokenProblem:
    """Return the problem of a launch; it does not contain a number of rows."""
    aligned = all(rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0 for rows in (g, x))
    hopper = aligned and token_hopper.supports(g.device, g.dtype)
    return _problem(g.dtype, g.shape[1], x.shape[1], grid, aligned, hopper)


def probe_bits(problem: TokenProblem, device: torch.device) -> Callable[[TokenTiles], bytes]:
    """Return the gate's probe: the bytes of a schedule for leaves of many lengths, with rows between them."""
    generator = torch.Generator(device).manual_seed(22)
    lengths = (3, 1, 130, 64, 0, 257, 512, 1024)
    ends = [2 + sum(lengths[: i + 1]) for i in range(len(lengths))]
    leaves = torch.tensor([2, *ends], dtype=torch.int32, device="cpu")
    T, dtype = int(leaves[-1]) + 3, getattr(torch, problem.dtype)

    def draw(width: int) -> Tensor:
        width = min(width, 320 + width % 16)
        rows = heavy_tailed(T, width, generator=generator, spread=0.5) * 0.02
        if not problem.aligned:
            rows = torch.nn.functional.pad(rows, (0, 1 + width % 2))[:, :width]
        return rows.to(dtype)

    g, x, table = draw(problem.n), draw(problem.k), leaves.to(device)
    return lambda schedule: bytes_of(run_token_matmul(schedule, g, x, table, 1, problem.grid))


TOKEN_MATMUL = Gate(
    family="token_matmul",
    sources=(__file__, *(module.__file__ for module in _KERNELS)),
    reference=reference_schedule,
    candidates=candidates,
    probe=probe_bits,
)


def tune_token_matmul(problem: TokenProblem, device: torch.device, T: int, leaf: int = 1024) -> TokenTiles:
    """Time every admitted schedule on T rows in leaves of ``leaf``; later launches of the problem use the fastest."""
    dtype = getattr(torch, problem.dtype)
    g, x = (torch.randn(T, width, device=device).to(dtype) * 0.02 for width in (problem.n, problem.k))
    leaves = torch.tensor([*range(0, T, leaf), T], dtype=torch.int32, device=device)

    def seconds(schedule: TokenTiles) -> float:
        return graph_seconds([functools.partial(run_token_matmul, schedule, g, x, leaves, 1, problem.grid)] * 2)

    return TOKEN_MATMUL.tune(problem, device, seconds)
