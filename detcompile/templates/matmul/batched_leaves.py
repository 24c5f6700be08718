"""The GEMM of kernels.py for few tokens and trees of radix 2: all leaves of a tile at once. Same bits.

Legend: M tokens, N output features, K summed features; a tree of LEVELS levels has 2**LEVELS leaves.

Each leaf is an entry of a batch of products, so a leaf's k-groups depend only on earlier groups of the same leaf. For
few tokens and features the latency is a chain of additions; batching shortens it by the number of leaves.
"""

import triton
import triton.language as tl

from detcompile.templates.device.dependent_launch import (
    fetch_rows_ahead,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.matmul.kernels import store_tile
from detcompile.templates.matmul.operands import Operands
from detcompile.templates.matmul.schedules import BatchedLeaves


@triton.jit(do_not_specialize=["M"])
def batched_leaves_kernel(
    x_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, M, N, leaf_k,
    x_stride_m, x_stride_k, w_stride_n, w_stride_k, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BN features (axis 0) and BM tokens (axis 1). AHEAD: prefetch its weights into L2 while the previous
    kernel is finishing."""
    LEAVES: tl.constexpr = 1 << LEVELS
    let_next_start(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if AHEAD:
        fetch_rows_ahead(w_ptr, tl.program_id(0) * BN, BN, N, w_stride_n, leaf_k * LEAVES, PDL)
    wait_for_earlier(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    first = tl.arange(0, LEAVES) * leaf_k
    x_M = x_ptr + m.to(tl.int64) * x_stride_m
    w_N = w_ptr + n.to(tl.int64) * w_stride_n
    acc = tl.zeros((LEAVES, BN, BM), tl.float32)
    for k in range(0, leaf_k, BK):
        kk = k + tl.arange(0, BK)
        x_ok = (m < M)[None, None, :]
        w_ok = (n < N)[None, :, None]
        if not EVEN_K:
            x_ok = x_ok & (kk < leaf_k)[None, :, None]
            w_ok = w_ok & (kk < leaf_k)[None, None, :]
        column = first[:, None] + kk[None, :]
        w = tl.load(w_N[None, :, None] + (column * w_stride_k)[:, None, :], mask=w_ok, other=0.0)
        x = tl.load(x_M[None, None, :] + (column * x_stride_k)[:, :, None], mask=x_ok, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    node = tl.permute(acc, (1, 2, 0))
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(node, (BN, BM, LEAVES >> (level + 1), 2)))
        node = left + right
    total = tl.reshape(node, (BN, BM))
    store_tile(
        total, out_ptr, bias_ptr, residual_ptr, m[None, :], n[:, None], M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL
    )


def launch(schedule: BatchedLeaves, o: Operands) -> None:
    """Run the kernel. float32 leaves have at most one block of 128."""
    (M, N), levels = o.out.shape, len(o.radices)
    leaf_k = o.x.shape[1] >> levels
    launcher(batched_leaves_kernel)[cdiv(N, schedule.block_n), cdiv(M, schedule.block_m)](
        o.x, o.w, *o.epilogue, M, N, leaf_k, *o.x.stride(), *o.w.stride(), o.residual_stride,
        HAS_BIAS=o.bias is not None, HAS_RESIDUAL=o.residual is not None, LEVELS=levels, BM=schedule.block_m,
        BN=schedule.block_n, BK=schedule.block_k, EVEN_K=leaf_k % schedule.block_k == 0,
        AHEAD=schedule.ahead and o.w.stride(1) == 1, num_warps=schedule.warps, num_stages=schedule.stages,
        enable_fp_fusion=False, **launch_options(o.x.device),
    )  # fmt: skip
