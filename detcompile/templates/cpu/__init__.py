"""The C++ kernels, a library for each instruction set, and the floating-point mode of threads."""
