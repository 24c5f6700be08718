"""Where all warps of a Gluon program meet, by the name that the installed Triton has for it."""

from triton.experimental.gluon import language as gl

__all__ = ["barrier"]

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and later, 3.6
