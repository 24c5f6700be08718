"""Products of rows with their experts' weights on the GPU, summed like matmul's, by the same `leaf_sum`.

Legend: M rows (a token's choice of an expert), C choices of a token, E experts, N output features, K summed features.

| kernel | for |
|---|---|
| decode_kernel | up to BM rows: one program per tile of N and expert with rows, without sorting |
| group_rows_kernel, then grouped_kernel | any number: rows sorted stably by expert, tiles of one expert's rows |
| the same, gather_rows_kernel, sorted_kernel | many: x copied in that order, so that descriptors read both operands |

No program waits for another, none adds atomically, and the host reads nothing: the rows and tiles are computed on the
device, with as many programs as the worst case needs. A row's sum depends only on its own operands. An id outside [0,
E)
means no expert, group E: its rows are zeros. With a tree (R3 > 1) open nodes are kept in registers.
"""

import triton
import triton.language as tl

from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.matmul.kernels import grouped, leaf_sum
from detcompile.templates.matmul.tree import close_leaf, root_of


@triton.jit
def _groups_of(ids, E: tl.constexpr):
    return tl.where((ids < 0) | (ids > E), E, ids).to(tl.int32)


@triton.jit(do_not_specialize=["M", "num_tiles"])
def group_rows_kernel(
    ids_ptr, order_ptr, tiles_ptr, M, num_tiles,
    E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program g writes the rows of group g, ascending, to order [M], and its tiles to tiles [num_tiles + 1, 3].

    A tile is (group, first, end) with places in order; unused tiles have group -1. The last row begins with the number
    of used tiles. BINS > E + 1.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    group = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, M, CHUNK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < M, other=0)
        counts += tl.histogram(tl.where(first + lane < M, _groups_of(ids, E), BINS - 1), BINS).to(tl.int32)
    bins = tl.arange(0, BINS)
    start = tl.sum(tl.where(bins < group, counts, 0))
    count = tl.sum(tl.where(bins == group, counts, 0))
    tile = tl.sum(tl.where(bins < group, (counts + BM - 1) // BM, 0))
    group_tiles = (count + BM - 1) // BM
    for i in range(0, group_tiles, BINS):
        mine = i + bins < group_tiles
        place = tiles_ptr + (tile + i + bins) * 3
        tl.store(place, group + bins * 0, mask=mine)
        tl.store(place + 1, start + (i + bins) * BM, mask=mine)
        tl.store(place + 2, start + count + bins * 0, mask=mine)
    if group == E:
        tl.store(tiles_ptr + num_tiles * 3, tile + group_tiles)
        for i in range(tile + group_tiles, num_tiles, BINS):
            tl.store(tiles_ptr + (i + bins) * 3, bins * 0 - 1, mask=i + bins < num_tiles)
    for first in range(0, M, CHUNK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < M, other=0)
        members = ((first + lane < M) & (_groups_of(ids, E) == group)).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(members, 0) - 1, first + lane, mask=members > 0)
        start += tl.sum(members)


@triton.jit
def _descriptor_sum(
    x_M, w_desc, w_row, k_first, K, M, m, x_stride_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """leaf_sum of a Sequential leaf up to K, with weights read through a descriptor of [E * N, K of all leaves]."""
    acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    for k in range(k_first, K, BK):
        kk = k + tl.arange(0, BK)
        w = w_desc.load([w_row, k])
        if SWAP:
            inside = (m < M)[None, :] if EVEN_K else (m < M)[None, :] & (kk < K)[:, None]
            x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=inside, other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            inside = (m < M)[:, None] if EVEN_K else (m < M)[:, None] & (kk < K)[None, :]
            x = tl.load(x_M[:, None] + (kk * x_stride_k)[None, :], mask=inside, other=0.0)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _store(acc, out_ptr, bias_ptr, m, n, M, N, group, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr):
    """Store out[m] = round(acc + bias[group]); m and n are vectors."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + group.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
        acc = acc + (bias[:, None] if SWAP else bias[None, :])
    if SWAP:
        m, n = m[None, :], n[:, None]
    else:
        m, n = m[:, None], n[None, :]
    tl.store(out_ptr + m.to(tl.int64) * N + n, acc.to(out_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _leaf(
    x_M, w_ptr, w_N, w_row, k_first, k_end, M, N, m, n, x_stride_k, w_stride_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        acc = _descriptor_sum(x_M, w_ptr, w_row, k_first, k_end, M, m, x_stride_k, BM, BN, BK, SWAP, EVEN_K)
    else:
        acc = leaf_sum(x_M, w_N, k_first, k_end, M, N, m, n, x_stride_k, w_stride_k, BM, BN, BK, SWAP, BLOCKED, EVEN_K)
    return acc


@triton.jit
def _expert_tile(
    x_ptr, w_ptr, out_ptr, bias_ptr, m, first_n, group, M, N, leaf_k, leaves,
    x_stride_m, x_stride_k, w_stride_e, w_stride_n, w_stride_k,
    E: tl.constexpr, CHOICES: tl.constexpr, HAS_BIAS: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute, round and store rows m (M for none) of one group, BN features."""
    n = first_n + tl.arange(0, BN)
    if group == E:
        zeros = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
        _store(zeros, out_ptr, bias_ptr, m, n, M, N, group, False, SWAP)
    else:
        x_M = x_ptr + (m // CHOICES).to(tl.int64) * x_stride_m
        w_row = group * N + first_n
        if TMA:
            w_N = n  # the descriptor has the base
        else:
            w_N = w_ptr + group.to(tl.int64) * w_stride_e + n.to(tl.int64) * w_stride_n
        if R3 == 1:
            acc = _leaf(
                x_M, w_ptr, w_N, w_row, 0, leaf_k, M, N, m, n, x_stride_k, w_stride_k,
                BM, BN, BK, SWAP, BLOCKED, EVEN_K, TMA,
            )  # fmt: skip
        else:
            acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
            t0, t1, t2, t3 = acc, acc, acc, acc
            for leaf in range(0, leaves):
                acc = _leaf(
                    x_M, w_ptr, w_N, w_row, leaf * leaf_k, (leaf + 1) * leaf_k, M, N, m, n, x_stride_k, w_stride_k,
                    BM, BN, BK, SWAP, BLOCKED, EVEN_K, TMA,
                )  # fmt: skip
                t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
            acc = root_of(t0, t1, t2, t3, R0, R1, R2)
        _store(acc, out_ptr, bias_ptr, m, n, M, N, group, HAS_BIAS, SWAP)


@triton.jit(do_not_specialize=["M"])
def decode_kernel(
    x_ptr, ids_ptr, w_ptr, out_ptr, bias_ptr, M, N, leaf_k, leaves,
    x_stride_m, x_stride_k, w_stride_e, w_stride_n, w_stride_k,
    E: tl.constexpr, CHOICES: tl.constexpr, HAS_BIAS: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0 is a row: the first row of a group computes the whole group, over a tile of N (axis 1)."""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    m = tl.arange(0, BM)
    group = _groups_of(tl.load(ids_ptr + row), E)
    groups = _groups_of(tl.load(ids_ptr + m, mask=m < M, other=0), E)
    members = (m < M) & (groups == group)
    if tl.min(tl.where(members, m, BM)) == row:
        _expert_tile(
            x_ptr, w_ptr, out_ptr, bias_ptr, tl.where(members, m, M), tl.program_id(1) * BN, group, M, N, leaf_k,
            leaves,
            x_stride_m, x_stride_k, w_stride_e, w_stride_n, w_stride_k,
            E, CHOICES, HAS_BIAS, R0, R1, R2, R3, BM, BN, BK, SWAP, BLOCKED, EVEN_K, False,
        )  # fmt: skip
    let_next_start(PDL)


@triton.jit(do_not_specialize=["M", "num_tiles"])
def grouped_kernel(
    x_ptr, order_ptr, tiles_ptr, w_ptr, out_ptr, bias_ptr, M, N, leaf_k, leaves, num_tiles,
    x_stride_m, x_stride_k, w_stride_e, w_stride_n, w_stride_k,
    E: tl.constexpr, CHOICES: tl.constexpr, HAS_BIAS: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    BLOCKED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of group_rows_kernel and one of N; with TMA, w_ptr is a descriptor of [E * N, K]."""
    wait_for_earlier(PDL)
    tile_m, tile_n = grouped(tl.program_id(0), num_tiles * BM, N, BM, BN, GROUP)
    group = tl.load(tiles_ptr + tile_m * 3)
    if group >= 0:
        place = tl.load(tiles_ptr + tile_m * 3 + 1) + tl.arange(0, BM)
        end = tl.load(tiles_ptr + tile_m * 3 + 2)
        m = tl.load(order_ptr + place, mask=place < end, other=M)
        _expert_tile(
            x_ptr, w_ptr, out_ptr, bias_ptr, m, tile_n * BN, group, M, N, leaf_k, leaves,
            x_stride_m, x_stride_k, w_stride_e, w_stride_n, w_stride_k,
            E, CHOICES, HAS_BIAS, R0, R1, R2, R3, BM, BN, BK, SWAP, BLOCKED, EVEN_K, TMA,
        )  # fmt: skip
    let_next_start(PDL)


@triton.jit
def gather_rows_kernel(
    x_ptr, order_ptr, out_ptr, K, x_stride_m, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out[p] = x[order[p] // C], contiguous; BLOCK columns (axis 1) of a row (axis 0) per program."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = (tl.load(order_ptr + place) // CHOICES).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place * K + k, tl.load(x_ptr + row * x_stride_m + k, mask=k < K), mask=k < K)


@triton.jit
def _sorted_leaf(x_desc, w_desc, first, w_row, k_first, k_end, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(k_first, k_end, BK):
        x = x_desc.load([first, k])
        acc = tl.dot(x, w_desc.load([w_row, k]).T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "num_tiles"])
def sorted_kernel(
    x_desc, order_ptr, tiles_ptr, w_desc, out_ptr, bias_ptr, M, N, leaf_k, leaves, num_tiles,
    E: tl.constexpr, HAS_BIAS: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs loop over the used tiles: x_desc [M, K] in the order of experts, w_desc [E * N, K].

    A tile of x may end with rows of the next expert, and a tile of w with its features; their products are not stored.
    """
    wait_for_earlier(PDL)
    live = tl.load(tiles_ptr + num_tiles * 3)
    tiles_n = tl.cdiv(N, BN)
    for work in tl.range(tl.program_id(0), live * tiles_n, tl.num_programs(0), flatten=R3 == 1):
        tile_m, tile_n = grouped(work, live * BM, N, BM, BN, GROUP)
        group = tl.load(tiles_ptr + tile_m * 3)
        first = tl.load(tiles_ptr + tile_m * 3 + 1)
        expert = tl.minimum(group, E - 1)
        w_row = expert * N + tile_n * BN
        if R3 == 1:
            acc = _sorted_leaf(x_desc, w_desc, first, w_row, 0, leaf_k, BM, BN, BK)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
            t0, t1, t2, t3 = acc, acc, acc, acc
            for leaf in range(0, leaves):
                acc = _sorted_leaf(x_desc, w_desc, first, w_row, leaf * leaf_k, (leaf + 1) * leaf_k, BM, BN, BK)
                t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
            acc = root_of(t0, t1, t2, t3, R0, R1, R2)
        place = first + tl.arange(0, BM)
        m = tl.load(order_ptr + place, mask=place < tl.load(tiles_ptr + tile_m * 3 + 2), other=M)
        n = tile_n * BN + tl.arange(0, BN)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
            acc = acc + bias[None, :]
        acc = tl.where(group < E, acc, 0.0)
        _store(acc, out_ptr, bias_ptr, m, n, M, N, expert, False, False)
