"""Dequantize weights, in registers or with a separate kernel in memory.

Legend: N output features, K summed features. KIND is 0 for nibbles, 1 for int8, 2 for float8
(templates/quantized/weights.py). OFFSET says what offset_ptr holds: 0 nothing, 1 zeros, 2 mins.

The assembly is marked impure, so that Triton does not look through it: an operand that Triton knows to come from bytes
enters mma.sync with its k in another order, which changes bits.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.device.primitives import widened

NIBBLES = tl.constexpr(0)
BYTES = tl.constexpr(1)
FLOAT8 = tl.constexpr(2)
MINS = tl.constexpr(2)
_MAGIC = tl.constexpr(8388608)  # 2^23: or-ing q into its bits gives the float 2^23 + q
# Inputs: four bytes, scale and offset of their low and high halves; outputs: four weights of each (narrow_weights).
NARROW_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 a, b;"
    "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    "lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;"
    "shr.b32 a, a, 4; shr.b32 b, b, 4;"
    "lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;"
    "sub.rn.bf16x2 $0, $0, $7; sub.rn.bf16x2 $1, $1, $8; sub.rn.bf16x2 $2, $2, $11; sub.rn.bf16x2 $3, $3, $12;"
    "mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $6; mul.rn.bf16x2 $2, $2, $9; mul.rn.bf16x2 $3, $3, $10;}"
)
# The same below compute capability 9, whose only arithmetic on bfloat16 pairs is fma: a - b = a * 1 - b and
# a * b = a * b - 0 round once, too.
NARROW_BFLOAT16_BY_FMA = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e, f, one, zero; mov.b32 one, 0x3F803F80; mov.b32 zero, 0x80008000;"
    "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    "lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;"
    "shr.b32 a, a, 4; shr.b32 b, b, 4;"
    "lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;"
    "neg.bf16x2 c, $7; neg.bf16x2 d, $8; neg.bf16x2 e, $11; neg.bf16x2 f, $12;"
    "fma.rn.bf16x2 $0, $0, one, c; fma.rn.bf16x2 $1, $1, one, d;"
    "fma.rn.bf16x2 $2, $2, one, e; fma.rn.bf16x2 $3, $3, one, f;"
    "fma.rn.bf16x2 $0, $0, $5, zero; fma.rn.bf16x2 $1, $1, $6, zero;"
    "fma.rn.bf16x2 $2, $2, $9, zero; fma.rn.bf16x2 $3, $3, $10, zero;}"
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
def scale_at(
    scale_ptr, offset_ptr, k, k_end, n, N, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The scale, and the offset: min, or z plus what `wide_weights` adds to q. k and n broadcast to the result.

    With NARROW both are of the scales' dtype, for `narrow_weights`.
    """
    place = k // GROUP_K * scale_stride + n // ROWS
    inside = (n < N) & (k < k_end)
    scale = tl.load(scale_ptr + place, mask=inside, other=0.0)
    if OFFSET:
        zero = tl.load(offset_ptr + place, mask=inside, other=0).to(tl.float32)
    else:
        zero = tl.full(scale.shape, 8.0 if KIND == NIBBLES else 0.0, tl.float32)
    if NARROW:
        offset = (zero + (128.0 if scale.dtype == tl.bfloat16 else 1024.0)).to(scale.dtype)
    else:
        scale = widened(scale, tl.float16)  # the only dtype that LLVM would narrow to
        offset = zero if OFFSET == MINS else zero + (_MAGIC + 128 if KIND == BYTES else _MAGIC)
    return scale, offset


@triton.jit
def wide_weights(
    q, scale, offset, KIND: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr, ON_GPU: tl.constexpr
):  # fmt: skip
    """round((q - z) * scale), or round(q * scale + min); the difference is exact."""
    if KIND == FLOAT8:
        value = q.to(tl.float32) * scale
    else:
        if KIND == BYTES:
            q = q.to(tl.uint8, bitcast=True) ^ 128
        if ON_GPU:
            number = tl.inline_asm_elementwise(
                "prmt.b32 $0, $4, 0x4B000000, 0x7440; prmt.b32 $1, $4, 0x4B000000, 0x7441;"
                "prmt.b32 $2, $4, 0x4B000000, 0x7442; prmt.b32 $3, $4, 0x4B000000, 0x7443;",
                "=r,=r,=r,=r,r", [q], dtype=tl.float32, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            number = (q.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        if OFFSET == MINS:
            value = (number - (_MAGIC + 128 if KIND == BYTES else _MAGIC)) * scale + offset
        else:
            value = (number - offset) * scale
    return value.to(dtype)


@triton.jit
def narrow_weights(q, low, low_offset, high, high_offset, dtype: tl.constexpr):
    """wide_weights of both nibbles of a byte, two at a time in 16 bits: 128 + q is a bfloat16, 1024 + q a float16.

    Scales have that dtype, so the single rounding of their product with the exact difference equals the definition's.
    """
    if dtype == tl.bfloat16:
        w_low, w_high = tl.inline_asm_elementwise(
            NARROW_BFLOAT16 if cuda_capability_geq(9, 0) else NARROW_BFLOAT16_BY_FMA, NARROW_REGISTERS,
            [q, low, low_offset, high, high_offset],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4,
        )  # fmt: skip
    else:
        w_low, w_high = tl.inline_asm_elementwise(
            NARROW_FLOAT16, NARROW_REGISTERS, [q, low, low_offset, high, high_offset],
            dtype=(tl.float16, tl.float16), is_pure=False, pack=4,
        )  # fmt: skip
    return w_low, w_high


@triton.jit
def expand_kernel(
    w_ptr, scale_ptr, offset_ptr, out_ptr, N, K, w_stride_n, scale_stride,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr,
    ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dequantized(): BN features and 128 k per program."""
    PARTS: tl.constexpr = 2 if KIND == NIBBLES else 1
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    n = row[:, None]
    first = tl.program_id(0) * 128
    place = tl.arange(0, 128 // PARTS)[None, :]
    for part in tl.static_range(PARTS):
        k = first + part * 64 + place
        inside = (n < N) & (k < K)
        if KIND == NIBBLES:
            q = tl.load(w_ptr + n.to(tl.int64) * w_stride_n + first // 2 + place, mask=inside, other=0)
            q = q & 15 if part == 0 else q >> 4
        else:
            q = tl.load(w_ptr + n.to(tl.int64) * w_stride_n + k, mask=inside, other=0.0 if KIND == FLOAT8 else 0)
        if GROUP_K % 128 == 0:  # one scale per feature
            scale, offset = scale_at(
                scale_ptr, offset_ptr, first, K, row, N, scale_stride, KIND, GROUP_K, ROWS, OFFSET, False
            )
            scale, offset = scale[:, None], offset[:, None]
        else:
            scale, offset = scale_at(
                scale_ptr, offset_ptr, k, K, n, N, scale_stride, KIND, GROUP_K, ROWS, OFFSET, False
            )
        tl.store(
            out_ptr + n.to(tl.int64) * K + k,
            wide_weights(q, scale, offset, KIND, OFFSET, out_ptr.dtype.element_ty, ON_GPU),
            mask=inside,
        )
