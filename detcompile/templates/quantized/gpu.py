"""dequant_matmul on the GPU: launches a schedule that passed the gate, chosen by the token count.

Legend: M tokens, N output features, K summed features. The reference is the definition itself: weights dequantized in
memory (`expand`), then the matmul template. A fused schedule is admitted only if its bytes are equal.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from detcompile.errors import ScheduleError
from detcompile.templates.device import dependent_launch, primitives
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import Buckets, Gate, bytes_of, heavy_tailed
from detcompile.templates.matmul import gpu as matmul_gpu
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul import launch as matmul_launch
from detcompile.templates.matmul import tree as matmul_tree
from detcompile.templates.matmul.candidates import reference_schedule
from detcompile.templates.matmul.tree import LEVELS, tree_options
from detcompile.templates.quantized import dequantize, int4_decode
from detcompile.templates.quantized import kernels as dequant_kernels
from detcompile.templates.quantized.schedules import (
    EXPAND,
    DequantProblem,
    DequantSchedule,
    Expand,
    Fused,
    Int4Decode,
    dequant_candidates,
    fits_int4_decode,
)
from detcompile.templates.quantized.weights import KINDS, NIBBLE_BLOCK, QuantizedWeight, pack_nibbles

_BUCKETS = Buckets(16, 4096)


def dequant_matmul_cuda(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int],
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x [M, K], weight [N, K], bias [N], residual [M, N] -> [M, N] in out_dtype (default x.dtype).

    Raises:
        NumericsError: K does not split into prod(radices) leaves.
        ScheduleError: during CUDA graph capture, if this problem was never launched before.
    """
    radices = tuple(radix for radix in radices if radix > 1)
    if len(x) == 0 or len(weight.w) == 0:
        return x.new_empty((len(x), len(weight.w)), dtype=out_dtype or x.dtype)
    problem = dequant_problem(x, weight, bias, residual, radices, out_dtype or x.dtype)
    return run_dequant(DEQUANT.schedule(problem, x.device), x, weight, bias, residual, radices, out_dtype)


def run_dequant(
    schedule: DequantSchedule,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    radices: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the op under one schedule without asking the gate: for tests, the gate itself and benchmarks.

    Raises:
        ScheduleError: the schedule does not support this weight, dtype or tree.
    """
    if isinstance(schedule, Expand):
        w = expanded(weight, x.dtype)
        return matmul_gpu.matmul_cuda(x, w, bias, residual, radices, out_dtype)
    radices = tuple(radix for radix in radices if radix > 1)
    _require_fit(schedule, x, weight, radices)
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty((len(x), len(weight.w)), dtype=out_dtype or x.dtype)
    if schedule.split and radices:
        partials = out.new_empty((math.prod(radices), *out.shape), dtype=torch.float32)
        _launch(schedule, x, weight, None, None, radices, partials)
        matmul_launch.sum_partials_cuda(partials, bias, residual, radices, out)
    else:
        _launch(schedule, x, weight, bias, residual, radices, out)
    return out


def expanded(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return dequantized(weight, dtype), the same bytes, from one kernel."""
    w, scales, offsets = _contiguous(weight)
    N, K = len(w), weight.k
    out = torch.empty((N, K), dtype=dtype, device=w.device)
    block_n = 32
    dequantize.expand_kernel[(triton.cdiv(K, NIBBLE_BLOCK), triton.cdiv(N, block_n))](
        w, scales, scales if offsets is None else offsets, out, N, K, w.stride(0), scales.stride(0),
        BN=block_n, num_warps=4, enable_fp_fusion=False, **_format(weight), **launch_options(w.device),
    )  # fmt: skip
    return out


def dequant_problem(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out_dtype: torch.dtype,
) -> DequantProblem:
    """Return the problem of a launch; it contains the token count only as a power-of-two bucket."""
    M, K = x.shape
    return DequantProblem(
        dtype=matmul_gpu.dtype_name(x.dtype),
        w_dtype=matmul_gpu.dtype_name(weight.w.dtype),
        s_dtype=matmul_gpu.dtype_name(weight.scales.dtype),
        zeros=weight.zeros is not None,
        mins=None if weight.mins is None else matmul_gpu.dtype_name(weight.mins.dtype),
        n=len(weight.w),
        k=K,
        group=weight.group,
        rows=weight.rows,
        radices=radices,
        order=matmul_gpu.order_name(K, x.dtype, radices),
        epilogue=(
            matmul_gpu.dtype_name(out_dtype),
            matmul_gpu.dtype_name_of(bias),
            matmul_gpu.dtype_name_of(residual),
        ),
        bucket=_BUCKETS.of(M),
        narrow=_is_narrow(weight, x.dtype),
    )


def probe_dequant(problem: DequantProblem, device: torch.device) -> Callable[[DequantSchedule], bytes]:
    """Return the gate's probe: bytes of the unrounded sums and of the epilogue's output under a schedule.

    It uses the problem's K and groups. M and N end inside a tile, so that masks are probed too: one token in a tile of
    eight, which int4_decode.py copies differently. N keeps its remainder modulo 16, on which the compiler specializes.
    """
    generator = torch.Generator(device).manual_seed(22)
    M, N = min(problem.bucket, 128) + 9, min(problem.n, 336 + problem.n % 16)
    rows = min(problem.rows, N)

    def draw(*shape: int) -> Tensor:
        return heavy_tailed(*shape, generator=generator)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    shape = (-(-problem.k // problem.group), -(-N // rows))
    if problem.w_dtype == "uint8":
        w = pack_nibbles(whole(0, 16, N, problem.k))
    elif problem.w_dtype == "int8":
        w = whole(-128, 128, N, problem.k).to(torch.int8)
    else:
        w = draw(N, problem.k).clamp(-448, 448).to(torch.float8_e4m3fn)
    zeros = whole(0, 16, *shape).to(torch.int16) if problem.zeros else None
    scales = (0.02 * draw(*shape)).to(getattr(torch, problem.s_dtype))
    mins = None if problem.mins is None else draw(*shape).to(getattr(torch, problem.mins))
    weight = QuantizedWeight(w, scales, zeros, mins, problem.k, problem.group, rows)
    dtype = getattr(torch, problem.dtype)
    x = draw(M, problem.k).to(dtype)
    out_name, *added = problem.epilogue
    bias, residual = (
        None if name is None else draw(*size).to(getattr(torch, name)) for name, size in zip(added, ((N,), (M, N)))
    )

    def bits(schedule: DequantSchedule) -> bytes:
        run = functools.partial(_run_probed, schedule, x, weight, problem.radices)
        sums, out = run(None, None, torch.float32), run(bias, residual, getattr(torch, out_name))
        return bytes_of(sums, out)

    return bits


_KERNELS = (dequant_kernels, dequantize, int4_decode, matmul_kernels, matmul_tree, primitives)
_MODULES = (*_KERNELS, matmul_launch, dependent_launch)
DEQUANT = Gate(
    family="dequant",
    sources=(*(module.__file__ for module in _MODULES), __file__),
    reference=lambda problem: EXPAND,
    candidates=dequant_candidates,
    probe=probe_dequant,
    buckets=_BUCKETS,
)


def _require_fit(schedule: Fused | Int4Decode, x: Tensor, weight: QuantizedWeight, radices: tuple[int, ...]) -> None:
    leaf_k = weight.k // math.prod(radices)
    if isinstance(schedule, Int4Decode):
        fits = fits_int4_decode(schedule, weight.group, weight.rows, len(weight.w), leaf_k)
        if not (fits and _is_narrow(weight, x.dtype)) or (radices and not schedule.split):
            raise ScheduleError(
                f"dequant_matmul: {schedule} needs nibbles on a GPU, one scale of x's dtype per group of {NIBBLE_BLOCK}"
                f" k, multiples of 16 features and of {schedule.block_k} k, and no tree within a program"
            )
        return
    step = _step(schedule, x.dtype)
    several = weight.bits == 4 and step > NIBBLE_BLOCK
    if len(radices) > LEVELS or ((radices or several) and leaf_k % step):
        raise ScheduleError(f"dequant_matmul: {schedule} needs whole steps of {step} k and at most {LEVELS} levels")
    if several and weight.group % NIBBLE_BLOCK:
        raise ScheduleError(f"dequant_matmul: {schedule} needs groups of {NIBBLE_BLOCK} k, not {weight.group}")
    if x.dtype is torch.float32 and x.is_cuda:
        # Triton would add to the sum inside a product, which breaks the order of blocks
        raise ScheduleError(f"dequant_matmul: {schedule} needs 16-bit activations on a GPU, not float32")


def _step(schedule: Fused | Int4Decode, dtype: torch.dtype) -> int:
    return NIBBLE_BLOCK if dtype is torch.float32 else schedule.block_k


def _launch(
    schedule: Fused | Int4Decode,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out: Tensor,  # [M, N], or one float32 partial per leaf before them
) -> None:
    M, N = out.shape[-2:]
    leaves = math.prod(radices)
    leaf_k, step = weight.k // leaves, _step(schedule, x.dtype)
    split = out.dim() == 3
    w, scales, offsets = parts = _contiguous(weight)
    if isinstance(schedule, Int4Decode):
        int4_decode.launch(schedule, x, parts, weight.group, bias, residual, out, leaf_k)
        return
    tiles = triton.cdiv(M, schedule.block_m) * triton.cdiv(N, schedule.block_n)
    dequant_kernels.dequant_kernel[(tiles, leaves if split else 1)](
        x, w, scales, scales if offsets is None else offsets, out, out if bias is None else bias,
        out if residual is None else residual, M, N, leaf_k, leaves, *x.stride(), w.stride(0),
        scales.stride(0), 0 if residual is None else residual.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, SPLIT=split,
        **tree_options(() if split else radices),
        BM=schedule.block_m, BN=schedule.block_n, BK=step, GROUP=schedule.group, BLOCKED=x.dtype is torch.float32,
        EVEN_K=leaf_k % step == 0, NARROW=_is_narrow(weight, x.dtype), num_warps=schedule.warps,
        num_stages=schedule.stages, enable_fp_fusion=False, **_format(weight), **launch_options(x.device),
    )  # fmt: skip


def _run_probed(
    schedule: DequantSchedule,
    x: Tensor,
    weight: QuantizedWeight,
    radices: tuple[int, ...],
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if not isinstance(schedule, Expand):
        return run_dequant(schedule, x, weight, bias, residual, radices, out_dtype)
    w = expanded(weight, x.dtype)
    at = matmul_gpu.gemm_problem(x, w, bias, residual, radices, x.new_empty(1, len(w), dtype=out_dtype))
    return matmul_launch.run_schedule(reference_schedule(at), x, w, bias, residual, radices, out_dtype)


def _contiguous(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    offsets = weight.zeros if weight.mins is None else weight.mins
    return weight.w.contiguous(), weight.scales.contiguous(), None if offsets is None else offsets.contiguous()


def _format(weight: QuantizedWeight) -> dict[str, int | bool]:
    return {
        "KIND": KINDS[weight.w.dtype],
        "GROUP_K": weight.group,
        "ROWS": weight.rows,
        "OFFSET": int(weight.zeros is not None) if weight.mins is None else dequantize.MINS.value,
        "ON_GPU": weight.w.is_cuda,
    }


def _is_narrow(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True if a single 16-bit product equals the definition; a scale serves 64 k, because scales are loaded by row."""
    halves = weight.w.is_cuda and weight.bits == 4 and weight.group % 64 == 0 and weight.mins is None
    return halves and dtype in (torch.float16, torch.bfloat16) and weight.scales.dtype is dtype
