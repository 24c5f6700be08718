"""Integers of a launch. Triton's functions of these names serve kernels too, and take the host some microseconds."""

__all__ = ["cdiv", "next_power_of_2"]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n; n > 0."""
    assert n > 0
    return 1 << (n - 1).bit_length()
