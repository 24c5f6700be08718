"""Norm and rotate q and k on the GPU, and write quantized keys and values to the cache (docs/exact.md).

Legend: T tokens, HQ HK heads, D V widths of a key and a value, E rotated features, W and WV: D and V, padded. A program
takes HEADS heads of one token: of q, of k or of v.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.attention.operands import Caches
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.exact.functions import bits
from detcompile.templates.exact.gpu import normalized, quantized, rms_factors

_HEADS = 8


class Rotation(NamedTuple):
    """Tables cos and sin [T, E] that rotate the first E features of a head; weights [D] and eps of the norm before."""

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


@triton.jit
def _heads(x_ptr, token, head, column, pitch, H: tl.constexpr, D: tl.constexpr):
    """[HEADS, W] float32, zeros outside."""
    at = x_ptr + token * pitch + head[:, None] * D + column[None, :]
    return tl.load(at, mask=(head < H)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _rotated(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, token, head, column, pitch, eps, H: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads. A thread loads the other half of its head itself, so no thread waits for another."""
    x = _heads(x_ptr, token, head, column, pitch, H, D)
    if E > 0:
        HALF: tl.constexpr = E // 2
        other = tl.where(column < HALF, column + HALF, tl.where(column < E, column - HALF, column))
        half = _heads(x_ptr, token, head, other, pitch, H, D)
        if HAS_NORM:
            factors = rms_factors(x, D, eps)
            x = normalized(x, tl.load(weight_ptr + column, mask=column < D, other=0.0)[None, :], factors)
            half = normalized(half, tl.load(weight_ptr + other, mask=column < D, other=0.0)[None, :], factors)
        cos = tl.load(cos_ptr + token * E + column, mask=column < E, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * E + column, mask=column < E, other=0.0)[None, :]
        y = x * cos + tl.where((column < HALF)[None, :], -half, half) * sin
        x = tl.where((column < E)[None, :], y, x)
    return x


@triton.jit
def _write(x, cache_ptr, word_ptr, at, known, column, D: tl.constexpr, TWO: tl.constexpr):
    """Quantize and store heads x as right operands. cache_ptr points to bytes; `at` [HEADS] counts words."""
    high, low, scale = quantized(x, tl.max(bits(x) & 0x7FFFFFFF, 1, keep_dims=True), 127.0, TWO)
    to, inside = cache_ptr + 4 * at[:, None] + column[None, :], known[:, None] & (column < D)[None, :]
    tl.store(to, high, mask=inside)
    if TWO:
        tl.store(to + D, low, mask=inside)
    tl.store(word_ptr + at[:, None] + (2 * D if TWO else D) // 4, scale, mask=known[:, None])


@triton.jit(do_not_specialize=["T"])
def heads_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr, slot_ptr, k_cache_ptr, k_word_ptr,
    v_cache_ptr, v_word_ptr, T, q_pitch, k_pitch, v_pitch, block_size, k_block, k_slot, k_head, v_block, v_slot,
    v_head, eps, HQ: tl.constexpr, HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    V: tl.constexpr, WV: tl.constexpr, E: tl.constexpr, HAS_NORM: tl.constexpr, TWO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: entries of slot_mapping; axis 1: groups of HEADS heads of v, then of k, then (with a rotation) of q."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    PARTS: tl.constexpr = (HK + HEADS - 1) // HEADS
    token, column = place % T, tl.arange(0, W)
    if part >= 2 * PARTS:
        if place < T:
            head = (part - 2 * PARTS) * HEADS + tl.arange(0, HEADS)
            q = _rotated(q_ptr, q_weight_ptr, cos_ptr, sin_ptr, token, head, column, q_pitch, eps, HQ, D, E, HAS_NORM)
            to = out_ptr + (token * HQ + head)[:, None] * D + column[None, :]
            tl.store(to, q, mask=(head < HQ)[:, None] & (column < D)[None, :])
    else:
        slot = tl.load(slot_ptr + place)
        if slot >= 0:
            page, inside = slot // block_size, slot % block_size
            head = part % PARTS * HEADS + tl.arange(0, HEADS)
            if part < PARTS:
                feature = tl.arange(0, WV)
                v = _heads(v_ptr, token, head, feature, v_pitch, HK, V)
                at = page * v_block + inside * v_slot + head * v_head
                _write(v, v_cache_ptr, v_word_ptr, at, head < HK, feature, V, TWO)
            else:
                k = _rotated(
                    k_ptr, k_weight_ptr, cos_ptr, sin_ptr, token, head, column, k_pitch, eps, HK, D, E, HAS_NORM
                )  # fmt: skip
                at = page * k_block + inside * k_slot + head * k_head
                _write(k, k_cache_ptr, k_word_ptr, at, head < HK, column, D, TWO)


def write_heads(
    caches: Caches,
    slot_mapping: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    digits: int,
    rotation: Rotation | None = None,
) -> Tensor:
    """Quantize k [T, Hkv, D] and v [T, Hkv, V] into the slots of slot_mapping; negative slots are skipped.

    Return q [T, Hq, D]. With a rotation, q and k are normed and rotated first.
    """
    (T, HQ, D), (_, HK, V) = q.shape, v.shape
    q, k, v = (_token_rows(x) for x in (q, k, v))
    if rotation is None:
        out, q_parts, E, has_norm, eps = q.contiguous(), 0, 0, False, 0.0
        operands = [q] * 4
    else:
        out, q_parts = torch.empty((T, HQ, D), dtype=torch.float32, device=q.device), cdiv(HQ, _HEADS)
        E, has_norm, eps = rotation.cos.shape[1], rotation.q_weight is not None, rotation.eps
        operands = [q if operand is None else operand.contiguous() for operand in rotation[:4]]
    launcher(heads_kernel)[(len(slot_mapping), 2 * cdiv(HK, _HEADS) + q_parts)](
        q, k, v, *operands, out, slot_mapping, caches.k.view(torch.int8), caches.k, caches.v.view(torch.int8),
        caches.v, T, *(x.stride(0) for x in (q, k, v)), caches.k.shape[1], *caches.k.stride()[:3],
        *caches.v.stride()[:3], eps, HQ=HQ, HK=HK, HEADS=_HEADS, D=D,
        W=next_power_of_2(D), V=V, WV=next_power_of_2(V), E=E,
        HAS_NORM=has_norm, TWO=digits == 2, num_warps=2, enable_fp_fusion=False, **launch_options(q.device),
    )  # fmt: skip
    return out


def _token_rows(x: Tensor) -> Tensor:
    """Return x [T, H, D] with the heads of a token contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
