"""Inductor's lowering of each operation."""

from torch._inductor.lowering import fallbacks, lowerings

NAMES = {
    "fallbacks": "Operations that Inductor leaves to ATen kernels. Without it: one of them counts as a function of "
    "each element.",
    "lowerings": "Functions that lower each operation. Without it: every head of every layer recomputes sines and "
    "cosines.",
}
