"""float32 from 16-bit values, hidden from LLVM where it would compute in float16 instead."""

import triton
import triton.language as tl

__all__ = ["widened"]


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in fp32, for one operation whose result is rounded to dtype.

    LLVM does such an operation in dtype if the mantissas of both operands fit, and does not look at their range: a
    bfloat16 beyond float16's range, or among its subnormals, would be rounded to float16 first (seen with Triton 3.6
    and 3.7). It does not know that bits shifted by 16 are bfloat16's value.
    """
    if x.dtype == tl.bfloat16 and dtype == tl.float16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y
