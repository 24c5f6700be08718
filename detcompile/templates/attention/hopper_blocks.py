"""Reads of keys and values on Hopper GPUs: 64 keys at a time, in pieces, through tensor descriptors.

Legend: D head dim (64 or 128). A descriptor views keys or values as rows of one stride; `row_steps` gives the row at
which a cache block, and a head in it, begins.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.matmul import hopper as matmul_hopper

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def supports(k: Tensor, v: Tensor, paged: bool) -> bool:
    """Return True if descriptors can read k and v: [num_blocks, block_size, KV heads, D] or [B, T, KV heads, D]."""
    if not matmul_hopper.supports(k.device, k.dtype):
        return False
    d, block_size = k.shape[3], k.shape[1]
    if d not in (64, 128) or v.shape[3] != d or (paged and block_size % 64 and block_size not in (16, 32)):
        return False
    return all(has_rows(t) for t in (k, v)) and row_steps(k) == row_steps(v)


def has_rows(t: Tensor) -> bool:
    """Return True if t can be viewed as rows of one stride with a head's D values contiguous in each.

    Descriptors need strides of multiples of 16 bytes, and heads that begin at multiples of 64 columns.
    """
    batch, token, head, feature = t.stride()
    if feature != 1 or token == 0 or t.data_ptr() % 16 or token * t.element_size() % 16:
        return False
    return batch % token == 0 and (head % token == 0 if head >= token else head % 64 == 0)


def row_steps(t: Tensor) -> tuple[int, int, int]:
    """Return the rows from one batch (or block) to the next, and the rows and columns from one head to the next."""
    batch, token, head, _ = t.stride()
    return (batch // token, head // token, 0) if head >= token else (batch // token, 0, head)


def descriptor(t: Tensor, piece: int) -> TensorDescriptor:
    """Return a descriptor of t's rows (see `row_steps`), in pieces of ``piece`` rows x 64 columns."""
    batch_rows, head_rows, head_columns = row_steps(t)
    last = t.shape[2] - 1
    shape = [(t.shape[0] - 1) * batch_rows + last * head_rows + t.shape[1], last * head_columns + t.shape[3]]
    return TensorDescriptor(t, shape, [t.stride(1), 1], [piece, 64], TILE)


@gluon.jit
def sequence_of(index, cu_ptr, S, BQ: gl.constexpr, PER_SEQUENCE: gl.constexpr, WARPS: gl.constexpr):
    """scores.sequence_of for a program of WARPS warps."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    low = 0
    high = S + 1
    while high - low > 1:  # probes 32 places at once, because dependent loads dominate the time
        step = (high - low + 31) // 32
        place = low + (1 + lane) * step
        before = gl.load(cu_ptr + place, mask=place < high, other=0) // BQ + place * PER_SEQUENCE <= index
        low += gl.sum(((place < high) & before).to(gl.int32), 0) * step
        high = gl.minimum(low + step, high)
    return low


@gluon.jit
def row_of(table_ptr, n, last, block_rows, BLOCK_SIZE: gl.constexpr, I: gl.constexpr):
    """Row where piece I of the 64 keys from n on starts. Pieces past the last key repeat that key's block."""
    if BLOCK_SIZE == 0:
        row = n
    elif BLOCK_SIZE >= 64:
        row = gl.load(table_ptr + n // BLOCK_SIZE) * block_rows + n % BLOCK_SIZE
    else:
        row = gl.load(table_ptr + gl.minimum(n + I * BLOCK_SIZE, last - 1) // BLOCK_SIZE) * block_rows
    return row


@gluon.jit
def copy_tile(desc, r0, r1, r2, r3, column, full, tile, wanted, D: gl.constexpr, PIECES: gl.constexpr):
    """Copy 64 rows x D into tile if wanted, in pieces of rows x 64 columns; `full` already expects the bytes."""
    HALVES: gl.constexpr = D // 64
    pieces = tile._reinterpret(desc.dtype, [HALVES * PIECES, 64 // PIECES, 64], desc.layout)
    for half in gl.static_range(HALVES):
        at = column + half * 64
        tma.async_copy_global_to_shared(desc, [r0, at], full, pieces.index(half * PIECES), pred=wanted)
        if PIECES > 1:
            tma.async_copy_global_to_shared(desc, [r1, at], full, pieces.index(half * PIECES + 1), pred=wanted)
        if PIECES > 2:
            tma.async_copy_global_to_shared(desc, [r2, at], full, pieces.index(half * PIECES + 2), pred=wanted)
            tma.async_copy_global_to_shared(desc, [r3, at], full, pieces.index(half * PIECES + 3), pred=wanted)
