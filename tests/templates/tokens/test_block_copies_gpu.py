"""Copies of cache blocks on the GPU move the named tokens in every cache, and no other byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.runtime.kv.kv_cache import KVCache, KVShape
from detcompile.step import KVGroup
from detcompile.templates.tokens.block_copies_gpu import copy_blocks_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON

NUM_BLOCKS = 9
SHAPES = [(1, 1), (1, 3), (3, 5), (2, 8), (8, 128)]  # heads and their size: tokens of whole words, and of odd bytes


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def copied(storage: Tensor, copies: list[tuple[int, int, int]]) -> Tensor:
    expected = storage.clone()
    for source, target, num_tokens in copies:
        expected[:, target, :num_tokens] = storage[:, source, :num_tokens]
    return expected


def on_device(copies: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(copies, dtype=torch.int64).reshape(-1, 3).T.contiguous().to(DEVICE)


@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]),
    block_size=st.sampled_from([16, 32]),
    num_caches=st.integers(1, 3),
    sources=st.lists(st.integers(1, 4), max_size=4),
    lengths=st.lists(st.sampled_from([0, 1, 7, 15, 16]), min_size=4, max_size=4),
    num_padding=st.integers(0, 3),
)
def test_the_tokens_named_are_copied_and_no_other_byte(
    shape, dtype, block_size, num_caches, sources, lengths, num_padding
):
    storage = noise((num_caches, NUM_BLOCKS, block_size, *shape), dtype)
    copies = [(source, 5 + index, lengths[index]) for index, source in enumerate(sources)]
    actual = storage.clone().to(DEVICE)
    copy_blocks_cuda(actual, on_device([*copies, *[(0, 0, 0)] * num_padding]))
    assert_bitwise_equal(actual.cpu(), copied(storage, copies))


def test_a_cache_of_several_shapes_is_copied_whole():
    shapes = [KVShape(2, 8, 4), KVShape(1, 3, 4), KVShape(2, 8, 4)]
    groups = [KVGroup((0, 1, 2), 0)]
    cache = KVCache(shapes, groups, dtype=torch.bfloat16, device=DEVICE, num_blocks=NUM_BLOCKS, block_size=16)
    before = []
    for storage in cache._storages.values():
        before.append(noise(tuple(storage.shape), storage.dtype))
        storage.copy_(before[-1])
    assert len(before) == 4, "heads and sizes that occur"
    copies = [(1, 5, 3), (1, 6, 3), (2, 7, 15), (0, 0, 0)]
    for storage in cache._storages.values():
        copy_blocks_cuda(storage, on_device(copies))
    for storage, old in zip(cache._storages.values(), before, strict=True):
        assert_bitwise_equal(storage.cpu(), copied(old, copies))


def test_repeated_copy_keeps_later_writes():
    """A CUDA graph's first step runs when it is captured, and again when it is replayed."""
    storage = noise((2, NUM_BLOCKS, 16, 2, 8), torch.bfloat16)
    copies = [(1, 5, 3), (1, 6, 3), (2, 7, 9)]
    actual, expected = storage.clone().to(DEVICE), copied(storage, copies)
    for again in range(2):
        copy_blocks_cuda(actual, on_device(copies))
        for source, target, num_tokens in copies:
            for block in (source, target):
                actual[:, block, num_tokens] = expected[:, block, num_tokens] = float(block + again)
    assert_bitwise_equal(actual.cpu(), expected)


@pytest.mark.parametrize("caches", [pytest.param(3, marks=NEEDS_GPU)])
def test_a_storage_may_have_more_words_than_32_bits_count(caches):
    storage = torch.empty(caches, 1 << 16, 16, 1, 1025, dtype=torch.float8_e4m3fn, device=DEVICE)
    assert storage[:2].numel() > 2**31, "an odd size: its words are bytes"
    storage[:, [1, -2]] = noise((caches, 2, *storage.shape[2:]), storage.dtype).to(DEVICE)
    copy_blocks_cuda(storage, on_device([(1, 2, 16), (len(storage[0]) - 2, len(storage[0]) - 1, 16)]))
    for source, target in ((1, 2), (-2, -1)):
        assert_bitwise_equal(storage[:, target].cpu(), storage[:, source].cpu())
