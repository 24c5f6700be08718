"""Gumbel-max sampling: argmax of logprob + noise over a row. The noise is computed inside the kernels.

Legend: T rows, V vocabulary size, W tokens per program, TILES = ceil(V / W).

The bits are those of runtime.sampling.philox in float64: the same Philox words, and the same operations in the same
order for the logarithm. The CPU runs cpu/gumbel.cpp. On a GPU, Triton's float64 division is div.rn on NVIDIA, and
contraction into FMA is off. A maximum needs no order; among equal scores the lowest id wins, and NaN beats all, as in
torch.argmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library

_WIDTH = 1024

# Constants of runtime.sampling.philox, which is in a higher layer; the tests compare the bits.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
_L1 = tl.constexpr(6.666666666666735130e-01)
_L2 = tl.constexpr(3.999999999940941908e-01)
_L3 = tl.constexpr(2.857142874366239149e-01)
_L4 = tl.constexpr(2.222219843214978396e-01)
_L5 = tl.constexpr(1.818357216161805012e-01)
_L6 = tl.constexpr(1.531383769920937332e-01)
_L7 = tl.constexpr(1.479819860511658591e-01)
_UNIT = tl.constexpr(2.0**-32)


def gumbel_argmax(logprobs: Tensor, keys: Tensor) -> Tensor:
    """Return each row's token with the highest logprob + Gumbel noise, in float64.

    Args:
        logprobs: [T, V] float32 with a unit stride in the row.
        keys: [T, 5] int64, runtime.sampling.philox.noise_keys, on the same device.

    Returns:
        [T] int64.
    """
    return gumbel_argmax_cuda(logprobs, keys) if logprobs.is_cuda else best_scores_cpu(logprobs, keys)[1]


def best_scores_cpu(logprobs: Tensor, keys: Tensor, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """Return each row's highest score [T] float64, and its lowest id [T] int64; NaN is above all.

    Args:
        logprobs, keys: operands of ``gumbel_argmax``, on the CPU.
        isa: a build of cpu.library; None is the machine's.
    """
    T, V = logprobs.shape
    assert logprobs.dtype == torch.float32 and logprobs.stride(1) == 1 and V > 0, "logprobs must be [T, V] float32"
    assert keys.dtype == torch.int64 and keys.shape == (T, 5), "keys must be [T, 5] int64"
    assert logprobs.device.type == keys.device.type == "cpu", "the kernel reads host memory"
    keys = keys.contiguous()
    scores, tokens = torch.empty(T, dtype=torch.float64, device="cpu"), torch.empty(T, dtype=torch.int64, device="cpu")
    cpu_library.library(isa).detcompile_gumbel_argmax(
        logprobs, logprobs.stride(0), keys, scores, tokens, T, V, cpu_library.thread_count()
    )
    return scores, tokens


@triton.jit
def _portable_log(x):
    """Natural logarithm of positive, normal float64 numbers; philox.portable_log step by step."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # in [1/2, 1)
    small = mantissa < tl.full((), _SQRT_HALF, tl.float64)  # a plain literal would be rounded to fp32
    f = tl.where(small, mantissa * 2.0, mantissa) - 1.0
    e = ((bits >> 52) - 1022 - small.to(tl.int64)).to(tl.float64)
    s = f / (f + 2.0)
    z = s * s
    series = z * _L7
    series = z * (series + _L6)
    series = z * (series + _L5)
    series = z * (series + _L4)
    series = z * (series + _L3)
    series = z * (series + _L2)
    series = z * (series + _L1)
    half_square = f * f * 0.5
    return e * _LN2_HIGH - ((half_square - (s * (half_square + series) + e * _LN2_LOW)) - f)


@triton.jit
def _key_word(keys_ptr, row, i: tl.constexpr):
    return tl.load(keys_ptr + row * 5 + i).to(tl.uint32)


@triton.jit
def _words(keys_ptr, row, first_group, W: tl.constexpr):
    """[W] uint32: token v of the row takes word v % 4 of the counter (v // 4, position, stream) under key seed."""
    counter = (first_group + tl.arange(0, W // 4)).to(tl.uint32)
    zero = tl.zeros((W // 4,), tl.uint32)
    key0, key1 = _key_word(keys_ptr, row, 0) + zero, _key_word(keys_ptr, row, 1) + zero
    low, high = _key_word(keys_ptr, row, 2) + zero, _key_word(keys_ptr, row, 3) + zero
    stream = _key_word(keys_ptr, row, 4) + zero
    w0, w1, w2, w3 = tl.philox_impl(counter, low, high, stream, key0, key1, 10)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [W])


@triton.jit(do_not_specialize_on_alignment=["keys_ptr"])  # a group's keys may start anywhere
def _best_of_tile_kernel(
    logprobs_ptr, keys_ptr, score_ptr, id_ptr, row_stride, V: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Highest score of W tokens of a row, and the lowest id that has it: [T, TILES]."""
    program = tl.program_id(0)
    row = (program // TILES).to(tl.int64)
    tile = program % TILES
    token = tile * W + tl.arange(0, W)
    logprob = tl.load(logprobs_ptr + row * row_stride + token, mask=token < V, other=-float("inf")).to(tl.float64)
    uniform = (_words(keys_ptr, row, tile * (W // 4), W).to(tl.float64) + 0.5) * _UNIT
    score = logprob - _portable_log(-_portable_log(uniform))
    score = tl.where(logprob == logprob, score, float("inf"))
    best = tl.max(score, 0)
    tl.store(score_ptr + program, best)
    tl.store(id_ptr + program, tl.min(tl.where(score == best, token, V), 0))


@triton.jit
def _best_of_row_kernel(score_ptr, id_ptr, out_ptr, V: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, LANES)
    score = tl.load(score_ptr + row * TILES + tile, mask=tile < TILES, other=-float("inf"))
    token = tl.load(id_ptr + row * TILES + tile, mask=tile < TILES, other=V)
    best = tl.max(score, 0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, token, V), 0).to(tl.int64))


def gumbel_argmax_cuda(logprobs: Tensor, keys: Tensor) -> Tensor:
    """Run ``gumbel_argmax`` on the GPU."""
    T, V = logprobs.shape
    assert logprobs.dtype == torch.float32 and logprobs.stride(1) == 1 and keys.shape == (T, 5)
    out = torch.empty(T, dtype=torch.int64, device=logprobs.device)
    if T == 0:
        return out
    tiles = triton.cdiv(V, _WIDTH)
    score = torch.empty(T, tiles, dtype=torch.float64, device=logprobs.device)
    ids = torch.empty(T, tiles, dtype=torch.int32, device=logprobs.device)
    _best_of_tile_kernel[(T * tiles,)](
        logprobs, keys.contiguous(), score, ids, logprobs.stride(0), V=V, TILES=tiles, W=_WIDTH,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    lanes = max(32, triton.next_power_of_2(tiles))
    _best_of_row_kernel[(T,)](score, ids, out, V=V, TILES=tiles, LANES=lanes, num_warps=1)
    return out
