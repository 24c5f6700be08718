"""Kernels of exact sums over tokens: products of leaves, accumulated in two integers per element, and sums of rows.

Legend: T rows, N K features, L leaves, BT BN BK tile sizes.

A leaf's fp32 sum p becomes multiples of 2^GRID without a conversion. p + 1.5 * 2^(46 + GRID) holds p rounded to a
multiple of 2^(GRID + 23) in its low bits; the exact remainder of p plus 1.5 * 2^(23 + GRID) holds the rest. The bits of
both are added as integers modulo 2^32, and the constants' bits, whose count is known at the end, are subtracted. This
allows magnitudes up to 2^(45 + GRID) and 2^28 units of the first kind, which exceeds the limit.
"""

import triton
import triton.language as tl

from detcompile.templates.matmul.kernels import grouped

FP32_BLOCK = tl.constexpr(128)


@triton.jit
def greater_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_rows(x, ON_GPU: tl.constexpr):
    """[BN, BK] -> [BN]: the largest magnitude; NaN if there is a NaN."""
    if ON_GPU:
        return tl.reduce(tl.abs(x), 1, greater_or_nan)
    else:  # the interpreter would loop over pairs; magnitudes order like their bits, with NaN on top
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def _on_grid(x, most, GRID: tl.constexpr):
    """fp32 -> float64 multiples of 2^GRID; +inf for magnitudes above `most`, NaN for nonfinite values."""
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (52 + GRID)
    x = tl.where(tl.abs(x) <= most, x, (x - x) + float("inf"))
    return (x.to(tl.float64) + MAGIC) - MAGIC


@triton.jit
def _total_of_rows(sums, magnitudes, LIMIT: tl.constexpr):
    """Sums of columns; +inf where the magnitudes' sum exceeds the limit."""
    total = tl.sum(sums, 0)  # exact, so the order does not matter
    exact = (tl.sum(magnitudes, 0) <= LIMIT) | (total != total)
    return tl.where(exact, total, float("inf"))


@triton.jit
def add_leaf(upper, lower, p, GRID: tl.constexpr):
    """Add a leaf's sum to the two integers of each element."""
    UPPER: tl.constexpr = 1.5 * 2.0 ** (46 + GRID)
    LOWER: tl.constexpr = 1.5 * 2.0 ** (23 + GRID)
    high = p + UPPER
    rest = p - (high - UPPER)
    low = rest + LOWER
    return upper + high.to(tl.int32, bitcast=True), lower + low.to(tl.int32, bitcast=True)


@triton.jit
def carried(upper, lower, leaves, LOWER_BITS: tl.constexpr):
    """The same sum after carrying; the lower part of `leaves` leaves, an int32, is small and without its constant."""
    lower = lower - leaves * LOWER_BITS
    carry = lower >> 23
    return upper + carry, lower - (carry << 23)


@triton.jit
def total_of(
    upper, lower, worst, L, GRID: tl.constexpr, UPPER_BITS: tl.constexpr, LOWER_BITS: tl.constexpr
):  # fmt: skip
    """The float64 sums of L leaves. A row with a leaf beyond exactness is +inf; one with a nonfinite leaf is NaN."""
    upper, lower = carried(upper, lower, L % 256, LOWER_BITS)
    units = (upper - L * UPPER_BITS).to(tl.float64)
    total = units * 2.0 ** (GRID + 23) + lower.to(tl.float64) * 2.0**GRID
    most = tl.minimum(2.0 ** (51 + GRID) / L, 2.0 ** (45 + GRID))
    beyond = tl.where(worst < float("inf"), float("inf"), float("nan")).to(tl.float64)
    return tl.where((worst <= most)[:, None], total, beyond[:, None])


@triton.jit
def _step(
    acc, g, x, t, end, n, k, N, K, g_stride, x_stride, BT: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """acc + g[t : t + BT]^T @ x[t : t + BT]; with TAIL rows from `end` on are read as zeros."""
    inside = (t + tl.arange(0, BT) < end)[:, None]
    if TMA:
        g_rows, x_rows = g.load([t, n]), x.load([t, k])
        if TAIL:
            g_rows, x_rows = tl.where(inside, g_rows, 0.0), tl.where(inside, x_rows, 0.0)
    else:
        g_ok, x_ok = (n < N)[None, :], (k < K)[None, :]
        if TAIL:
            g_ok, x_ok = g_ok & inside, x_ok & inside
        at = (t + tl.arange(0, BT)).to(tl.int64)[:, None]
        g_rows = tl.load(g + n[None, :] + at * g_stride, mask=g_ok, other=0.0)
        x_rows = tl.load(x + k[None, :] + at * x_stride, mask=x_ok, other=0.0)
    return tl.dot(tl.trans(g_rows), x_rows, acc, input_precision="ieee")


@triton.jit
def _leaf(
    g, x, start, end, n, k, N, K, g_stride, x_stride,
    BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BLOCKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """fp32 sum over rows start..end: [BN, BK]."""
    acc = tl.zeros((BN, BK), tl.float32)
    if BLOCKED:
        for block in range(start, end, FP32_BLOCK):
            part = tl.zeros((BN, BK), tl.float32)
            for t in range(block, tl.minimum(block + FP32_BLOCK, end), BT):
                part = _step(part, g, x, t, end, n, k, N, K, g_stride, x_stride, BT, TMA, True)
            acc = acc + part
    else:
        whole = start + (end - start) // BT * BT
        for t in range(start, whole, BT):
            acc = _step(acc, g, x, t, end, n, k, N, K, g_stride, x_stride, BT, TMA, False)
        if whole < end:
            acc = _step(acc, g, x, whole, end, n, k, N, K, g_stride, x_stride, BT, TMA, True)
    return acc


@triton.jit(do_not_specialize=["L", "rows_a_token"])
def token_matmul_kernel(
    g, x, leaves_ptr, out_ptr, L, rows_a_token, N, K, g_stride, x_stride,
    GRID: tl.constexpr, UPPER_BITS: tl.constexpr, LOWER_BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BT: tl.constexpr, GROUP: tl.constexpr, BLOCKED: tl.constexpr, TMA: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One tile of out [N, K] float64, over all leaves. g and x: pointers, or with TMA descriptors of [BT, BN | BK].

    A row of the tile with a magnitude beyond exactness is +inf; one with a nonfinite sum is NaN.
    """
    tile_n, tile_k = grouped(tl.program_id(0), N, K, BN, BK, GROUP)
    n, k = tile_n * BN + tl.arange(0, BN), tile_k * BK + tl.arange(0, BK)
    upper, lower = tl.zeros((BN, BK), tl.int32), tl.zeros((BN, BK), tl.int32)
    worst = tl.zeros((BN,), tl.float32)
    start = tl.load(leaves_ptr) * rows_a_token
    for leaf in range(L):
        end = tl.load(leaves_ptr + leaf + 1) * rows_a_token
        if TMA:
            acc = _leaf(
                g, x, start, end, tile_n * BN, tile_k * BK, N, K, g_stride, x_stride, BN, BK, BT, BLOCKED, TMA
            )  # fmt: skip
        else:
            acc = _leaf(g, x, start, end, n, k, N, K, g_stride, x_stride, BN, BK, BT, BLOCKED, TMA)
        upper, lower = add_leaf(upper, lower, acc, GRID)
        largest = largest_of_rows(acc, ON_GPU)
        worst = greater_or_nan(worst, largest)
        if (leaf + 1) % 256 == 0:  # the lower parts of 256 leaves, 23 bits each, fit in 32 bits
            upper, lower = carried(upper, lower, tl.full((1, 1), 256, tl.int32), LOWER_BITS)
        start = end
    total = total_of(upper, lower, worst, L, GRID, UPPER_BITS, LOWER_BITS)
    pointers = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(pointers, total, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def token_sum_kernel(
    g_ptr, sums_ptr, magnitudes_ptr, T, N, g_stride,
    GRID: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of up to ROWS rows (axis 1) of BC columns (axis 0): [programs, N] float64."""
    LIMIT: tl.constexpr = 2.0 ** (51 + GRID)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * ROWS
    sums, magnitudes = tl.zeros((BR, BC), tl.float64), tl.zeros((BR, BC), tl.float64)
    for start in tl.range(first, tl.minimum(first + ROWS, T), BR, num_stages=4):
        row = start + tl.arange(0, BR)
        ok = (row < T)[:, None] & (column < N)[None, :]
        g = tl.load(g_ptr + row.to(tl.int64)[:, None] * g_stride + column[None, :], mask=ok, other=0.0)
        rounded = _on_grid(g.to(tl.float32), LIMIT, GRID)
        sums += rounded
        magnitudes += tl.abs(rounded)
    at = tl.program_id(1) * N + column
    # exact, so the order does not matter
    tl.store(sums_ptr + at, tl.sum(sums, 0), mask=column < N)
    tl.store(magnitudes_ptr + at, tl.sum(magnitudes, 0), mask=column < N)


@triton.jit(do_not_specialize=["parts"])
def token_total_kernel(
    sums_ptr, magnitudes_ptr, out_ptr, parts, N, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Sums of the results [parts, N] of token_sum_kernel."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    sums, magnitudes = tl.zeros((BR, BC), tl.float64), tl.zeros((BR, BC), tl.float64)
    for start in tl.range(0, parts, BR, num_stages=3):
        part = start + tl.arange(0, BR)
        ok = (part < parts)[:, None] & (column < N)[None, :]
        at = part[:, None] * N + column[None, :]
        sums += tl.load(sums_ptr + at, mask=ok, other=0.0)
        magnitudes += tl.load(magnitudes_ptr + at, mask=ok, other=0.0)
    tl.store(out_ptr + column, _total_of_rows(sums, magnitudes, 2.0 ** (51 + GRID)), mask=column < N)


@triton.jit
def token_scatter_kernel(
    g_ptr, ids_ptr, order_ptr, ends_ptr, out_ptr, D, g_stride, GRID: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The rows of one id, BC columns (axis 1). Axis 0: places in the sorted ids; the first place of an id does the
    work. order: rows of g in sorted order; ends: the end of each place's id."""
    LIMIT: tl.constexpr = 2.0 ** (51 + GRID)
    place = tl.program_id(0)
    row_of_out = tl.load(ids_ptr + place)
    row_before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    first, end = tl.load(order_ptr + place), tl.load(ends_ptr + place)
    if row_before == row_of_out:
        return
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = column < D
    if end == place + 1:
        g = tl.load(g_ptr + first * g_stride + column, mask=inside, other=0.0)
        total = _on_grid(g.to(tl.float32), LIMIT, GRID)
    else:
        sums, magnitudes = tl.zeros((BR, BC), tl.float64), tl.zeros((BR, BC), tl.float64)
        for start in range(place, end.to(tl.int32), BR):
            at = start + tl.arange(0, BR)
            row = tl.load(order_ptr + at, mask=at < end, other=0)
            ok = (at < end)[:, None] & inside[None, :]
            g = tl.load(g_ptr + row[:, None] * g_stride + column[None, :], mask=ok, other=0.0)
            rounded = _on_grid(g.to(tl.float32), LIMIT, GRID)
            sums += rounded
            magnitudes += tl.abs(rounded)
        total = _total_of_rows(sums, magnitudes, LIMIT)
    tl.store(out_ptr + row_of_out * D + column, total, mask=inside)
