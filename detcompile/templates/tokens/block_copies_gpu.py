"""First tokens of cache blocks, copied on the GPU over those of other blocks: bytes move, and no order is to be kept.

Legend: N copies, C caches of one shape, B blocks of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_blocks_cuda"]

_WIDTH = 2048  # words at a time


@triton.jit(do_not_specialize=["N"])
def _copy_kernel(words_ptr, copies_ptr, N, B, block_words, token_words, W: tl.constexpr):
    """One copy in one cache; a program without tokens ends at once."""
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
    """Copy the first tokens of blocks over those of others, in every cache of ``storage``.

    Args:
        storage: [C, B, block_size, heads, dim], contiguous.
        block_copies: [3, N] int64: blocks, those written to, and the number of tokens, of which 0 copies nothing. The
            copies run in any order: no block that is written to is another's source.
    """
    assert storage.is_contiguous() and block_copies.is_contiguous()
    N, C, B = block_copies.shape[1], *storage.shape[:2]
    token_bytes = storage[0, 0, 0].nbytes
    words = storage.flatten(2).view(torch.int64 if token_bytes % 8 == 0 else torch.uint8)
    if N:
        _copy_kernel[(N, C)](
            words, block_copies, N, B, words.shape[2], token_bytes // words.itemsize, W=_WIDTH, num_warps=8
        )
