"""matmul on the GPU: picks a schedule for the token count at launch, among those whose bits passed the gate.

Legend: M tokens, N output features, K summed features. The order is `numerics.matmul_order(K, dtype, radices)`; which
schedules exist is in candidates.py, how they compute in kernels.py.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from detcompile.orders.numerics import matmul_order
from detcompile.templates.device import dependent_launch, primitives
from detcompile.templates.device.cuda_graphs import graph_seconds
from detcompile.templates.device.gate import Buckets, Gate, bytes_of, heavy_tailed
from detcompile.templates.matmul import batched_leaves, gate_gpu, hopper_tile, tree
from detcompile.templates.matmul import hopper as matmul_hopper
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul import launch as matmul_launch
from detcompile.templates.matmul.candidates import candidates, reference_schedule
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.launch import launch, run_schedule
from detcompile.templates.matmul.operands import operands_of
from detcompile.templates.matmul.schedules import GemmProblem, GemmSchedule, HopperTiles, PointerTiles

__all__ = [
    "MATMUL",
    "dtype_name",
    "dtype_name_of",
    "gated_matmul_cuda",
    "gated_problem",
    "gemm_problem",
    "matmul_cuda",
    "order_name",
    "probe_bits",
    "run_gated",
    "tune_matmul",
]

_BUCKETS = Buckets(8, 4096)


def matmul_cuda(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int] | None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], w [N, K], bias [N], residual [M, N] -> [M, N] in out_dtype (default x.dtype).

    Args:
        out: [M, N], contiguous, where the result shall be; its dtype is the result's.

    Raises:
        NumericsError: K does not split into prod(radices) leaves.
        ScheduleError: during CUDA graph capture, if no launch of this problem came before it.
    """
    # AOTInductor hands None where the graph has an empty list
    operands = operands_of(x, w, bias, residual, tuple(radices or ()), out_dtype or x.dtype, out)
    M, N = operands.out.shape
    if M == 0 or N == 0:
        return operands.out
    problem = gemm_problem(operands.x, operands.w, operands.bias, operands.residual, operands.radices, operands.out)
    launch(MATMUL.schedule(problem, x.device), operands)
    return operands.out


def gated_matmul_cuda(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K], w [2 F, K], a gate's features and then as many that it lets through -> [M, F] in their dtype.

    Raises:
        ScheduleError: as ``matmul_cuda``.
    """
    if x.shape[0] == 0 or w.shape[0] == 0:
        return x.new_empty((x.shape[0], w.shape[0] // 2))
    return run_gated(MATMUL.schedule(gated_problem(x, w), x.device), x, w)


def run_gated(schedule: GemmSchedule, x: Tensor, w: Tensor) -> Tensor:
    """``gated_matmul_cuda`` under one schedule, in one launch if it is gated itself."""
    if isinstance(schedule, (PointerTiles, HopperTiles)) and schedule.gated:
        operands = operands_of(x, w, None, None, (), x.dtype)
        operands = replace(operands, out=x.new_empty((x.shape[0], w.shape[0] // 2)))
        launch(schedule, operands)
        return operands.out
    gate, up = run_schedule(schedule, x, w).chunk(2, dim=1)
    return silu_mul_cuda(gate, up)


def tune_matmul(
    problem: GemmProblem, device: torch.device, seconds: Callable[[GemmSchedule], float] | None = None
) -> GemmSchedule:
    """Times every admitted schedule at M = problem.bucket, over weights past the L2; later launches take the winner."""
    return MATMUL.tune(problem, device, seconds or _clock(problem, device))


def gemm_problem(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out: Tensor,
    gated: bool = False,
) -> GemmProblem:
    """What a launch's schedule may depend on; the token count only through its power-of-two bucket."""
    M, K = x.shape
    aligned = _tma_ready(x) and _tma_ready(w if w.stride(1) == 1 else w.t())
    hopper = aligned and w.stride(1) == 1 and matmul_hopper.supports(x.device, x.dtype)
    dtypes = (out.dtype, *(None if t is None else t.dtype for t in (bias, residual)))
    return _problem(x.dtype, w.shape[0], K, radices, w.stride(1) == 1, aligned, hopper, dtypes, _BUCKETS.of(M), gated)


@functools.lru_cache(4096)  # a prompt's launches wait for the host
def _problem(
    dtype: torch.dtype,
    n: int,
    k: int,
    radices: tuple[int, ...],
    w_nk: bool,
    aligned: bool,
    hopper: bool,
    dtypes: tuple[torch.dtype | None, ...],
    bucket: int,
    gated: bool,
) -> GemmProblem:
    out, bias, residual = (None if each is None else dtype_name(each) for each in dtypes)
    assert out is not None
    return GemmProblem(
        dtype=dtype_name(dtype),
        n=n,
        k=k,
        radices=radices,
        order=order_name(k, dtype, radices),
        w_nk=w_nk,
        aligned=aligned,
        hopper=hopper,
        epilogue=(out, bias, residual),
        bucket=bucket,
        gated=gated,
    )


def gated_problem(x: Tensor, w: Tensor) -> GemmProblem:
    """The problem of ``gated_matmul_cuda``, as ``gemm_problem`` is that of ``matmul_cuda``."""
    return gemm_problem(x, w, None, None, (), x, gated=True)


def probe_bits(problem: GemmProblem, device: torch.device) -> Callable[[GemmSchedule], bytes]:
    """The gate's probe: bytes of the unrounded accumulators and of the epilogue's output under a schedule.

    Heavy-tailed data over the problem's own K and layout; M and N end inside a tile, so that masks are probed too. N,
    or of a gate half of it, keeps its remainder by 16, for which the compiler specialises.
    """
    generator = torch.Generator(device).manual_seed(20)
    M = min(problem.bucket, 256) + 5
    gates = 2 if problem.gated else 1
    N = min(problem.n, gates * (336 // gates // 16 * 16 + problem.n // gates % 16))

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return heavy_tailed(*shape, generator=generator).to(dtype)

    dtype = _dtype(problem.dtype)
    x, w = draw(M, problem.k, dtype=dtype), draw(N, problem.k, dtype=dtype)
    if not problem.aligned:  # any row stride that no descriptor takes
        x = torch.nn.functional.pad(x, (0, 1))[:, : problem.k]
    if not problem.w_nk:
        w = w.t().contiguous().t()
    out_dtype, bias_dtype, residual_dtype = problem.epilogue
    bias = draw(N, dtype=_dtype(bias_dtype)) if bias_dtype else None
    residual = draw(M, N, dtype=_dtype(residual_dtype)) if residual_dtype else None

    def bits(schedule: GemmSchedule) -> bytes:
        if problem.gated:
            return bytes_of(run_gated(schedule, x, w))
        unrounded = run_schedule(schedule, x, w, radices=problem.radices, out_dtype=torch.float32)
        finished = run_schedule(schedule, x, w, bias, residual, problem.radices, _dtype(out_dtype))
        return bytes_of(unrounded, finished)

    return bits


_KERNELS = (matmul_kernels, matmul_hopper, hopper_tile, batched_leaves, gate_gpu, tree, primitives)
_MODULES = (*_KERNELS, dependent_launch, matmul_launch)
MATMUL = Gate(
    family="matmul",
    sources=(*(module.__file__ for module in _MODULES), __file__),
    reference=reference_schedule,
    candidates=candidates,
    probe=probe_bits,
    buckets=_BUCKETS,
)


@functools.cache
def order_name(k: int, dtype: torch.dtype, radices: tuple[int, ...]) -> str:
    """The order of a matmul's sums as text, for the name of a problem."""
    return str(matmul_order(k, dtype, radices))


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_name_of(tensor: Tensor | None) -> str | None:
    """The name of a tensor's dtype; None of no tensor."""
    return None if tensor is None else dtype_name(tensor.dtype)


def _clock(problem: GemmProblem, device: torch.device) -> Callable[[GemmSchedule], float]:
    dtype = _dtype(problem.dtype)
    copies = max(2, math.ceil(3e8 / (problem.n * problem.k * dtype.itemsize)))
    x = torch.randn(problem.bucket, problem.k, device=device).to(dtype)
    ws = [torch.randn(problem.n, problem.k, device=device).to(dtype) for _ in range(copies)]
    if not problem.w_nk:
        ws = [w.t().contiguous().t() for w in ws]
    out_dtype = _dtype(problem.epilogue[0])

    def seconds(schedule: GemmSchedule) -> float:
        run: Callable[..., Tensor] = functools.partial(
            run_schedule, schedule, x, radices=problem.radices, out_dtype=out_dtype
        )
        if problem.gated:
            run = functools.partial(run_gated, schedule, x)
        return graph_seconds([functools.partial(run, w=w) for w in ws])

    return seconds


def _tma_ready(rows: Tensor) -> bool:
    """A descriptor wants unit stride along a row, and rows that start at multiples of 16 bytes."""
    size = rows.element_size()
    return rows.stride(1) == 1 and rows.data_ptr() % 16 == 0 and rows.stride(0) * size % 16 == 0


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
