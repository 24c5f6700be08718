"""e^x on the GPU as accurately as torch's, for every kernel that takes one, or as a result of 16 bits needs it."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["LOG2_E", "exponential"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponential(x, ON_GPU: tl.constexpr, FAST: tl.constexpr = False):
    """libdevice's, where tl.exp rounds x * log2(e) first; the interpreter has tl.exp alone.

    FAST rounds it too, takes the hardware's 2^x and counts subnormal numbers as zeros: two instructions, not eight.
    """
    if FAST:
        return tl.exp2(x * LOG2_E)
    elif ON_GPU:
        return libdevice.exp(x)
    else:
        return tl.exp(x)
