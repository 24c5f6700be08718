"""The cache writes on the GPU: rope_cache, one launch that also norms and rotates q and k, and write_kv.

Legend: T tokens, HQ HK heads, D DV head dims, E rotated features, W and WV: D and DV, padded. A tile is ROWS heads of
consecutive tokens. Programs process tiles of q, then of k, then of v.

A head's norm uses the tile, and so the `Row` tree, of the rms_norm kernel. The other half of a head, which rotation
needs, is loaded a second time (a cache hit) and normed again, so threads need not exchange values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import row_order
from detcompile.templates.attention.operands import Caches, HeadNorm, padded, unit_rows
from detcompile.templates.device.dependent_launch import (
    fetch_line_ahead,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.device.primitives import widened
from detcompile.templates.rows.tile_sums import row_total
from detcompile.templates.rows.tiles import aligned, in_units, rms_scale, row_plan

MOST_FEATURES = 512  # per head


def rope_cache_cuda(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm, caches: Caches, slot_mapping: Tensor
) -> Tensor:
    """Norm and rotate q and k, and write k and v into the caches at slot_mapping [C T]; return q, rotated.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], cos and sin [T, E].

    Raises:
        InvalidInput: dtypes differ, or heads have more than MOST_FEATURES features.
    """
    T, HQ, D = q.shape
    HK, DV = v.shape[1:]
    if D > MOST_FEATURES or not q.dtype == k.dtype == v.dtype == cos.dtype == sin.dtype:
        raise InvalidInput(
            f"detcompile::rope_cache: q, k, v, cos and sin are {q.dtype}, {k.dtype}, {v.dtype}, {cos.dtype}, "
            f"{sin.dtype}, with {D} features per head: use one dtype and at most {MOST_FEATURES} features"
        )
    out = torch.empty(T, HQ, D, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    order = row_order(D, "cuda", (), q.dtype)
    plan = row_plan(order)
    v_unit = min(DV & -DV, 16 // v.element_size())
    (q, *q_strides), (k, *k_strides) = (_head_strides(x, order.vector) for x in (q, k))
    v, *v_strides = _head_strides(v, v_unit)
    cos, sin = (_aligned_rows(table) for table in (cos, sin))
    weights = [out if weight is None else aligned(weight) for weight in norm[:2]]
    num_slots = len(slot_mapping)
    q_tiles, kv_tiles = cdiv(T * HQ, plan.rows), cdiv(num_slots * HK, plan.rows)
    launcher(_rope_cache_kernel)[(q_tiles + 2 * kv_tiles,)](
        q, k, v, cos, sin, *weights, out, *caches, slot_mapping, T, num_slots, q_tiles, kv_tiles,
        *q_strides, *k_strides, *v_strides, *caches.k.stride()[:3], *caches.v.stride()[:3],
        0.0 if norm.eps is None else norm.eps,
        HQ=HQ, HK=HK, D=D, DV=DV, E=cos.shape[1], BLOCK_SIZE=caches.k.shape[1], HAS_NORM=norm.eps is not None,
        HAS_WEIGHT=norm.q_weight is not None, ROUND_FIRST=norm.round_before_weight, COPIED=num_slots > T,
        UNIT=order.vector, V_UNIT=v_unit, ROWS=plan.rows, W=plan.width, WV=next_power_of_2(DV), LANES=order.lanes,
        VECTOR=order.vector, SHUFFLE=q.is_cuda, num_warps=plan.warps, enable_fp_fusion=False,
        **launch_options(q.device),
    )  # fmt: skip
    return out


def write_kv(k: Tensor, v: Tensor, caches: Caches, slot_mapping: Tensor) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, Dv] into the caches at slot_mapping [C T]; negative slots are skipped."""
    k, v = unit_rows(k), unit_rows(v)
    T, heads, D = k.shape
    DV, count = v.shape[-1], len(slot_mapping)
    launcher(write_kv_kernel)[(count,)](
        k, v, *caches, slot_mapping, T, *k.stride()[:2], *v.stride()[:2], *caches.k.stride()[:3],
        *caches.v.stride()[:3], COPIED=count > T, HEADS=heads, HEADS_P=next_power_of_2(heads), D=D, DV=DV,
        DP=padded(D), DVP=padded(DV), BLOCK_SIZE=caches.k.shape[1], num_warps=4, **launch_options(k.device),
    )  # fmt: skip


def _head_strides(x: Tensor, unit: int) -> tuple[Tensor, int, int]:
    """Return x [T, H, D] and its strides in units; x is copied unless heads are contiguous and aligned to the unit."""
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
    if (x.stride(2) != 1 and x.shape[2] > 1) or x.data_ptr() % 16 or strides[0] % unit or strides[1] % unit:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = list(x.stride()[:2])
    return x, strides[0] // unit, strides[1] // unit


def _aligned_rows(table: Tensor) -> Tensor:
    table = table.contiguous()
    return table if table.data_ptr() % 16 == 0 else table.clone()


@triton.jit
def _heads(x_ptr, token, head, ok, column, token_stride, head_stride, UNIT: tl.constexpr, D: tl.constexpr):
    """The tile in fp32, with zeros outside."""
    start = token.to(tl.int64) * token_stride + head * head_stride
    pointers = (x_ptr + start * UNIT)[:, None] + column[None, :]
    return tl.load(pointers, mask=ok[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _normed(
    x, scale_R, weight_ptr, column, DTYPE: tl.constexpr, D: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    y = x * scale_R[:, None]
    if ROUND_FIRST:
        y = y.to(DTYPE).to(tl.float32)
    if HAS_WEIGHT:
        y = y * widened(tl.load(weight_ptr + column, mask=column < D, other=0.0), DTYPE)[None, :]
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, token, head, ok, token_stride, head_stride, eps, UNIT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """[ROWS, W] in x's dtype; every operation is rounded as if it stood alone."""
    HALF: tl.constexpr = E // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, W)
    other = tl.where(column < HALF, column + HALF, tl.where(column < E, column - HALF, column))
    x = _heads(x_ptr, token, head, ok, column, token_stride, head_stride, UNIT, D)
    half = _heads(x_ptr, token, head, ok, other, token_stride, head_stride, UNIT, D)
    turned = ok[:, None] & (column < E)[None, :]
    start = token.to(tl.int64)[:, None] * E
    cos = tl.load(in_units(cos_ptr + start, column[None, :], UNIT), mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(in_units(sin_ptr + start, column[None, :], UNIT), mask=turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = rms_scale(row_total(x * x, ROWS, LANES, VECTOR, SHUFFLE), eps, D)
        x = _normed(x, scale, weight_ptr, column, DTYPE, D, HAS_WEIGHT, ROUND_FIRST)
        half = _normed(half, scale, weight_ptr, other, DTYPE, D, HAS_WEIGHT, ROUND_FIRST)
    half = tl.where((column < HALF)[None, :], -half, half)
    y = (x * cos).to(DTYPE).to(tl.float32) + (half * sin).to(DTYPE).to(tl.float32)
    return tl.where((column < E)[None, :], y, x).to(DTYPE)


@triton.jit
def _token(place, T, COPIED: tl.constexpr):
    """The token whose key and value go to a place of the slot mapping."""
    return place % T if COPIED else place


@triton.jit
def _slots(slots_ptr, cache_ptr, place, head, ok, block_stride, slot_stride, head_stride, BLOCK_SIZE: tl.constexpr):
    """Pointers [ROWS] to the heads in the cache, and a mask of those that exist."""
    slot = tl.load(slots_ptr + place, mask=ok, other=-1).to(tl.int64)
    pointers = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride
    return pointers, ok & (slot >= 0)


@triton.jit(
    do_not_specialize=["T", "num_slots", "q_tiles", "k_tiles"]
    + ["q_token", "q_head", "k_token", "k_head", "v_token", "v_head"]
)
def _rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    T, num_slots, q_tiles, k_tiles, q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_slot, k_slot_head, v_block, v_slot, v_slot_head, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, COPIED: tl.constexpr,
    UNIT: tl.constexpr, V_UNIT: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, WV: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    program = tl.program_id(0)
    place = tl.maximum(program - q_tiles, 0) % k_tiles * ROWS // HK
    token = tl.where(program < q_tiles, program * ROWS // HQ, place % T).to(tl.int64)
    line = tl.arange(0, max(W // 64, 1)) * 64
    fetch_line_ahead(slots_ptr + place + tl.arange(0, 1), PDL)
    fetch_line_ahead(cos_ptr + token * E + tl.minimum(line, E - 1), PDL)
    fetch_line_ahead(sin_ptr + token * E + tl.minimum(line, E - 1), PDL)
    if HAS_WEIGHT:
        fetch_line_ahead(q_weight_ptr + tl.minimum(line, D - 1), PDL)
        fetch_line_ahead(k_weight_ptr + tl.minimum(line, D - 1), PDL)
    wait_for_earlier(PDL)
    index = tl.arange(0, ROWS)
    column = tl.arange(0, W)
    if program < q_tiles:
        q_row = program * ROWS + index
        q_ok = q_row // HQ < T
        q_turned = _rotated(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_row // HQ, q_row % HQ, q_ok, q_token, q_head, eps, UNIT, D, E,
            HAS_NORM, HAS_WEIGHT, ROUND_FIRST, ROWS, W, LANES, VECTOR, SHUFFLE,
        )  # fmt: skip
        q_to = out_ptr + q_row.to(tl.int64) * D
        tl.store(in_units(q_to[:, None], column[None, :], UNIT), q_turned, mask=q_ok[:, None] & (column < D)[None, :])
    elif program < q_tiles + k_tiles:
        k_row = (program - q_tiles) * ROWS + index
        k_ok = k_row // HK < num_slots
        k_turned = _rotated(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, _token(k_row // HK, T, COPIED), k_row % HK, k_ok, k_token, k_head,
            eps, UNIT, D, E, HAS_NORM, HAS_WEIGHT, ROUND_FIRST, ROWS, W, LANES, VECTOR, SHUFFLE,
        )  # fmt: skip
        k_to, k_there = _slots(
            slots_ptr, k_cache_ptr, k_row // HK, k_row % HK, k_ok, k_block, k_slot, k_slot_head, BLOCK_SIZE
        )  # fmt: skip
        k_mask = k_there[:, None] & (column < D)[None, :]
        k_places = in_units(k_to[:, None], column[None, :], UNIT)
        tl.store(k_places, k_turned.to(k_cache_ptr.dtype.element_ty), mask=k_mask)
    else:
        v_row = (program - q_tiles - k_tiles) * ROWS + index
        v_ok = v_row // HK < num_slots
        feature = tl.arange(0, WV)
        copied = _heads(v_ptr, _token(v_row // HK, T, COPIED), v_row % HK, v_ok, feature, v_token, v_head, V_UNIT, DV)
        v_to, v_there = _slots(
            slots_ptr, v_cache_ptr, v_row // HK, v_row % HK, v_ok, v_block, v_slot, v_slot_head, BLOCK_SIZE
        )  # fmt: skip
        v_mask = v_there[:, None] & (feature < DV)[None, :]
        tl.store(v_to[:, None] + feature[None, :], copied.to(v_cache_ptr.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=["T"])
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, T, k_token, k_head, v_token, v_head,
    k_block, k_slot, k_slot_head, v_block, v_slot, v_slot_head, COPIED: tl.constexpr,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One slot per program, for the K and V rows of token ``slot's index % T``; negative slots are skipped."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:
        return
    if COPIED:
        t = t % T
    h = tl.arange(0, HEADS_P)[:, None]
    d = tl.arange(0, DP)[None, :]
    dv = tl.arange(0, DVP)[None, :]
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    k_ok = (h < HEADS) & (d < D)
    v_ok = (h < HEADS) & (dv < DV)
    k = tl.load(k_ptr + t * k_token + h * k_head + d, mask=k_ok)
    v = tl.load(v_ptr + t * v_token + h * v_head + dv, mask=v_ok)
    k_to = k_cache_ptr + block * k_block + place * k_slot + h * k_slot_head + d
    v_to = v_cache_ptr + block * v_block + place * v_slot + h * v_slot_head + dv
    tl.store(k_to, k.to(k_cache_ptr.dtype.element_ty), mask=k_ok)
    tl.store(v_to, v.to(v_cache_ptr.dtype.element_ty), mask=v_ok)
