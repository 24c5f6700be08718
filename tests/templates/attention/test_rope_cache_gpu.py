"""rope_cache on the GPU: the bytes of the norm kernel, torch's products and sums, and a copy into the caches."""

import itertools

import pytest
import torch
from torch import Tensor

from detcompile.templates.attention.operands import Caches, HeadNorm
from detcompile.templates.attention.rope_cache_gpu import rope_cache_cuda
from detcompile.templates.rows.sums_and_norms_gpu import rms_norm_cuda
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON

# The interpreter cuts bfloat16 off where the GPU rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 4, 2, 32, 32, 32), (5, 3, 1, 20, 12, 12)]  # T, Hq, Hkv, D, Dv, E
if not INTERPRETED:
    SHAPES += [(1, 32, 8, 128, 128, 128), (77, 32, 8, 128, 128, 64), (9, 8, 4, 256, 256, 256), (3, 4, 4, 96, 80, 24)]
    # whose rotation could be loaded in wider pieces
    SHAPES += [(77, 32, 8, 100, 100, 32), (77, 32, 8, 36, 36, 32), (9, 8, 4, 33, 33, 32)]


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(dtype).to(DEVICE)


def separate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, norm: tuple[float | None, bool]) -> Tensor:
    eps, round_first = norm
    n = x if eps is None else rms_norm_cuda(x, weight, eps, round_first)
    E = cos.shape[1]
    turned = n[..., :E]
    half = torch.cat([-turned[..., E // 2 :], turned[..., : E // 2]], -1)
    products = turned * cos[:, None], half * sin[:, None]
    return torch.cat([products[0] + products[1], n[..., E:]], -1)


@pytest.mark.parametrize("norm", [(None, False), (1e-6, True), (1e-6, False)], ids=["no norm", "llama's", "gemma's"])
@pytest.mark.parametrize(
    ("shape", "copies", "dtype"),
    exhaustive_unless(
        lambda case: case[2] is not torch.float16 or case[0] in SHAPES[:2],
        itertools.product(SHAPES, (1, 3), DTYPES),
    ),
)
def test_the_bytes_are_those_of_separate_operations(
    shape: tuple[int, ...], copies: int, dtype: torch.dtype, norm: tuple[float | None, bool]
) -> None:
    T, HQ, HK, D, DV, E = shape
    qkv = draw(T, HQ * D + HK * D + HK * DV, dtype=dtype, seed=1)
    q, k, v = qkv.split([HQ * D, HK * D, HK * DV], 1)
    q, k, v = q.unflatten(1, (HQ, D)), k.unflatten(1, (HK, D)), v.unflatten(1, (HK, DV))
    cos, sin = draw(T, E, dtype=dtype, seed=2).cos(), draw(T, E, dtype=dtype, seed=3).sin()
    # of the keys some that float16 has no more than a few bits for
    weights = [draw(D, dtype=torch.float32, seed=4), draw(D, dtype=torch.bfloat16, seed=5)]
    weights[1][::3] *= 2.0**-20
    weights = [None, None] if norm[0] is None else weights
    page = 4
    caches = [torch.full((T + 1, page, HK, width), torch.nan, dtype=dtype, device=DEVICE) for width in (D, DV)]
    slots = torch.randperm((T + 1) * page, generator=torch.Generator().manual_seed(6))[: copies * T].to(DEVICE)
    slots[T // 2] = -1
    heads = HeadNorm(*weights, *norm)
    out = rope_cache_cuda(q, k, v, cos, sin, heads, Caches(*caches), slots)
    assert_bitwise_equal(out, separate(q, cos, sin, weights[0], norm), "q")
    expected = [torch.full_like(cache, torch.nan) for cache in caches]
    for cache, rows in zip(expected, (separate(k, cos, sin, weights[1], norm), v), strict=True):
        for place, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // page, slot % page] = rows[place % T]
    for cache, wanted, name in zip(caches, expected, ("keys", "values"), strict=True):
        assert_bitwise_equal(cache, wanted, name)
    one = rope_cache_cuda(q[-1:], k[-1:], v[-1:], cos[-1:], sin[-1:], heads, Caches(*caches), slots[-1:])
    assert_bitwise_equal(one, out[-1:], "a token alone")
