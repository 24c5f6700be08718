"""GEMM kernels for the GPU: many schedules, one order of summation.

Legend: M tokens, N output features, K summed features, L leaves of the tree, BM BN BK tile sizes.

Every output element has one fp32 accumulator per leaf, which adds the leaf's k-groups in ascending order through
``tl.dot(a, b, acc)``; the last k-group is padded with zeros. float32 operands start a new accumulator every 128 k, and
these are added left to right. Leaves are combined in the tree's order (tree.py, `combine_kernel`).

| kind | operands | for |
|---|---|---|
| swapped | pointers; weights are the M operand of the MMA | few tokens |
| tiles | pointers | any strides, mid M, float32 |
| tma | tensor descriptors, persistent programs | many tokens, aligned strides |

A split schedule runs one program per leaf and adds the partials in a second kernel; other schedules keep the tree's
open nodes in registers. batched_leaves.py sums all leaves of a tile as one batch of products.
Rounding, bias and residual happen inside the kernels (`store_tile`), in fp32.
"""

import triton
import triton.language as tl

from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.device.primitives import widened
from detcompile.templates.matmul.gate_gpu import silu_mul
from detcompile.templates.matmul.tree import close_leaf, root_of

FP32_BLOCK = tl.constexpr(128)


@triton.jit
def store_tile(
    acc, out_ptr, bias_ptr, residual_ptr, m, n, M, N, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out = round(residual + round(acc + bias)); m and n are broadcastable to acc's shape."""
    inside = (m < M) & (n < N)
    m = m.to(tl.int64)
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    y = acc.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m * residual_stride + n, mask=inside, other=0.0)
        y = (widened(residual, y.dtype) + y.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + m * N + n, y, mask=inside)


@triton.jit
def grouped(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Tile of a program: GROUP tiles of M share their weights in L2 before N advances."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    width = GROUP * tiles_n
    first = pid // width * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + pid % width % height, pid % width // height


@triton.jit
def _step(
    acc, x_M, w_N, k, k_end, M, N, m, n, x_stride_k, w_stride_k,
    BK: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One k-group: acc + x[:, k : k + BK] @ w[:, k : k + BK]^T, transposed if SWAP. Zeros are read past k_end."""
    kk = k + tl.arange(0, BK)
    if SWAP:
        x_ok = (m < M)[None, :]
        w_ok = (n < N)[:, None]
        if not EVEN_K:
            x_ok = x_ok & (kk < k_end)[:, None]
            w_ok = w_ok & (kk < k_end)[None, :]
        w = tl.load(w_N[:, None] + (kk * w_stride_k)[None, :], mask=w_ok, other=0.0)
        x = tl.load(x_M[None, :] + (kk * x_stride_k)[:, None], mask=x_ok, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    else:
        x_ok = (m < M)[:, None]
        w_ok = (n < N)[None, :]
        if not EVEN_K:
            x_ok = x_ok & (kk < k_end)[None, :]
            w_ok = w_ok & (kk < k_end)[:, None]
        x = tl.load(x_M[:, None] + (kk * x_stride_k)[None, :], mask=x_ok, other=0.0)
        w = tl.load(w_N[None, :] + (kk * w_stride_k)[:, None], mask=w_ok, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def leaf_sum(
    x_M, w_N, k_first, k_end, M, N, m, n, x_stride_k, w_stride_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BLOCKED: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """fp32 sum over k_first..k_end: [BM, BN], or [BN, BM] if SWAP."""
    ROWS: tl.constexpr = BN if SWAP else BM
    COLUMNS: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if BLOCKED:
        for block in range(k_first, k_end, FP32_BLOCK):
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(block, block + FP32_BLOCK, BK):
                part = _step(part, x_M, w_N, k, k_end, M, N, m, n, x_stride_k, w_stride_k, BK, SWAP, EVEN_K)
            acc = acc + part
    else:
        for k in range(k_first, k_end, BK):
            acc = _step(acc, x_M, w_N, k, k_end, M, N, m, n, x_stride_k, w_stride_k, BK, SWAP, EVEN_K)
    return acc


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, M, N, leaf_k, leaves,
    x_stride_m, x_stride_k, w_stride_n, w_stride_k, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    BLOCKED: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile; with SPLIT one of its leaves (axis 1), into an fp32 partial out[leaf, M, N] without an epilogue.

    Grid: (tiles, leaves); with SWAP (tiles of N, leaves, tiles of M), and GROUP is not used. GATED, with SWAP: N is
    half of w's rows; a tile has BN // 2 features of the gate and the same features of up, which are N rows below; out
    is silu_mul(round(gate), round(up)), as in gate_gpu.
    """
    wait_for_earlier(PDL)
    if SWAP:
        tile_m, tile_n = tl.program_id(2), tl.program_id(0)
    else:
        tile_m, tile_n = grouped(tl.program_id(0), M, N, BM, BN, GROUP)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    row = n
    if GATED:
        n = tile_n * (BN // 2) + tl.arange(0, BN) % (BN // 2)
        row = n + tl.arange(0, BN) // (BN // 2) * N
    x_M = x_ptr + m.to(tl.int64) * x_stride_m
    w_N = w_ptr + row.to(tl.int64) * w_stride_n
    if SPLIT:
        leaf = tl.program_id(1)
        first = leaf * leaf_k
        acc = leaf_sum(
            x_M, w_N, first, first + leaf_k, M, N, m, n, x_stride_k, w_stride_k, BM, BN, BK, SWAP, BLOCKED, EVEN_K
        )
        out_ptr += leaf.to(tl.int64) * M * N
    elif R3 == 1:
        acc = leaf_sum(x_M, w_N, 0, leaf_k, M, N, m, n, x_stride_k, w_stride_k, BM, BN, BK, SWAP, BLOCKED, EVEN_K)
    else:
        acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
        t0, t1, t2, t3 = acc, acc, acc, acc
        for leaf in range(0, leaves):
            first = leaf * leaf_k
            acc = leaf_sum(
                x_M, w_N, first, first + leaf_k, M, N, m, n, x_stride_k, w_stride_k, BM, BN, BK, SWAP, BLOCKED, EVEN_K
            )
            t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
        acc = root_of(t0, t1, t2, t3, R0, R1, R2)
    let_next_start(PDL)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
        dtype = out_ptr.dtype.element_ty
        n = (tile_n * (BN // 2) + tl.arange(0, BN // 2))[:, None]
        inside = (m < M)[None, :] & (n < N)
        place = m.to(tl.int64)[None, :] * N + n
        tl.store(out_ptr + place, silu_mul(gate.to(dtype), up.to(dtype), ON_GPU), mask=inside)
    else:
        if SWAP:
            m, n = m[None, :], n[:, None]
        else:
            m, n = m[:, None], n[None, :]
        store_tile(acc, out_ptr, bias_ptr, residual_ptr, m, n, M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _tma_leaf(
    x_desc, w_desc, m, n, k_first, k_end,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, W_NK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BN if SWAP else BM
    COLUMNS: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(k_first, k_end, BK):
        x = x_desc.load([m, k])
        if W_NK:
            w = w_desc.load([n, k]).T
        else:
            w = w_desc.load([k, n])
        if SWAP:
            acc = tl.dot(w.T, x.T, acc)
        else:
            acc = tl.dot(x, w, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    x_desc, w_desc, out_ptr, bias_ptr, residual_ptr, M, N, leaf_k, leaves, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    W_NK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs loop over the tiles (with SPLIT, those of every leaf). Descriptors read zeros past M, N and
    K, but not past a leaf: with a tree leaf_k must be a multiple of BK."""
    wait_for_earlier(PDL)
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for work in tl.range(tl.program_id(0), tiles * (leaves if SPLIT else 1), tl.num_programs(0), flatten=R3 == 1):
        tile_m, tile_n = grouped(work % tiles, M, N, BM, BN, GROUP)
        node_ptr = out_ptr
        if R3 == 1:
            first = work // tiles * leaf_k
            acc = _tma_leaf(x_desc, w_desc, tile_m * BM, tile_n * BN, first, first + leaf_k, BM, BN, BK, SWAP, W_NK)
            node_ptr = out_ptr + (work // tiles).to(tl.int64) * M * N
        else:
            acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
            t0, t1, t2, t3 = acc, acc, acc, acc
            for leaf in range(0, leaves):
                first = leaf * leaf_k
                acc = _tma_leaf(x_desc, w_desc, tile_m * BM, tile_n * BN, first, first + leaf_k, BM, BN, BK, SWAP, W_NK)
                t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
            acc = root_of(t0, t1, t2, t3, R0, R1, R2)
        m = tile_m * BM + tl.arange(0, BM)
        n = tile_n * BN + tl.arange(0, BN)
        if SWAP:
            m, n = m[None, :], n[:, None]
        else:
            m, n = m[:, None], n[None, :]
        store_tile(acc, node_ptr, bias_ptr, residual_ptr, m, n, M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["M"])
def combine_kernel(
    partial_ptr, out_ptr, bias_ptr, residual_ptr, M, N, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LEAVES: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine one to four levels of the tree: partial [nodes * LEAVES, M, N] -> out [nodes, M, N]; axis 2: nodes."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    m = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    node = tl.program_id(2).to(tl.int64)
    plane = M.to(tl.int64) * N
    leaf_ptr = partial_ptr + node * LEAVES * plane + m.to(tl.int64) * N + n
    acc = tl.zeros((BN,), tl.float32)
    t0, t1, t2, t3 = acc, acc, acc, acc
    for leaf in tl.static_range(LEAVES):
        acc = tl.load(leaf_ptr + leaf * plane, mask=n < N, other=0.0)
        t0, t1, t2, t3 = close_leaf(acc, leaf, t0, t1, t2, t3, R0, R1, R2, R3)
    acc = root_of(t0, t1, t2, t3, R0, R1, R2)
    store_tile(acc, out_ptr + node * plane, bias_ptr, residual_ptr, m, n, M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL)
