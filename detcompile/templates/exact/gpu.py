"""Functions, rows and exact_linear of docs/exact.md on the GPU, in plain Triton.

Legend: M rows, R row length, K input features, N output features; P planes of digits.

Sums of products are integers, so threads, tiles and splits change no bit. Triton passes a size of 1 as a constant
without the method ``to``; tl.cast takes both.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.config import int8_tensor_cores
from detcompile.errors import ScheduleError
from detcompile.templates.device import dependent_launch
from detcompile.templates.device.dependent_launch import (
    fetch_rows_ahead,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.gate import Gate, bytes_of
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.exact import functions, hopper
from detcompile.templates.exact.functions import (
    POISON,
    bf16,
    bits,
    dot,
    from_bits,
    function,
    near,
    one_over,
    power_of_two,
)
from detcompile.templates.matmul import hopper_tile

_BLOCK = 1024
_MOST_PARTS = 8  # of a row
_AHEAD_BYTES = 16 << 20  # of weights that are fetched into L2 while the previous kernel finishes
_LONGEST = tl.constexpr(65536)  # terms of an int32 sum of products


@triton.jit
def _function_kernel(x_ptr, out_ptr, count, NAME: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    tl.store(out_ptr + i, function(x, NAME), mask=i < count)


def function_cuda(x: Tensor, name: str) -> Tensor:
    """Return the function of each element of x."""
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    if count:
        launcher(_function_kernel)[(cdiv(count, _BLOCK),)](
            x, out, count, NAME=name, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False, **launch_options(x.device)
        )
    return out


@triton.jit
def _divide_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    y = tl.load(y_ptr + i, mask=i < count, other=1.0)
    tl.store(out_ptr + i, tl.div_rn(x, y), mask=i < count)


def divide_cuda(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y for contiguous tensors of one shape."""
    out, count = torch.empty_like(x), x.numel()
    if count:
        launcher(_divide_kernel)[(cdiv(count, _BLOCK),)](
            x, y, out, count, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def rms_factors(x, R, eps):
    """Factors of the RMSNorm of rows x [.., BLOCK], R numbers and then zeros: 2^(21 - e), 1 / rms, and not poisoned.

    e is the exponent of the row's largest magnitude.
    """
    peak = tl.max(bits(x) & 0x7FFFFFFF, len(x.shape) - 1, keep_dims=True)
    whole = peak < POISON
    p = power_of_two(148 - tl.minimum(tl.maximum(peak >> 23, 87), 254))
    n = near(tl.where(whole, x, 0.0) * p, 1.0).to(tl.int64)
    squares = tl.sum(n * n, len(x.shape) - 1, keep_dims=True).to(tl.float32)
    return p, one_over(tl.sqrt_rn(tl.div_rn(squares, tl.cast(R, tl.float32)) + (eps * p) * p)), whole


@triton.jit
def normalized(x, weight, factors):
    p, reciprocal, whole = factors
    return tl.where(whole, (tl.where(whole, x, 0.0) * p * reciprocal) * weight, float("nan"))


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, R, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * R + i, mask=i < R, other=0.0)
    weight = tl.load(weight_ptr + i, mask=i < R, other=0.0)
    tl.store(out_ptr + row * R + i, normalized(x, weight, rms_factors(x, R, eps)), mask=i < R)


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run the op on the GPU, x [..., R], weight [R] -> [..., R]."""
    x, weight = x.contiguous(), weight.contiguous()
    out, R = torch.empty_like(x), x.shape[-1]
    if x.numel():
        launcher(_rms_norm_kernel)[(x.numel() // R,)](
            x, weight, out, R, eps, BLOCK=next_power_of_2(R), num_warps=_warps(R), enable_fp_fusion=False,
            **launch_options(x.device),
        )  # fmt: skip
    return out


@triton.jit
def _sum_kernel(x_ptr, out_ptr, M, R, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + m * R, mask=m < M, other=0.0)
    for i in range(1, R):
        total = total + tl.load(x_ptr + m * R + i, mask=m < M, other=0.0)
    tl.store(out_ptr + m, total, mask=m < M)


def sum_cuda(x: Tensor) -> Tensor:
    """Return the sums [...] of rows x [..., R], each from its first element to its last."""
    x, R = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        M = x.numel() // R
        launcher(_sum_kernel)[(cdiv(M, 64),)](x, out, M, R, BLOCK=64, num_warps=1, enable_fp_fusion=False)
    return out


@triton.jit
def _layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, R, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * R + i, mask=i < R, other=0.0)
    peak = tl.max(bits(x) & 0x7FFFFFFF, 0)
    whole = peak < POISON
    p = power_of_two(147 - tl.minimum(tl.maximum(peak >> 23, 87), 254))  # 2^(20 - e), e the exponent of the peak
    u, count = tl.where(whole, x, 0.0) * p, tl.cast(R, tl.float32)
    mean = tl.div_rn(tl.sum(near(u, 1.0).to(tl.int64), 0).to(tl.float32), count)
    d = tl.where(i < R, u - mean, 0.0)
    n = near(d, 1.0).to(tl.int64)
    variance = tl.div_rn(tl.sum(n * n, 0).to(tl.float32), count)
    y = (d * one_over(tl.sqrt_rn(variance + (eps * p) * p))) * tl.load(weight_ptr + i, mask=i < R, other=0.0)
    y = y + tl.load(bias_ptr + i, mask=i < R, other=0.0)
    tl.store(out_ptr + row * R + i, tl.where(whole, y, float("nan")), mask=i < R)


def layer_norm_cuda(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Run the op on the GPU, x [..., R], weight and bias [R] -> [..., R]."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out, R = torch.empty_like(x), x.shape[-1]
    if x.numel():
        launcher(_layer_norm_kernel)[(x.numel() // R,)](
            x, weight, bias, out, R, eps, BLOCK=next_power_of_2(R), num_warps=_warps(R), enable_fp_fusion=False
        )
    return out


@triton.jit
def quantized(x, peak, unit, TWO: tl.constexpr):
    """High digits, low digits (only if TWO) and scales of rows x. peak: their largest magnitudes, as bits."""
    whole = peak < POISON
    a = tl.where(whole, tl.maximum(from_bits(tl.where(whole, peak, 0)), 8.673617379884035e-19), 1.0)
    v = near(tl.where(whole, x, 0.0), tl.div_rn(32512.0 if TWO else 127.0, a))
    scale = tl.where(whole, tl.div_rn(a, unit), float("nan"))
    return ((v + 128) >> 8 if TWO else v).to(tl.int8), v.to(tl.int8), scale


@triton.jit
def _quantize_kernel(
    x_ptr, up_ptr, norm_ptr, peaks_ptr, digits_ptr, scale_ptr, plane, R, x_pitch, up_pitch, unit, eps,
    GATE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_PEAKS: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize a row of x, of GATE(x) * up, or of the norm; x_pitch and up_pitch are the strides of rows.

    Registers hold a row as PARTS parts of BLOCK numbers. A norm needs PARTS = 1.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    parts = ()
    for part in tl.static_range(PARTS):
        inside = i < R - part * BLOCK
        x = tl.load(x_ptr + row * x_pitch + part * BLOCK + i, mask=inside, other=0.0)
        if GATE != "":
            up = tl.load(up_ptr + row * up_pitch + part * BLOCK + i, mask=inside, other=0.0)
            x = tl.where(inside, function(x, GATE) * up, 0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + i, mask=inside, other=0.0)
            x = tl.where(inside, normalized(x, norm, rms_factors(x, R, eps)), 0.0)
        parts = parts + (x,)  # type: ignore[assignment]
    if HAS_PEAKS:
        peak = tl.load(peaks_ptr + row)
    else:
        magnitudes = bits(parts[0]) & 0x7FFFFFFF  # type: ignore[misc]
        for part in tl.static_range(1, PARTS):
            magnitudes = tl.maximum(magnitudes, bits(parts[part]) & 0x7FFFFFFF)
        peak = tl.max(magnitudes, 0)
    for part in tl.static_range(PARTS):
        inside = i < R - part * BLOCK
        high, low, scale = quantized(parts[part], peak, unit, TWO)
        tl.store(digits_ptr + row * R + part * BLOCK + i, high, mask=inside)
        if TWO:
            tl.store(digits_ptr + plane + row * R + part * BLOCK + i, low, mask=inside)
        if part == 0:
            tl.store(scale_ptr + row, scale)


class RowFunction(NamedTuple):
    """Operations on a row before it is quantized: function(x) * up, then a norm; each is optional.

    Attributes:
        up: rows like x's, with any row stride.
        function: a name in rows.FUNCTIONS.
        norm: weight [R] of an RMSNorm.
        eps: the norm's epsilon.
    """

    up: Tensor | None = None
    function: str = ""
    norm: Tensor | None = None
    eps: float = 0.0


def quantize_cuda(
    x: Tensor, num_digits: int, right: bool, peaks: Tensor | None = None, before: RowFunction = RowFunction()
) -> tuple[Tensor, Tensor]:
    """Return int8 digits [num_digits, ..., R] and float32 scales [...] of rows x [..., R].

    Args:
        peaks: int32 [...], the largest magnitude of each row as bits; None computes it from x.
        before: operations on each row first; with them, x [M, R] may have any row stride.
    """
    R = x.shape[-1]
    up, norm = before.up, before.norm
    if up is None and norm is None:
        x = x.contiguous()
    digits = torch.empty((num_digits, *x.shape), dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    unit = 32512.0 if num_digits == 2 and not right else 127.0
    if x.numel():
        pitch = R if x.is_contiguous() else x.stride(0)
        parts, block = _parts(R) if norm is None else (1, next_power_of_2(R))
        launcher(_quantize_kernel)[(x.numel() // R,)](
            x, x if up is None else up, x if norm is None else norm.contiguous(), scales if peaks is None else peaks,
            digits, scales, x.numel(), R, pitch, pitch if up is None else up.stride(0), unit, before.eps,
            GATE="" if up is None else before.function, HAS_NORM=norm is not None, HAS_PEAKS=peaks is not None,
            TWO=num_digits == 2, PARTS=parts, BLOCK=block, num_warps=_warps(R), enable_fp_fusion=False,
            maxnreg=None if up is None else 128, **launch_options(x.device),
        )  # fmt: skip
    return digits, scales


def _parts(R: int) -> tuple[int, int]:
    """Return how a row is cut: the number of parts and their size, a power of two. Prefer less padding, then fewer."""
    blocks = [next_power_of_2(cdiv(R, parts)) for parts in range(1, _MOST_PARTS + 1)]
    parts = min(range(1, _MOST_PARTS + 1), key=lambda parts: (parts * blocks[parts - 1], parts))
    return parts, blocks[parts - 1]


@triton.jit(do_not_specialize=["M", "ahead"])
def _linear_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, K, ahead,
    DX: tl.constexpr, DW: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] of x [DX, M, K] and w [DW, N, K], scaled, or the integers if out is int64.

    RESIDUAL 1 adds the residual [M, N]; 2 also rounds the sum to bfloat16.

    int8 tensor cores saturate, so an int32 sum has at most 65536 terms. `ahead` bytes of each row of w are fetched into
    L2 while the previous kernel finishes.
    """
    let_next_start(PDL)
    fetch_rows_ahead(w_ptr, tl.program_id(1) * BN, BN, N, K, ahead, PDL)
    wait_for_earlier(PDL)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows, columns = (m < M)[:, None], (n < N)[None, :]
    x_at = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    w_at = w_ptr + n[None, :].to(tl.int64) * K + k[:, None]
    x_plane, w_plane = tl.cast(M, tl.int64) * K, tl.cast(N, tl.int64) * K
    total = tl.zeros([BM, BN], tl.int64)
    for part in range(0, K, _LONGEST):
        high, low = tl.zeros([BM, BN], tl.int32), tl.zeros([BM, BN], tl.int32)
        for first in range(part, tl.minimum(part + _LONGEST, K), BK):
            inside = k < K - first
            x_ok, w_ok = rows & inside[None, :], columns & inside[:, None]
            x = tl.load(x_at + first, mask=x_ok, other=0)
            w = tl.load(w_at + first, mask=w_ok, other=0)
            high = dot(x, w, high, INT8)
            if DX == 2:
                low = dot(tl.load(x_at + x_plane + first, mask=x_ok, other=0), w, low, INT8)
            if DW == 2:
                low = dot(x, tl.load(w_at + w_plane + first, mask=w_ok, other=0), low, INT8)
        total += high.to(tl.int64) * 256 + low if DX == 2 else high.to(tl.int64)
    out_at = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    if out_ptr.dtype.element_ty == tl.int64:
        tl.store(out_at, total, mask=rows & columns)
    else:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
        w_scale = tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
        y = total.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]
        if RESIDUAL:
            y = tl.load(residual_ptr + m[:, None].to(tl.int64) * N + n[None, :], mask=rows & columns, other=0.0) + y
        if RESIDUAL == 2:
            y = bf16(y)
        tl.store(out_at, y, mask=rows & columns)


@triton.jit
def _expert_kernel(
    x_ptr, x_scale_ptr, ids_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, share, E, N, K, x_plane, w_plane,
    DX: tl.constexpr, DW: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row of out [M, N]: x [DX, M / share, K] times w [DW, E, N, K] of the row's expert; zeros for other ids.

    The integers if out is int64.
    """
    row = tl.program_id(0).to(tl.int64)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    expert = tl.load(ids_ptr + row)
    known = (expert >= 0) & (expert < E)
    expert = tl.where(known, expert, 0)
    columns = (n < N) & known
    x_at = x_ptr + (row // share) * K + k
    w_at = w_ptr + (expert * N + n)[:, None] * K + k[None, :]
    total = tl.zeros([BN], tl.int64)
    for part in range(0, K, _LONGEST):
        high, low = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
        for first in range(part, tl.minimum(part + _LONGEST, K), BK):
            inside = k < K - first
            w_ok = columns[:, None] & inside[None, :]
            x = tl.load(x_at + first, mask=inside, other=0).to(tl.int32)
            w = tl.load(w_at + first, mask=w_ok, other=0).to(tl.int32)
            high += tl.sum(w * x[None, :], 1)
            if DX == 2:
                x_low = tl.load(x_at + x_plane + first, mask=inside, other=0).to(tl.int32)
                low += tl.sum(w * x_low[None, :], 1)
            if DW == 2:
                w_low = tl.load(w_at + w_plane + first, mask=w_ok, other=0).to(tl.int32)
                low += tl.sum(w_low * x[None, :], 1)
        total += high.to(tl.int64) * 256 + low if DX == 2 else high.to(tl.int64)
    if out_ptr.dtype.element_ty == tl.int64:
        tl.store(out_ptr + row * N + n, total, mask=n < N)
    else:
        x_scale = tl.load(x_scale_ptr + row // share)
        y = total.to(tl.float32) * x_scale * tl.load(w_scale_ptr + expert * N + n, mask=columns, other=0.0)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + expert * N + n, mask=columns, other=0.0)
        tl.store(out_ptr + row * N + n, tl.where(known, y, 0.0), mask=n < N)


def expert_cuda(x: Tensor, ids: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int) -> Tensor:
    """Run the op on the GPU: x [R, K], ids [M], w [D, E, N, K], w_scale and bias [E, N] -> [M, N]."""
    digits, x_scale = quantize_cuda(x, x_digits, False)
    out = torch.empty((len(ids), w.shape[2]), dtype=torch.float32, device=x.device)
    _multiply_experts(digits, ids, w, x_scale, w_scale, bias, out)
    return out


def expert_totals_cuda(x: Tensor, peaks: Tensor, ids: Tensor, w: Tensor, x_digits: int) -> Tensor:
    """Return the exact integers T of a part of K, int64 [M, N], of x [R, K] with peaks [R], ids [M], w [D, E, N, K]."""
    digits, scales = quantize_cuda(x, x_digits, False, peaks.contiguous())
    totals = torch.empty((len(ids), w.shape[2]), dtype=torch.int64, device=x.device)
    _multiply_experts(digits, ids, w, scales, scales, None, totals)
    return totals


def _multiply_experts(
    x: Tensor, ids: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    (DX, R, K), (DW, E, N, _) = x.shape, w.shape
    if out.numel():
        launcher(_expert_kernel)[(len(ids), cdiv(N, 64))](
            x, x_scale, ids, w, w_scale, w_scale if bias is None else bias, out, len(ids) // R, E, N, K, R * K,
            E * N * K, DX=DX, DW=DW, HAS_BIAS=bias is not None, BN=64, BK=128, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def linear_cuda(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_digits: int,
    before: RowFunction = RowFunction(),
    residual: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """Run the op on the GPU: x [M, K], w [D, N, K], w_scale [N], bias [N], residual [M, N] -> [M, N]."""
    digits, x_scale = quantize_cuda(x, x_digits, False, before=before)
    out = torch.empty((len(x), w.shape[1]), dtype=torch.float32, device=x.device)
    _multiply(digits, w, x_scale, w_scale, bias, out, None if residual is None else residual.contiguous(), rounded)
    return out


def totals_cuda(x: Tensor, peaks: Tensor, w: Tensor, x_digits: int) -> Tensor:
    """Run ``totals_cpu`` on the GPU."""
    digits, scales = quantize_cuda(x, x_digits, False, peaks.contiguous())
    totals = torch.empty((len(x), w.shape[1]), dtype=torch.int64, device=x.device)
    _multiply(digits, w, scales, scales, None, totals)
    return totals


class PlainTiles(NamedTuple):
    """Tiles of the plain kernel, its warps and stages, and whether int8 tensor cores multiply."""

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    int8: bool


Tiles = PlainTiles | hopper.Tiles


def _multiply(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    rounded: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Multiply with these tiles, or with those for this size once they gave the host's integers on this device."""
    (DX, M, K), (DW, N, _) = x.shape, w.shape
    if not M or not N:
        return
    if tiles is None:
        tiles = hopper.tiles_of(x, w) if hopper.supports(x, w) else _tiles(M, N, DX)
        _require(x.device, Product(DX, DW, N % 16, K, tiles))
    added = (w_scale if bias is None else bias), (out if residual is None else residual)
    kinds = {"HAS_BIAS": bias is not None, "RESIDUAL": 0 if residual is None else 1 + rounded}
    if isinstance(tiles, hopper.Tiles):
        hopper.launch(tiles, x, w, x_scale, w_scale, *added, out, kinds)
    else:
        BM, BN, BK, warps, stages, int8 = tiles
        launcher(_linear_kernel)[(cdiv(M, BM), cdiv(N, BN))](
            x, w, x_scale, w_scale, *added, out, M, N, K, min(K, _AHEAD_BYTES // N),
            DX=DX, DW=DW, **kinds, BM=BM, BN=BN, BK=BK, INT8=int8, num_warps=warps, num_stages=stages,
            enable_fp_fusion=False, **launch_options(x.device),
        )  # fmt: skip


def _tiles(M: int, N: int, digits: int) -> PlainTiles:
    """Return the fastest tiles for M rows on an H200. With few rows, many programs share the reading of the weights."""
    if M > 16:
        tiles = 64, 64, 128, 4, 3
    elif digits == 1:
        tiles = 16, 32 if N >= 16384 else 16, 256, 2, 4
    else:
        tiles = (16, 64, 128, 4, 3) if N >= 16384 else (16, 32, 512, 4, 3)
    return PlainTiles(*tiles, int8=int8_tensor_cores())


@dataclass(frozen=True, slots=True)
class Product:
    """Everything that a product's code depends on: the key of the gate."""

    x_digits: int
    w_digits: int
    n_mod_16: int
    k: int
    tiles: Tiles


def probe_bits(product: Product, device: torch.device) -> Callable[[Tiles | None], bytes]:
    """Return the gate's probe: the bytes of a random product under these tiles, or of the host's integers for None."""
    generator = torch.Generator("cpu").manual_seed(23)
    drawn: dict[str, Any] = {"device": "cpu", "generator": generator}
    M, N = product.tiles.rows + 5, product.tiles.block_n + 16 + product.n_mod_16

    def draw(planes: int, rows: int) -> Tensor:
        digits = torch.randint(-127, 128, (planes, rows, product.k), dtype=torch.int8, **drawn)
        digits[:, 0] = 127  # the largest sums
        return digits

    x, w = draw(product.x_digits, M), draw(product.w_digits, N)
    scales = torch.rand(M + N, dtype=torch.float32, **drawn).split((M, N))

    def bits(tiles: Tiles | None) -> bytes:
        if tiles is None:
            return bytes_of(host_integers(x, w).float() * scales[0][:, None] * scales[1])
        out = torch.empty(M, N, dtype=torch.float32, device=device)
        x_scale, w_scale = (scale.to(device) for scale in scales)
        _multiply(x.to(device), w.to(device), x_scale, w_scale, None, out, tiles=tiles)
        return bytes_of(out)

    return bits


def host_integers(x: Tensor, w: Tensor) -> Tensor:
    """Return the integers T [M, N] of docs/exact.md for digits on the host, as float64, which holds them exactly."""
    x, w = x.double(), w.double()
    total = x[0] @ w[0].T
    if len(x) == 2:
        total = total * 256 + x[1] @ w[0].T
    if len(w) == 2:
        total += x[0] @ w[1].T
    return total


PRODUCTS: Gate[Product, Tiles | None] = Gate(
    family="exact_linear",
    sources=(__file__, hopper.__file__, hopper_tile.__file__, functions.__file__, dependent_launch.__file__),
    reference=lambda product: None,
    candidates=lambda product: [product.tiles],
    probe=probe_bits,
)


@functools.cache
def _require(device: torch.device, product: Product) -> None:
    if PRODUCTS.schedule(product, device) is None:
        raise ScheduleError(
            f"exact_linear: on {device}, {product} differs from the host's integers, so exact arithmetic cannot run"
            " there. Report it with the versions of torch, Triton and the driver. The result is stored in"
            f" {PRODUCTS.tuner(device).path}: delete this file to compare again"
        )


def _warps(R: int) -> int:
    return min(8, max(1, next_power_of_2(R) // 512))
