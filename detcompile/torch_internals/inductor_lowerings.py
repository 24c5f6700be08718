"""What Inductor makes of each operation."""

from torch._inductor.lowering import fallbacks, lowerings

__all__ = ["fallbacks", "lowerings"]

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"
NAMES = {
    "fallbacks": "Operations that Inductor leaves to kernels of ATen. Without it: one of them passes for a function of "
    "each element.",
    "lowerings": "Functions that lower each operation. Without it: every head of every layer computes sines and "
    "cosines anew.",
}
