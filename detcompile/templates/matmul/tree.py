"""The tree over a sum's leaves, for kernels that process the leaves in order."""

import triton
import triton.language as tl

LEVELS = 4  # of a tree that one kernel supports


def tree_options(radices: tuple[int, ...]) -> dict[str, int]:
    """Return the radices of up to LEVELS levels as kernel arguments R0 to R3."""
    padded = (1,) * (LEVELS - len(radices)) + radices
    return {f"R{i}": radix for i, radix in enumerate(padded)}


@triton.jit
def close_leaf(acc, leaf, t0, t1, t2, t3, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    """Add one leaf to its parent, and each completed node to its own parent. R3 is the level of the leaves.

    Unused levels are at the root and have radix 1. t0 is the total after the last leaf.
    """
    if leaf % R3 == 0:
        t3 = acc
    else:
        t3 = t3 + acc
    if R2 * R1 * R0 > 1:
        if leaf % R3 == R3 - 1:
            if (leaf // R3) % R2 == 0:
                t2 = t3
            else:
                t2 = t2 + t3
            if R1 * R0 > 1:
                if (leaf // R3) % R2 == R2 - 1:
                    if (leaf // (R3 * R2)) % R1 == 0:
                        t1 = t2
                    else:
                        t1 = t1 + t2
                    if R0 > 1:
                        if (leaf // (R3 * R2)) % R1 == R1 - 1:
                            if leaf // (R3 * R2 * R1) == 0:
                                t0 = t1
                            else:
                                t0 = t0 + t1
    return t0, t1, t2, t3


@triton.jit
def root_of(t0, t1, t2, t3, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """The total, which is the node of the highest used level."""
    if R0 > 1:
        root = t0
    elif R1 > 1:
        root = t1
    elif R2 > 1:
        root = t2
    else:
        root = t3
    return root
