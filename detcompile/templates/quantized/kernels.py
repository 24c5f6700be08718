"""dequant_matmul on the GPU: weights of few bits become tensor core operands in registers.

Legend: M tokens, N output features, K summed features, BM BN BK tile sizes. KIND is 0 for nibbles, 1 for int8, 2 for
float8 (templates/quantized/weights.py); OFFSET is as in dequantize.py. Weights are the M operand of the MMA (swapped),
which may come from registers. The loop over k, the tree of leaves and the epilogue are those of matmul/kernels.py, and
so are the bits. Leaves may have separate programs as there; ``combine_kernel`` adds their partials.

Nibbles are read 128 k at a time: the low halves of 64 bytes are 64 successive k, the high halves the next 64, and each
half is one ``tl.dot``. Scales are too small to be copied ahead, so the next step's scales are loaded in this step, and
the step waits for them. Steps of several blocks of 128 k (`_blocks_leaf`) copy them ahead.
"""

import triton
import triton.language as tl

from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.matmul.kernels import grouped, store_tile
from detcompile.templates.matmul.tree import close_leaf, root_of
from detcompile.templates.quantized.dequantize import NIBBLES, narrow_weights, scale_at, wide_weights


@triton.jit
def _nibbles_leaf(
    x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """fp32 sum [BN, BM] over first..end in steps of 128 k. The order is leaf_sum's."""
    dtype: tl.constexpr = x_M.dtype.element_ty
    TWO: tl.constexpr = GROUP_K % 128 != 0  # the halves of a step have separate scales
    EACH: tl.constexpr = GROUP_K % 64 != 0  # and so do elements
    acc = tl.zeros((BN, BM), tl.float32)
    half = tl.arange(0, 64)
    n_N = n[:, None]
    low_s, low_z = scale_at(scale_ptr, offset_ptr, first, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW)
    high_s, high_z = scale_at(
        scale_ptr, offset_ptr, first + 64, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
    )
    for k in range(first, end, 128):
        if EACH:
            kk = (k + half)[None, :]
            low, low_offset = scale_at(
                scale_ptr, offset_ptr, kk, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
            )
            high, high_offset = scale_at(
                scale_ptr, offset_ptr, kk + 64, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
            )
        else:
            low, low_offset, high, high_offset = low_s, low_z, high_s, high_z
            low_s, low_z = scale_at(
                scale_ptr, offset_ptr, k + 128, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
            )
            if TWO:
                high_s, high_z = scale_at(
                    scale_ptr, offset_ptr, k + 192, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
                )
            else:
                high, high_offset = low, low_offset
        q = tl.load(w_N[:, None] + (k // 2 + half)[None, :], mask=n_N < N, other=0)
        low_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (k + half < end)[:, None]
        high_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (k + 64 + half < end)[:, None]
        x_low = tl.load(x_M[None, :] + ((k + half) * x_stride_k)[:, None], mask=low_ok, other=0.0)
        x_high = tl.load(x_M[None, :] + ((k + 64 + half) * x_stride_k)[:, None], mask=high_ok, other=0.0)
        if NARROW:
            w_low, w_high = narrow_weights(q, low, low_offset, high, high_offset, dtype)
        else:
            w_low = wide_weights(q & 15, low, low_offset, 0, OFFSET, dtype, ON_GPU)
            w_high = wide_weights(q >> 4, high, high_offset, 0, OFFSET, dtype, ON_GPU)
        if BLOCKED:
            part = tl.dot(w_low, x_low, tl.zeros((BN, BM), tl.float32), input_precision="ieee")
            acc = acc + tl.dot(w_high, x_high, part, input_precision="ieee")
        else:
            acc = tl.dot(w_low, x_low, acc)
            acc = tl.dot(w_high, x_high, acc)
    return acc


@triton.jit
def _blocks_leaf(
    x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """_nibbles_leaf with steps of several blocks of 128 k: first..end is whole steps, with one scale per block and
    feature.

    A thread loads at least two scales, the minimum that Triton copies ahead, as it does weights and x.
    """
    dtype: tl.constexpr = x_M.dtype.element_ty
    BLOCKS: tl.constexpr = BK // 128
    acc = tl.zeros((BN, BM), tl.float32)
    k_block = (tl.arange(0, BLOCKS) * 128)[None, :, None]
    n_N = n[:, None, None]
    for k in range(first, end, BK):
        scale, offset = scale_at(
            scale_ptr, offset_ptr, k + k_block, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, OFFSET, NARROW
        )
        byte = tl.multiple_of(k // 2, 64) + tl.arange(0, BK // 2)
        q = tl.load(w_N[:, None] + byte[None, :], mask=(n < N)[:, None], other=0).reshape(BN, BLOCKS, 64)
        kk = k + tl.arange(0, BK)
        x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=(m < M)[None, :], other=0.0)
        if NARROW:
            low, high = narrow_weights(q, scale, offset, scale, offset, dtype)
        else:
            low = wide_weights(q & 15, scale, offset, 0, OFFSET, dtype, ON_GPU)
            high = wide_weights(q >> 4, scale, offset, 0, OFFSET, dtype, ON_GPU)
        w = tl.join(low, high).permute(0, 1, 3, 2).reshape(BN, BK)
        if ON_GPU:  # impure as in dequantize.py: for a join, Triton uses another order of k
            w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2)
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _bytes_leaf(
    x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """fp32 sum [BN, BM] over first..end in steps of BK. The order is leaf_sum's; BLOCKED requires BK = 128."""
    dtype: tl.constexpr = x_M.dtype.element_ty
    EACH: tl.constexpr = GROUP_K % BK != 0
    acc = tl.zeros((BN, BM), tl.float32)
    n_N = n[:, None]
    next_s, next_z = scale_at(
        scale_ptr, offset_ptr, first, end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, OFFSET, False
    )
    for k in range(first, end, BK):
        kk = k + tl.arange(0, BK)
        if EACH:
            scale, offset = scale_at(
                scale_ptr, offset_ptr, kk[None, :], end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, OFFSET, False
            )
        else:
            scale, offset = next_s, next_z
            next_s, next_z = scale_at(
                scale_ptr, offset_ptr, k + BK, end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, OFFSET, False
            )
        x_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (kk < end)[:, None]
        w_ok = n_N < N if EVEN_K else (n_N < N) & (kk < end)[None, :]
        q = tl.load(w_N[:, None] + kk[None, :], mask=w_ok, other=0.0 if KIND == 2 else 0)
        x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=x_ok, other=0.0)
        w = wide_weights(q, scale, offset, KIND, OFFSET, dtype, ON_GPU)
        if BLOCKED:
            acc = acc + tl.dot(w, x, tl.zeros((BN, BM), tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _quantized_leaf(
    x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    if KIND == NIBBLES and BK > 128:
        acc = _blocks_leaf(
            x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            GROUP_K, ROWS, OFFSET, BM, BN, BK, NARROW, ON_GPU,
        )  # fmt: skip
    elif KIND == NIBBLES:
        acc = _nibbles_leaf(
            x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            GROUP_K, ROWS, OFFSET, BM, BN, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    else:
        acc = _bytes_leaf(
            x_M, w_N, scale_ptr, offset_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, OFFSET, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["M"])
def dequant_kernel(
    x_ptr, w_ptr, scale_ptr, offset_ptr, out_ptr, bias_ptr, residual_ptr, M, N, leaf_k, leaves,
    x_stride_m, x_stride_k, w_stride_n, scale_stride, residual_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr, NARROW: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile with all its leaves; with SPLIT one leaf (axis 1), into an fp32 partial out[leaf, M, N] without an
    epilogue. With a tree, leaf_k is a multiple of a step."""
    wait_for_earlier(PDL)
    tile_m, tile_n = grouped(tl.program_id(0), M, N, BM, BN, GROUP)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    x_M = x_ptr + m.to(tl.int64) * x_stride_m
    w_N = w_ptr + n.to(tl.int64) * w_stride_n
    if SPLIT:
        leaf = tl.program_id(1)
        first = leaf * leaf_k
        acc = _quantized_leaf(
            x_M, w_N, scale_ptr, offset_ptr, first, first + leaf_k, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, OFFSET, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
        out_ptr += leaf.to(tl.int64) * M * N
    elif R3 == 1:
        acc = _quantized_leaf(
            x_M, w_N, scale_ptr, offset_ptr, 0, leaf_k, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, OFFSET, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    else:
        acc = tl.zeros((BN, BM), tl.float32)
        t0, t1, t2, t3 = acc, acc, acc, acc
        for leaf in range(0, leaves):
            first = leaf * leaf_k
            acc = _quantized_leaf(
                x_M, w_N, scale_ptr, offset_ptr, first, first + leaf_k, M, N, m, n, x_stride_k, scale_stride,
                KIND, GROUP_K, ROWS, OFFSET, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
            )  # fmt: skip
            t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
        acc = root_of(t0, t1, t2, t3, R0, R1, R2)
    let_next_start(PDL)
    store_tile(
        acc, out_ptr, bias_ptr, residual_ptr, m[None, :], n[:, None], M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL
    )
