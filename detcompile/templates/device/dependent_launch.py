"""Programmatic dependent launch: a kernel's programs start while the previous kernel in the stream is finishing.

A kernel launched with `launch_options(device)` calls `wait_for_earlier` in every program before its first access to
memory that another kernel writes, and before its first store. The call returns once all earlier kernels have ended and
their writes are visible, so memory is ordered as in an ordinary stream. `let_next_start` allows the next kernel's
programs to become resident beside this kernel's; it orders nothing.

Code before the wait must not depend on memory it reads, except on weights that `cuda_graphs.is_constant` names: it may
use registers, shared memory, or prefetch into L2.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return True if the device supports it (compute capability 9 or higher)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that has a constexpr PDL."""
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
    """Prefetch rows first..first + ROWS into the L2 cache; each has `width` contiguous numbers.

    Safe before the wait, as `fetch_ahead`. For a row that is not 128-byte aligned, the last 128 bytes may be skipped.
    """
    if PDL:
        LINES: tl.constexpr = 64  # cache lines of 128 bytes of a row per iteration
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


@triton.jit
def fetch_line_ahead(pointers, PDL: tl.constexpr):
    """Prefetch the 128 bytes at each pointer into the L2 cache; safe before the wait, as `fetch_ahead`.

    For small operands: while weights fill the memory's queue, a miss takes several microseconds.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@gluon.jit
def gluon_wait_for_earlier(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gluon_let_next_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def fetch_ahead(pointers, num_bytes, wanted):
    """Prefetch num_bytes (a multiple of 16) at each pointer where `wanted` is set into the L2 cache.

    Safe before the wait, because every access goes through L2, whichever kernel writes there.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r", [pointers.to(gl.int64), num_bytes, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
