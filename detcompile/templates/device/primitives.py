"""Device functions that many kernels share: e^x, float32 from 16-bit values, and a barrier of all warps."""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.4426950408889634)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and later, 3.6


@triton.jit
def exponential(x, ON_GPU: tl.constexpr, FAST: tl.constexpr = False):
    """e^x as accurate as torch's: libdevice's, because tl.exp rounds x * log2(e). The interpreter only has tl.exp.

    FAST also rounds x * log2(e), uses the hardware's 2^x and flushes subnormals: two instructions instead of eight.
    """
    if FAST:
        return tl.exp2(x * LOG2_E)
    elif ON_GPU:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in fp32, for one operation whose result is rounded to dtype.

    LLVM computes such an operation in dtype if the mantissas of both operands fit, without checking their range: a
    bfloat16 outside float16's range, or among its subnormals, would be rounded to float16 first (seen with Triton 3.6
    and 3.7). LLVM cannot tell that bits shifted by 16 are a bfloat16's value.
    """
    if x.dtype == tl.bfloat16 and dtype == tl.float16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y
