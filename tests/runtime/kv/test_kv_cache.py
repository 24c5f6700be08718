"""Copying blocks of the cache moves the named keys and values, and nothing else."""

import pytest
import torch

from detcompile.runtime.kv.kv_cache import KVCache, KVShape
from detcompile.step import KVGroup
from tests.bits import assert_bitwise_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 32])
def test_copied_blocks_are_copied_in_every_layer_and_no_other_is_touched(dtype, num_tokens, device):
    shapes = [KVShape(2, 8, 4), KVShape(1, 3, 4), KVShape(2, 8, 4)]
    groups = [KVGroup((0, 1, 2), 0)]
    cache = KVCache(shapes, groups, dtype=dtype, device=device, num_blocks=6, block_size=32)
    tensors = [*cache.k_caches, *cache.v_caches]
    before = [tensor.copy_(torch.randn(tensor.shape)).clone() for tensor in tensors]
    cache.copy_blocks(torch.tensor([[1, 4, 0], [2, 5, 0], [num_tokens, 3, 0]], device=device))
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor.is_contiguous() and tensor.shape[:2] == (6, 32)
        assert_bitwise_equal(tensor[2, :num_tokens], old[1, :num_tokens])
        assert_bitwise_equal(tensor[5, :3], old[4, :3])
        assert_bitwise_equal(tensor[2, num_tokens:], old[2, num_tokens:])
        assert_bitwise_equal(tensor[5, 3:], old[5, 3:])
        assert_bitwise_equal(tensor[[0, 1, 3, 4]], old[[0, 1, 3, 4]])
