"""What all families share on a GPU: the bitwise gate, launches and primitives of kernels."""
