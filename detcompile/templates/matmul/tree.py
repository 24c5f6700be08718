"""The tree over a sum's leaves, in kernels that walk over the leaves from the first to the last."""

import triton
import triton.language as tl

__all__ = ["LEVELS", "close_leaf", "root_of", "tree_options"]

LEVELS = 4  # of a tree that one kernel can hold


def tree_options(radices: tuple[int, ...]) -> dict[str, int]:
    """The radices of up to LEVELS levels as a kernel takes them, R0 to R3."""
    padded = (1,) * (LEVELS - len(radices)) + radices
    return {f"R{i}": radix for i, radix in enumerate(padded)}


@triton.jit
def close_leaf(acc, leaf, t0, t1, t2, t3, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    """One leaf more: adds it to its parent, and each node that is complete to its own. R3 is the level of the leaves.

    Unused levels are at the root and have radix 1. t0 is the whole sum after the last leaf.
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
    """The whole sum, which is the node of the highest level that is used."""
    if R0 > 1:
        root = t0
    elif R1 > 1:
        root = t1
    elif R2 > 1:
        root = t2
    else:
        root = t3
    return root
