"""BlockPool: which blocks of the paged KV cache are free."""

from collections.abc import Sequence

import torch

from detcompile.errors import InvalidInput

__all__ = ["BLOCK_SIZE_MULTIPLE", "BlockPool", "check_block_size"]

BLOCK_SIZE_MULTIPLE = 16


def check_block_size(block_size: int) -> None:
    """Raise InvalidInput unless the attention kernels can read blocks of this many tokens."""
    if block_size <= 0 or block_size % BLOCK_SIZE_MULTIPLE != 0:
        raise InvalidInput(
            f"block_size {block_size} is not a positive multiple of {BLOCK_SIZE_MULTIPLE}: the attention kernels read"
            f" keys in groups of {BLOCK_SIZE_MULTIPLE}. Use 16, 32, 64, …"
        )


class BlockPool:
    """A stack of free block ids: the block freed last is handed out first.

    Args:
        num_blocks: blocks of the cache, ids 0 … num_blocks - 1.
        block_size: tokens a block, a multiple of 16.
        order: the order in which a fresh pool hands its blocks out: None is ascending; a permutation of the ids, or
            a generator that draws one, lets a test place sequences anywhere.

    Raises:
        InvalidInput: a size that cannot be, or an order that is no permutation.
    """

    def __init__(self, num_blocks: int, block_size: int, order: Sequence[int] | torch.Generator | None = None) -> None:
        check_block_size(block_size)
        if num_blocks <= 0:
            raise InvalidInput(f"a pool of {num_blocks} blocks can hold nothing: num_blocks must be positive")
        if isinstance(order, torch.Generator):
            order = torch.randperm(num_blocks, generator=order, device=order.device).tolist()
        elif order is None:
            order = range(num_blocks)
        elif sorted(order) != list(range(num_blocks)):
            raise InvalidInput(f"order must hold each of the block ids 0 … {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(order))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can still hand out."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` blocks out of the pool; their contents are whatever was left in them.

        Raises:
            InvalidInput: fewer are free; nothing is taken then.
        """
        if num_blocks < 0:
            raise InvalidInput(f"cannot allocate {num_blocks} blocks: ask for zero or more")
        if num_blocks > self.num_free:
            raise InvalidInput(
                f"the KV cache is full: {num_blocks} blocks of {self.block_size} tokens asked for, {self.num_free} of"
                f" {self.num_blocks} free. Give the cache more blocks, or run fewer or shorter sequences at a time"
            )
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises:
            InvalidInput: one of them is no block of this pool, or is free already; nothing is given back then.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise InvalidInput(f"block {block} is not one of this pool's {self.num_blocks} blocks")
            if self._is_free[block]:
                raise InvalidInput(f"block {block} is free already: each block is given back once")
        if len(set(blocks)) != len(blocks):
            raise InvalidInput(f"a block stands twice in {blocks}: each block is given back once")
        for block in blocks:
            self._is_free[block] = True
        self._free.extend(blocks)

    def check(self) -> None:
        """Assert that each block is either free once or handed out: none lost, none free twice."""
        assert len(self._is_free) == self.num_blocks
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        free = {block for block in range(self.num_blocks) if self._is_free[block]}
        assert set(self._free) == free, f"blocks lost or free without a record: {sorted(free ^ set(self._free))}"
