"""Tokens of the next step on the GPU: the argmax of each row of logits, written where the next step reads its ids.

Legend: R rows, V vocabulary size, W logits per program, TILES = ceil(V / W), T tokens of a step.

A maximum needs no order. A logit and its id are packed into 64 bits that order by the higher logit, then the lower id.
NaN is above all, as in torch.argmax, and zeros of both signs are equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier

LIKELIEST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_WIDTH = 2048
_NAN = tl.constexpr(0x7FFFFFFF)  # as a key, an int32 that orders logits: above infinity's
_INFINITE = tl.constexpr(0x7F800000)
_MINUS_INFINITE = tl.constexpr(-0x7F800001)
_LAST_ID = tl.constexpr(0x7FFFFFFF)  # reverses ids: the lowest becomes the highest


@triton.jit
def _rank(logit, token):
    x = logit.to(tl.float32) + 0.0  # -0 becomes +0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, _NAN, key)
    return (key.to(tl.int64) << 32) | (token ^ _LAST_ID).to(tl.int64)


@triton.jit
def _best_of_tile_kernel(
    logits_ptr, best_ptr, row_stride, V: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The rank of the argmax among W tokens of a row: [R, TILES]."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    token = program % TILES * W + tl.arange(0, W)
    logit = tl.load(logits_ptr + row * row_stride + token, mask=token < V, other=-float("inf"))
    rank = tl.where(token < V, _rank(logit, token), -(1 << 63))
    tl.store(best_ptr + program, tl.max(rank, 0))


@triton.jit
def _best_of_row_kernel(
    best_ptr, out_ptr, sampled_ptr, TILES: tl.constexpr, LANES: tl.constexpr, HAS_SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, LANES)
    best = tl.max(tl.load(best_ptr + row * TILES + tile, mask=tile < TILES, other=-(1 << 63)), 0)
    key = best >> 32
    token = (best & 0xFFFFFFFF) ^ _LAST_ID
    bad = (key >= _INFINITE) | (key <= _MINUS_INFINITE)
    tl.store(out_ptr + row * 2, bad.to(tl.int64))
    tl.store(out_ptr + row * 2 + 1, token)
    if HAS_SAMPLED:
        tl.store(sampled_ptr + row, token)


@triton.jit(do_not_specialize=["T"])
def _fill_pending_kernel(ids_ptr, pending_ptr, sampled_ptr, out_ptr, T, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(pending_ptr + t, mask=t < T, other=-1)
    known = tl.load(ids_ptr + t, mask=t < T, other=0)
    drawn = tl.load(sampled_ptr + row, mask=row >= 0, other=0)
    tl.store(out_ptr + t, tl.where(row >= 0, drawn, known), mask=t < T)


def likeliest_cuda(logits: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Return [R, 2] int64: 1 if a row's highest logit is NaN or infinite, and the lowest id that has it.

    Args:
        logits: [R, V], of one of LIKELIEST_DTYPES.
        sampled: int64, contiguous, of length R or more: also receives the ids, from its start on.
    """
    R, V = logits.shape
    assert logits.dtype in LIKELIEST_DTYPES and (sampled is None or (sampled.is_contiguous() and len(sampled) >= R))
    out = torch.empty(R, 2, dtype=torch.int64, device=logits.device)
    if R == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tiles = triton.cdiv(V, _WIDTH)
    best = torch.empty(R, tiles, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    _best_of_tile_kernel[(R * tiles,)](
        logits, best, logits.stride(0), V=V, TILES=tiles, W=_WIDTH, num_warps=4, **options
    )
    _best_of_row_kernel[(R,)](
        best, out, out if sampled is None else sampled, TILES=tiles, LANES=max(32, triton.next_power_of_2(tiles)),
        HAS_SAMPLED=sampled is not None, num_warps=1, **options,
    )  # fmt: skip
    return out


def fill_pending_cuda(input_ids: Tensor, pending: Tensor, sampled: Tensor) -> Tensor:
    """Return input_ids [T], with sampled[pending] where pending [T] >= 0; all int64 and contiguous."""
    assert input_ids.is_contiguous() and pending.is_contiguous() and sampled.is_contiguous()
    out = torch.empty_like(input_ids)
    T = len(input_ids)
    if T:
        _fill_pending_kernel[(triton.cdiv(T, 256),)](
            input_ids, pending, sampled, out, T, BLOCK=256, num_warps=1 if T <= 32 else 4,
            **launch_options(input_ids.device),
        )  # fmt: skip
    return out
