"""Copies of cache blocks' first tokens to other blocks on the GPU: bytes move, so there is no order to preserve.

Legend: N copies, C caches of one shape, B blocks of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 2048  # words per iteration


@triton.jit(do_not_specialize=["N"])
def _copy_kernel(words_ptr, copies_ptr, N, B, block_words, token_words, W: tl.constexpr):
    """One copy in one cache; a copy of no tokens returns at once."""
    n = tl.program_id(0)
    first_block = tl.program_id(1).to(tl.int64) * B
    source_ptr = words_ptr + (first_block + tl.load(copies_ptr + n)) * block_words
    target_ptr = words_ptr + (first_block + tl.load(copies_ptr + N + n)) * block_words
    num_words = tl.load(copies_ptr + 2 * N + n) * token_words
    for start in range(0, num_words, W):
        word = start + tl.arange(0, W)
        inside = word < num_words
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=inside), mask=inside)


def copy_blocks_cuda(storage: Tensor, block_copies: Tensor) -> None:
    """Copy blocks' first tokens to other blocks, in every cache of ``storage``.

    Args:
        storage: [C, B, block_size, heads, dim], contiguous.
        block_copies: [3, N] int64: source blocks, target blocks, and numbers of tokens (0 copies nothing). The copies
            run in any order: no target is the source of another copy.
    """
    assert storage.is_contiguous() and block_copies.is_contiguous()
    N, C, B = block_copies.shape[1], *storage.shape[:2]
    token_bytes = storage[0, 0, 0].nbytes
    words = storage.flatten(2).view(torch.int64 if token_bytes % 8 == 0 else torch.uint8)
    if N:
        _copy_kernel[(N, C)](
            words, block_copies, N, B, words.shape[2], token_bytes // words.itemsize, W=_WIDTH, num_warps=8
        )
