"""matmul on the GPU: launches a schedule that passed the gate, chosen by the token count.

Legend: M tokens, N output features, K summed features. The order is `numerics.matmul_order(K, dtype, radices)`. The
schedules are in candidates.py, their kernels in kernels.py.
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
from detcompile.templates.matmul import batched_leaves, gate_gpu, hopper_tile, ring, tree
from detcompile.templates.matmul import hopper as matmul_hopper
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul import launch as matmul_launch
from detcompile.templates.matmul.candidates import candidates, reference_schedule
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.launch import launch, run_schedule
from detcompile.templates.matmul.operands import operands_of
from detcompile.templates.matmul.schedules import GemmProblem, GemmSchedule, HopperTiles, PointerTiles, RingTiles

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
    """Multiply x [M, K], w [N, K], bias [N], residual [M, N] -> [M, N] in out_dtype (default x.dtype).

    Args:
        out: [M, N], contiguous, receives the result in its dtype.

    Raises:
        NumericsError: K does not split into prod(radices) leaves.
        ScheduleError: during CUDA graph capture, if this problem was never launched before.
    """
    # AOTInductor passes None for an empty list
    operands = operands_of(x, w, bias, residual, tuple(radices or ()), out_dtype or x.dtype, out)
    M, N = operands.out.shape
    if M == 0 or N == 0:
        return operands.out
    problem = gemm_problem(operands.x, operands.w, operands.bias, operands.residual, operands.radices, operands.out)
    launch(MATMUL.schedule(problem, x.device), operands)
    return operands.out


def gated_matmul_cuda(x: Tensor, w: Tensor) -> Tensor:
    """Compute silu_mul of x [M, K] and w [2 F, K], the gate's features stacked above up's -> [M, F] in their dtype.

    Raises:
        ScheduleError: as ``matmul_cuda``.
    """
    if x.shape[0] == 0 or w.shape[0] == 0:
        return x.new_empty((x.shape[0], w.shape[0] // 2))
    return run_gated(MATMUL.schedule(gated_problem(x, w), x.device), x, w)


def run_gated(schedule: GemmSchedule, x: Tensor, w: Tensor) -> Tensor:
    """Run ``gated_matmul_cuda`` under one schedule; in one launch if the schedule is gated."""
    if isinstance(schedule, (PointerTiles, HopperTiles, RingTiles)) and schedule.gated:
        operands = operands_of(x, w, None, None, (), x.dtype)
        operands = replace(operands, out=x.new_empty((x.shape[0], w.shape[0] // 2)))
        launch(schedule, operands)
        return operands.out
    gate, up = run_schedule(schedule, x, w).chunk(2, dim=1)
    return silu_mul_cuda(gate, up)


def tune_matmul(problem: GemmProblem, device: torch.device) -> GemmSchedule:
    """Time every admitted schedule at M = problem.bucket, with cold weights; later launches use the fastest."""
    return MATMUL.tune(problem, device, _clock(problem, device))


def gemm_problem(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out: Tensor,
    gated: bool = False,
) -> GemmProblem:
    """Return the problem of a launch; it contains the token count only as a power-of-two bucket."""
    M, K = x.shape
    aligned = _tma_ready(x) and _tma_ready(w if w.stride(1) == 1 else w.t())
    hopper = aligned and w.stride(1) == 1 and matmul_hopper.supports(x.device, x.dtype)
    dtypes = (out.dtype, *(None if t is None else t.dtype for t in (bias, residual)))
    return _problem(x.dtype, w.shape[0], K, radices, w.stride(1) == 1, aligned, hopper, dtypes, _BUCKETS.of(M), gated)


@functools.lru_cache(4096)  # during prefill the GPU waits for the host
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
    """Return the problem of a ``gated_matmul_cuda`` launch; see ``gemm_problem``."""
    return gemm_problem(x, w, None, None, (), x, gated=True)


def probe_bits(problem: GemmProblem, device: torch.device) -> Callable[[GemmSchedule], bytes]:
    """Return the gate's probe: bytes of the unrounded accumulators and of the epilogue's output under a schedule.

    It uses heavy-tailed data with the problem's K and layout. M and N end inside a tile, so that masks are probed too.
    N (for a gate half of N) keeps its remainder modulo 16, on which the compiler specializes.
    """
    generator = torch.Generator(device).manual_seed(20)
    M = min(problem.bucket, 256) + 5
    gates = 2 if problem.gated else 1
    N = min(problem.n, gates * (336 // gates // 16 * 16 + problem.n // gates % 16))

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return heavy_tailed(*shape, generator=generator).to(dtype)

    dtype = _dtype(problem.dtype)
    x, w = draw(M, problem.k, dtype=dtype), draw(N, problem.k, dtype=dtype)
    if not problem.aligned:  # a row stride that descriptors do not support
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


_KERNELS = (matmul_kernels, matmul_hopper, hopper_tile, ring, batched_leaves, gate_gpu, tree, primitives)
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
    """Return a matmul's order as text, for a problem's name."""
    return str(matmul_order(k, dtype, radices))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_name_of(tensor: Tensor | None) -> str | None:
    """Return the name of a tensor's dtype, or None without a tensor."""
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
    """True if a descriptor can read the rows: unit stride, and rows aligned to 16 bytes."""
    size = rows.element_size()
    return rows.stride(1) == 1 and rows.data_ptr() % 16 == 0 and rows.stride(0) * size % 16 == 0


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
