"""Programmatic dependent launch: a kernel's programs start while the kernel before it in the stream still ends.

A kernel that is launched with `launch_options(device)` calls `wait_for_earlier` in every program, before its first
access to memory that another kernel writes and before its first store: it returns once every earlier kernel has ended
and all that it wrote is visible. So memory is ordered as without it, and the next kernel, whatever it is, may
still take it that the stream is in order. `let_next_start` says that the next kernel's programs may be put beside
those of this one; it orders nothing.

What runs before the wait may not depend on what it reads: it touches registers, shared memory, or the L2 cache.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "fetch_ahead",
    "fetch_rows_ahead",
    "gluon_let_next_start",
    "gluon_wait_for_earlier",
    "launch_options",
    "let_next_start",
    "overlaps",
    "wait_for_earlier",
]


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether the device has it: compute capability 9 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel with a constexpr PDL is launched with."""
    return {"PDL": True, "launch_pdl": True} if overlaps(device) else {"PDL": False}


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def fetch_rows_ahead(rows_ptr, first, ROWS: tl.constexpr, num_rows, pitch, width, PDL: tl.constexpr):
    """Asks for rows first..first + ROWS, each `width` numbers side by side, to be brought into the L2 cache.

    Safe before the wait, as `fetch_ahead`. The last 128 bytes of a row that does not begin at a multiple of 128 may be
    left out.
    """
    if PDL:
        LINES: tl.constexpr = 64  # of a row at a time, 128 bytes each
        PER_LINE: tl.constexpr = 1024 // rows_ptr.dtype.element_ty.primitive_bitwidth
        row = first + tl.arange(0, ROWS)[:, None]
        for start in range(0, width, LINES * PER_LINE):
            column = start + tl.arange(0, LINES)[None, :] * PER_LINE
            wanted = (row < num_rows) & (column < width)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r", [rows_ptr + row.to(tl.int64) * pitch + column, wanted.to(tl.int32)], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def gluon_wait_for_earlier(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def gluon_let_next_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def fetch_ahead(pointers, num_bytes, wanted):
    """Asks for num_bytes (a multiple of 16) at each of the pointers that are wanted to be brought into the L2 cache.

    Every access goes through that cache, so this is safe before the wait, whoever writes there.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r", [pointers.to(gl.int64), num_bytes, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
