"""The kernel of kernels.py for nibbles and few tokens: each warp dequantizes its own features. Same bits.

Legend: M tokens, N output features, K summed features, BM BN BK tile sizes, WARPS of a program.

A tensor core product takes 16 k, and the next product of the same features depends on its sum. With one token this
chain is the latency, so nothing else may be part of it. Features are the columns of the products, eight at a time, and
tokens their rows. A warp computes its columns from bytes that it reads itself into registers, in the layout of the
products; all warps of a program share the tokens. A ring of STAGES steps of BK k is copied ahead.

A thread reads four successive k of a feature, one byte each, and as many of a token, while a product needs two of them
and the two that are eight further on. Both operands are permuted in the same way (`_turned`), within 16 k, which are
one addition.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.target_info import cuda_capability_geq

from detcompile.templates.device.dependent_launch import (
    fetch_ahead,
    gluon_let_next_start,
    gluon_wait_for_earlier,
    launch_options,
)
from detcompile.templates.device.primitives import barrier, widened
from detcompile.templates.quantized.dequantize import (
    NARROW_BFLOAT16,
    NARROW_BFLOAT16_BY_FMA,
    NARROW_FLOAT16,
    NARROW_REGISTERS,
)
from detcompile.templates.quantized.schedules import Int4Decode

_AHEAD_BYTES = 16 << 20  # of weights, prefetched into L2 while the previous kernel is finishing
# Rows of bytes start at the same bank of shared memory, so chunks of eight are swizzled. Tokens are side by side for
# each 16 k instead, so that one of them can be copied without the others.
_Q_TILES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_X_TILES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


def launch(
    schedule: Int4Decode,
    x: Tensor,  # [M, K], 16 bits
    parts: tuple[Tensor, Tensor, Tensor | None],  # nibbles [N, K / 2], scales [K / group, N] of x's dtype, zero points
    group: int,  # k that share a scale, a multiple of 128
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,  # [M, N], or [leaves, M, N] with a separate program per leaf
    leaf_k: int,  # a multiple of block_k
) -> None:
    """Run the kernel. N is a multiple of 16; the parts and the rows of x and the residual are contiguous."""
    M, N = out.shape[-2:]
    leaves = x.shape[1] // leaf_k
    x, w, scales = (_aligned(tensor) for tensor in (x, *parts[:2]))
    zeros = scales if parts[2] is None else _aligned(parts[2])
    block_m, block_n, warps = schedule.block_m, schedule.block_n, schedule.warps
    tiles_n = -(-N // block_n)
    ahead = min(leaf_k // 2, _AHEAD_BYTES // (leaves * N)) // 16 * 16
    q_layout, x_layout = _layouts(block_m, block_n, warps)
    int4_decode_kernel[(tiles_n * -(-M // block_m), leaves if out.dim() == 3 else 1)](
        x, w, scales, zeros, out, out if bias is None else bias, out if residual is None else residual,
        M, N, tiles_n, leaf_k, ahead, x.stride(0), w.stride(0), scales.stride(0),
        0 if residual is None else residual.stride(0),
        GROUP_K=group, HAS_ZEROS=zeros is not scales, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        BM=block_m, BN=block_n, BK=schedule.block_k, STAGES=schedule.stages, WARPS=warps, Q=q_layout, X=x_layout,
        num_warps=warps, enable_fp_fusion=False, **launch_options(x.device),
    )  # fmt: skip


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that is aligned to 16 bytes."""
    fits = tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 16 == 0 and tensor.stride(1) == 1
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def _layouts(block_m: int, block_n: int, warps: int) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """Return the layouts of 64 bytes of the features, and of 64 k of the tokens, [4, BM, 16], held by every warp."""
    of_warps = range(warps.bit_length() - 1)
    wide = [[8 * warps, 0]] if block_n > 8 * warps else []
    q = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], *wide],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8 << i, 0] for i in of_warps],
        [],
        [block_n, 64],
    )
    high = [[0, 8, 0]] if block_m > 8 else []
    x = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], *high],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 0] for _ in of_warps],
        [],
        [4, block_m, 16],
    )
    return q, x


@gluon.jit
def _fetch(
    ring, stage, k, tile, N, M, x_stride, w_stride, scale_stride, GROUP_K: gl.constexpr, HAS_ZEROS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of the step at k into a stage. N and M: features and tokens left from the tile's first on."""
    Q_COPY: gl.constexpr = gl.BlockedLayout([1, 16], [1024 // BK, BK // 32], [WARPS, 1], [1, 0])
    X_COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 8, 2], [WARPS, 1, 1], [2, 1, 0])
    ROW_COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [16, 1, 2], [WARPS, 1, 1], [2, 1, 0])
    SCALE_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [WARPS, 1], [1, 0])
    q_tiles, x_tiles, scale_tiles, zero_tiles = ring
    q_ptr, x_ptr, scale_ptr, zero_ptr = tile
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, Q_COPY))[:, None]
    byte = gl.multiple_of(k // 2, 64) + gl.arange(0, BK // 2, layout=gl.SliceLayout(0, Q_COPY))[None, :]
    async_copy.async_copy_global_to_shared(q_tiles.index(stage), q_ptr + (n * w_stride + byte), mask=n < N)
    if M == 1:  # in a tile of eight it would need as many copies as eight tokens, of zeros
        _fetch_tokens(x_tiles.index(stage).slice(0, 1, dim=1), x_ptr + k, M, x_stride, 1, BK, ROW_COPY)
    else:
        _fetch_tokens(x_tiles.index(stage), x_ptr + k, M, x_stride, BM, BK, X_COPY)
    block = k + 128 * gl.arange(0, BK // 128, layout=gl.SliceLayout(1, SCALE_COPY))[:, None]
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, SCALE_COPY))[None, :]
    place = block // GROUP_K * scale_stride + n
    async_copy.async_copy_global_to_shared(scale_tiles.index(stage), scale_ptr + place, mask=n < N)
    if HAS_ZEROS:
        async_copy.async_copy_global_to_shared(zero_tiles.index(stage), zero_ptr + place, mask=n < N)


@gluon.jit
def _fetch_tokens(tile, x_ptr, M, x_stride, ROWS: gl.constexpr, BK: gl.constexpr, COPY: gl.constexpr):
    chunk = gl.arange(0, BK // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    async_copy.async_copy_global_to_shared(tile, x_ptr + (chunk * 16 + m * x_stride + k), mask=m < M)


@gluon.jit
def _turned(rows, ROWS: gl.constexpr):
    """[ROWS, 64] with k in the order of the products: of each 16, the first two of every four, then the other two."""
    return rows.reshape(ROWS, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, 64)


@gluon.jit
def _weights(q, scale, offset):
    """dequantize.narrow_weights with one scale for both halves."""
    if scale.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            NARROW_BFLOAT16 if cuda_capability_geq(9, 0) else NARROW_BFLOAT16_BY_FMA, NARROW_REGISTERS,
            [q, scale, offset, scale, offset],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            NARROW_FLOAT16, NARROW_REGISTERS, [q, scale, offset, scale, offset],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@gluon.jit
def _tokens(tile, first: gl.constexpr, BM: gl.constexpr, X: gl.constexpr, MMA: gl.constexpr):
    """64 k of the tokens as rows of a product. Rows past BM are zeros; rows past M are arbitrary."""
    x = tile.slice(first // 16, 4, dim=0).load(X)
    if BM == 8:
        rows = gl.join(x, gl.zeros([4, 8, 16], x.dtype, X)).permute(3, 1, 0, 2).reshape(16, 64)
    else:
        rows = x.permute(1, 0, 2).reshape(16, 64)
    return gl.convert_layout(_turned(rows, 16), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _step(
    acc, ring, stage, HAS_ZEROS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    Q: gl.constexpr, X: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """acc + the step in a stage, 128 k at a time: 64 of the low halves, then 64 of the high halves."""
    q_tiles, x_tiles, scale_tiles, zero_tiles = ring
    x_tile = x_tiles.index(stage)
    dtype: gl.constexpr = x_tile.dtype
    BIAS: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0  # see dequantize.narrow_weights
    W: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for block in gl.static_range(BK // 128):
        q = q_tiles.index(stage).slice(block * 64, 64, dim=1).load(Q)
        scale = scale_tiles.index(stage).slice(block, 1, dim=0).permute((1, 0)).load(Q)
        if HAS_ZEROS:
            zero = zero_tiles.index(stage).slice(block, 1, dim=0).permute((1, 0)).load(Q)
            offset = (zero.to(gl.float32) + BIAS).to(dtype)
        else:
            offset = gl.full([BN, 1], BIAS + 8, dtype, Q)
        _, scale = gl.broadcast(q, scale)
        _, offset = gl.broadcast(q, offset)
        low, high = _weights(q, scale, offset)
        low = gl.convert_layout(_turned(low, BN).permute(1, 0), W)
        high = gl.convert_layout(_turned(high, BN).permute(1, 0), W)
        acc = mma_v2(_tokens(x_tile, block * 128, BM, X, MMA), low, acc)
        acc = mma_v2(_tokens(x_tile, block * 128 + 64, BM, X, MMA), high, acc)
    return acc


@gluon.jit
def _store(
    acc, out_ptr, bias_ptr, residual_ptr, m, n, M, N, residual_stride,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """matmul/kernels.store_tile."""
    inside = (m < M) & (n < N)
    m = m.to(gl.int64)
    if HAS_BIAS:
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    y = acc.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + m * residual_stride + n, mask=inside, other=0.0)
        y = (widened(residual, y.dtype) + y.to(gl.float32)).to(y.dtype)
    gl.store(out_ptr + m * N + n, y, mask=inside)


@gluon.jit(do_not_specialize=["M", "tiles_n", "ahead"])
def int4_decode_kernel(
    x_ptr, q_ptr, scale_ptr, zero_ptr, out_ptr, bias_ptr, residual_ptr, M, N, tiles_n, leaf_k, ahead,
    x_stride, w_stride, scale_stride, residual_stride,
    GROUP_K: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    Q: gl.constexpr, X: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of one leaf (axis 1), into out[leaf, M, N]. ahead: bytes of each feature to prefetch into L2 while the
    previous kernel is finishing."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    THREADS: gl.constexpr = 32 * WARPS // BN  # per feature
    tile_m = gl.program_id(0) // tiles_n
    tile_n = gl.program_id(0) % tiles_n
    first = gl.program_id(1) * leaf_k
    q_ptr += (tile_n * BN).to(gl.int64) * w_stride
    if PDL:
        thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        row = thread // THREADS
        wanted = (thread % THREADS == 0) & (tile_n * BN + row < N) & (ahead > 0)
        fetch_ahead(q_ptr + (row * w_stride + first // 2), ahead, wanted)
    gluon_wait_for_earlier(PDL)
    tile = (
        q_ptr,
        x_ptr + (tile_m * BM).to(gl.int64) * x_stride,
        scale_ptr + tile_n * BN,
        zero_ptr + tile_n * BN,
    )
    q_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [STAGES, BN, BK // 2], _Q_TILES)
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BK // 16, BM, 16], _X_TILES)
    scale_tiles = gl.allocate_shared_memory(scale_ptr.dtype.element_ty, [STAGES, BK // 128, BN], _SCALES)
    zero_tiles = scale_tiles
    if HAS_ZEROS:
        zero_tiles = gl.allocate_shared_memory(zero_ptr.dtype.element_ty, [STAGES, BK // 128, BN], _SCALES)
    ring = (q_tiles, x_tiles, scale_tiles, zero_tiles)
    features = N - tile_n * BN
    tokens = M - tile_m * BM
    for i in gl.static_range(STAGES - 1):
        if i * BK < leaf_k:
            _fetch(
                ring, i, first + i * BK, tile, features, tokens, x_stride, w_stride, scale_stride,
                GROUP_K, HAS_ZEROS, BM, BN, BK, WARPS,
            )  # fmt: skip
        async_copy.commit_group()
    acc = gl.zeros([16, BN], gl.float32, MMA)
    stage = 0
    for k in range(0, leaf_k, BK):
        async_copy.wait_group(STAGES - 2)
        barrier()  # every thread's copies are visible, and the previous stage is no longer read
        ahead_k = k + (STAGES - 1) * BK
        if ahead_k < leaf_k:
            _fetch(
                ring, gl.where(stage == 0, STAGES - 1, stage - 1), first + ahead_k, tile, features, tokens,
                x_stride, w_stride, scale_stride, GROUP_K, HAS_ZEROS, BM, BN, BK, WARPS,
            )  # fmt: skip
        else:
            gluon_let_next_start(PDL)  # not earlier: the next kernel's prefetches would compete with this one
        async_copy.commit_group()
        acc = _step(acc, ring, stage, HAS_ZEROS, BM, BN, BK, Q, X, MMA)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    n = tile_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, MMA))[None, :]
    m = gl.where(row < BM, tile_m * BM + row, M)
    out_ptr += gl.program_id(1).to(gl.int64) * M * N
    _store(acc, out_ptr, bias_ptr, residual_ptr, m, n, M, N, residual_stride, HAS_BIAS, HAS_RESIDUAL)
