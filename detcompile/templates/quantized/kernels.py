"""dequant_matmul on the GPU: weights of few bits become operands of the tensor core in registers.

Legend: M tokens, N output features, K summed features, BM BN BK tile sizes. KIND is 0 for nibbles, 1 for int8, 2 for
float8 (templates/quantized/weights.py). Weights are the M operand of the MMA ("swapped" in matmul_kernels), which may
come from registers; the walk over k, the tree of leaves and the epilogue are those of matmul_kernels, and so are the
bits. A leaf may be a program's own there as here: its partials are added by ``combine_kernel``.

Nibbles are read 128 k at a time: the low halves of 64 bytes are 64 successive k, the high halves the next 64, and each
is one ``tl.dot``. Scales of the next step are loaded in this one, since they are too small to be copied ahead; the
step after waits for them. Steps of several blocks of 128 k (`_blocks_leaf`) copy them ahead.

The assembly is said to be impure, which stops Triton from looking through it: an operand that it knows to have been
bytes goes to mma.sync with its k in another order, and so with other bits.
"""

import triton
import triton.language as tl

from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.device.widening import widened
from detcompile.templates.matmul.kernels import close_leaf, grouped, root_of, store_tile

__all__ = ["NARROW_BFLOAT16", "NARROW_FLOAT16", "NARROW_REGISTERS", "dequant_kernel", "expand_kernel"]

_NIBBLES = tl.constexpr(0)
_BYTES = tl.constexpr(1)
_FLOAT8 = tl.constexpr(2)
_MAGIC = tl.constexpr(8388608)  # 2^23: or-ing q into its bits gives the float 2^23 + q
# Four bytes, and scale and offset of their low and of their high halves -> four weights of either (_narrow_weights).
NARROW_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 a, b;"
    "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    "lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;"
    "shr.b32 a, a, 4; shr.b32 b, b, 4;"
    "lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;"
    "sub.rn.bf16x2 $0, $0, $7; sub.rn.bf16x2 $1, $1, $8; sub.rn.bf16x2 $2, $2, $11; sub.rn.bf16x2 $3, $3, $12;"
    "mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $6; mul.rn.bf16x2 $2, $2, $9; mul.rn.bf16x2 $3, $3, $10;}"
)
NARROW_FLOAT16 = tl.constexpr(
    "{ .reg .b32 a, b;"
    "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    "lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;"
    "shr.b32 a, a, 4; shr.b32 b, b, 4;"
    "lop3.b32 $2, a, 0x000F000F, 0x64006400, 0xEA; lop3.b32 $3, b, 0x000F000F, 0x64006400, 0xEA;"
    "sub.rn.f16x2 $0, $0, $7; sub.rn.f16x2 $1, $1, $8; sub.rn.f16x2 $2, $2, $11; sub.rn.f16x2 $3, $3, $12;"
    "mul.rn.f16x2 $0, $0, $5; mul.rn.f16x2 $1, $1, $6; mul.rn.f16x2 $2, $2, $9; mul.rn.f16x2 $3, $3, $10;}"
)
NARROW_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def _scale_at(
    scale_ptr, zero_ptr, k, k_end, n, N, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Scale, and what is subtracted: z and what `_weights` adds to q. k and n broadcast to the result.

    With NARROW both are of the scales' dtype, for `_narrow_weights`.
    """
    place = k // GROUP_K * scale_stride + n // ROWS
    inside = (n < N) & (k < k_end)
    scale = tl.load(scale_ptr + place, mask=inside, other=0.0)
    if HAS_ZEROS:
        zero = tl.load(zero_ptr + place, mask=inside, other=0).to(tl.float32)
    else:
        zero = tl.full(scale.shape, 8.0 if KIND == _NIBBLES else 0.0, tl.float32)
    if NARROW:
        offset = (zero + (128.0 if scale.dtype == tl.bfloat16 else 1024.0)).to(scale.dtype)
    else:
        scale = widened(scale, tl.float16)  # the only dtype that LLVM would shrink to
        offset = zero + (_MAGIC + 128 if KIND == _BYTES else _MAGIC)
    return scale, offset


@triton.jit
def _weights(q, scale, offset, KIND: tl.constexpr, dtype: tl.constexpr, ON_GPU: tl.constexpr):
    """round((q - z) * scale); the difference is exact."""
    if KIND == _FLOAT8:
        value = q.to(tl.float32) * scale
    else:
        if KIND == _BYTES:
            q = q.to(tl.uint8, bitcast=True) ^ 128
        if ON_GPU:
            number = tl.inline_asm_elementwise(
                "prmt.b32 $0, $4, 0x4B000000, 0x7440; prmt.b32 $1, $4, 0x4B000000, 0x7441;"
                "prmt.b32 $2, $4, 0x4B000000, 0x7442; prmt.b32 $3, $4, 0x4B000000, 0x7443;",
                "=r,=r,=r,=r,r", [q], dtype=tl.float32, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            number = (q.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        value = (number - offset) * scale
    return value.to(dtype)


@triton.jit
def _narrow_weights(q, low, low_offset, high, high_offset, dtype: tl.constexpr):
    """_weights of both nibbles of a byte, two at a time in 16 bits: 128 + q is a bfloat16, 1024 + q a float16.

    Scales are of that dtype, so that the one rounding of their product with the exact difference is the definition's.
    """
    if dtype == tl.bfloat16:
        w_low, w_high = tl.inline_asm_elementwise(
            NARROW_BFLOAT16, NARROW_REGISTERS, [q, low, low_offset, high, high_offset],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4,
        )  # fmt: skip
    else:
        w_low, w_high = tl.inline_asm_elementwise(
            NARROW_FLOAT16, NARROW_REGISTERS, [q, low, low_offset, high, high_offset],
            dtype=(tl.float16, tl.float16), is_pure=False, pack=4,
        )  # fmt: skip
    return w_low, w_high


@triton.jit
def _nibbles_leaf(
    x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """fp32 sum [BN, BM] over first..end, a step 128 k. The order is leaf_sum's."""
    dtype: tl.constexpr = x_M.dtype.element_ty
    TWO: tl.constexpr = GROUP_K % 128 != 0  # halves of a step have scales of their own
    EACH: tl.constexpr = GROUP_K % 64 != 0  # and so have elements
    acc = tl.zeros((BN, BM), tl.float32)
    half = tl.arange(0, 64)
    n_N = n[:, None]
    low_s, low_z = _scale_at(scale_ptr, zero_ptr, first, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW)
    high_s, high_z = _scale_at(
        scale_ptr, zero_ptr, first + 64, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
    )
    for k in range(first, end, 128):
        if EACH:
            kk = (k + half)[None, :]
            low, low_offset = _scale_at(
                scale_ptr, zero_ptr, kk, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
            )
            high, high_offset = _scale_at(
                scale_ptr, zero_ptr, kk + 64, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
            )
        else:
            low, low_offset, high, high_offset = low_s, low_z, high_s, high_z
            low_s, low_z = _scale_at(
                scale_ptr, zero_ptr, k + 128, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
            )
            if TWO:
                high_s, high_z = _scale_at(
                    scale_ptr, zero_ptr, k + 192, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
                )
            else:
                high, high_offset = low, low_offset
        q = tl.load(w_N[:, None] + (k // 2 + half)[None, :], mask=n_N < N, other=0)
        low_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (k + half < end)[:, None]
        high_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (k + 64 + half < end)[:, None]
        x_low = tl.load(x_M[None, :] + ((k + half) * x_stride_k)[:, None], mask=low_ok, other=0.0)
        x_high = tl.load(x_M[None, :] + ((k + 64 + half) * x_stride_k)[:, None], mask=high_ok, other=0.0)
        if NARROW:
            w_low, w_high = _narrow_weights(q, low, low_offset, high, high_offset, dtype)
        else:
            w_low = _weights(q & 15, low, low_offset, 0, dtype, ON_GPU)
            w_high = _weights(q >> 4, high, high_offset, 0, dtype, ON_GPU)
        if BLOCKED:
            part = tl.dot(w_low, x_low, tl.zeros((BN, BM), tl.float32), input_precision="ieee")
            acc = acc + tl.dot(w_high, x_high, part, input_precision="ieee")
        else:
            acc = tl.dot(w_low, x_low, acc)
            acc = tl.dot(w_high, x_high, acc)
    return acc


@triton.jit
def _blocks_leaf(
    x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """_nibbles_leaf, a step several blocks of 128 k: first..end is whole steps, and a block has one scale a feature.

    A thread has two scales to load at least, the least that Triton copies ahead, as it does weights and x.
    """
    dtype: tl.constexpr = x_M.dtype.element_ty
    BLOCKS: tl.constexpr = BK // 128
    acc = tl.zeros((BN, BM), tl.float32)
    k_block = (tl.arange(0, BLOCKS) * 128)[None, :, None]
    n_N = n[:, None, None]
    for k in range(first, end, BK):
        scale, offset = _scale_at(
            scale_ptr, zero_ptr, k + k_block, end, n_N, N, scale_stride, 0, GROUP_K, ROWS, HAS_ZEROS, NARROW
        )
        byte = tl.multiple_of(k // 2, 64) + tl.arange(0, BK // 2)
        q = tl.load(w_N[:, None] + byte[None, :], mask=(n < N)[:, None], other=0).reshape(BN, BLOCKS, 64)
        kk = k + tl.arange(0, BK)
        x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=(m < M)[None, :], other=0.0)
        if NARROW:
            low, high = _narrow_weights(q, scale, offset, scale, offset, dtype)
        else:
            low = _weights(q & 15, scale, offset, 0, dtype, ON_GPU)
            high = _weights(q >> 4, scale, offset, 0, dtype, ON_GPU)
        w = tl.join(low, high).permute(0, 1, 3, 2).reshape(BN, BK)
        if ON_GPU:  # impure as above: of a join, Triton takes another order of k
            w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2)
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _bytes_leaf(
    x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """fp32 sum [BN, BM] over first..end, a step BK. The order is leaf_sum's; BLOCKED wants BK = 128."""
    dtype: tl.constexpr = x_M.dtype.element_ty
    EACH: tl.constexpr = GROUP_K % BK != 0
    acc = tl.zeros((BN, BM), tl.float32)
    n_N = n[:, None]
    next_s, next_z = _scale_at(
        scale_ptr, zero_ptr, first, end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, HAS_ZEROS, False
    )
    for k in range(first, end, BK):
        kk = k + tl.arange(0, BK)
        if EACH:
            scale, offset = _scale_at(
                scale_ptr, zero_ptr, kk[None, :], end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, HAS_ZEROS, False
            )
        else:
            scale, offset = next_s, next_z
            next_s, next_z = _scale_at(
                scale_ptr, zero_ptr, k + BK, end, n_N, N, scale_stride, KIND, GROUP_K, ROWS, HAS_ZEROS, False
            )
        x_ok = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (kk < end)[:, None]
        w_ok = n_N < N if EVEN_K else (n_N < N) & (kk < end)[None, :]
        q = tl.load(w_N[:, None] + kk[None, :], mask=w_ok, other=0.0 if KIND == 2 else 0)
        x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=x_ok, other=0.0)
        w = _weights(q, scale, offset, KIND, dtype, ON_GPU)
        if BLOCKED:
            acc = acc + tl.dot(w, x, tl.zeros((BN, BM), tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _quantized_leaf(
    x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKED: tl.constexpr, EVEN_K: tl.constexpr,
    NARROW: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    if KIND == _NIBBLES and BK > 128:
        acc = _blocks_leaf(
            x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            GROUP_K, ROWS, HAS_ZEROS, BM, BN, BK, NARROW, ON_GPU,
        )  # fmt: skip
    elif KIND == _NIBBLES:
        acc = _nibbles_leaf(
            x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            GROUP_K, ROWS, HAS_ZEROS, BM, BN, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    else:
        acc = _bytes_leaf(
            x_M, w_N, scale_ptr, zero_ptr, first, end, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, HAS_ZEROS, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["M"])
def dequant_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, out_ptr, bias_ptr, residual_ptr, M, N, leaf_k, leaves,
    x_stride_m, x_stride_k, w_stride_n, scale_stride, residual_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr, NARROW: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile, every leaf of it; with SPLIT one leaf (axis 1), into an fp32 partial out[leaf, M, N] without an
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
            x_M, w_N, scale_ptr, zero_ptr, first, first + leaf_k, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, HAS_ZEROS, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
        out_ptr += leaf.to(tl.int64) * M * N
    elif R3 == 1:
        acc = _quantized_leaf(
            x_M, w_N, scale_ptr, zero_ptr, 0, leaf_k, M, N, m, n, x_stride_k, scale_stride,
            KIND, GROUP_K, ROWS, HAS_ZEROS, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
        )  # fmt: skip
    else:
        acc = tl.zeros((BN, BM), tl.float32)
        t0, t1, t2, t3 = acc, acc, acc, acc
        for leaf in range(0, leaves):
            first = leaf * leaf_k
            acc = _quantized_leaf(
                x_M, w_N, scale_ptr, zero_ptr, first, first + leaf_k, M, N, m, n, x_stride_k, scale_stride,
                KIND, GROUP_K, ROWS, HAS_ZEROS, BM, BN, BK, BLOCKED, EVEN_K, NARROW, ON_GPU,
            )  # fmt: skip
            t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
        acc = root_of(t0, t1, t2, t3, R0, R1, R2)
    let_next_start(PDL)
    store_tile(
        acc, out_ptr, bias_ptr, residual_ptr, m[None, :], n[:, None], M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL
    )


@triton.jit
def expand_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, N, K, w_stride_n, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, BN: tl.constexpr,
    ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dequantized(): BN features and 128 k a program."""
    PARTS: tl.constexpr = 2 if KIND == _NIBBLES else 1
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    n = row[:, None]
    first = tl.program_id(0) * 128
    place = tl.arange(0, 128 // PARTS)[None, :]
    for part in tl.static_range(PARTS):
        k = first + part * 64 + place
        inside = (n < N) & (k < K)
        if KIND == _NIBBLES:
            q = tl.load(w_ptr + n.to(tl.int64) * w_stride_n + first // 2 + place, mask=inside, other=0)
            q = q & 15 if part == 0 else q >> 4
        else:
            q = tl.load(w_ptr + n.to(tl.int64) * w_stride_n + k, mask=inside, other=0.0 if KIND == _FLOAT8 else 0)
        if GROUP_K % 128 == 0:  # one scale a feature
            scale, offset = _scale_at(
                scale_ptr, zero_ptr, first, K, row, N, scale_stride, KIND, GROUP_K, ROWS, HAS_ZEROS, False
            )
            scale, offset = scale[:, None], offset[:, None]
        else:
            scale, offset = _scale_at(
                scale_ptr, zero_ptr, k, K, n, N, scale_stride, KIND, GROUP_K, ROWS, HAS_ZEROS, False
            )
        tl.store(
            out_ptr + n.to(tl.int64) * K + k,
            _weights(q, scale, offset, KIND, out_ptr.dtype.element_ty, ON_GPU),
            mask=inside,
        )
