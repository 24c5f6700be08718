"""float32 from narrower values, where LLVM must not see that it is."""

import triton
import triton.language as tl

__all__ = ["widened"]


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in fp32, to be multiplied by, or added to, another widened value and rounded to dtype.

    LLVM shrinks such an operation to dtype where the mantissas fit, and of bfloat16 and float16 looks at nothing else:
    a bfloat16 beyond float16's range, or among its subnormals, would be rounded to it first (seen with Triton 3.6 and
    3.7). It does not know that bits shifted by 16 are bfloat16's value.
    """
    if x.dtype == tl.bfloat16 and dtype == tl.float16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y
