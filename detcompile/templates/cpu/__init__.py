"""The C++ kernels, one library per instruction set, and the floating-point mode of threads."""
