"""BlockPool: free and used blocks of the paged KV cache, with reference counts and content keys."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import torch

from detcompile.errors import InvalidInput

BLOCK_SIZE_MULTIPLE = 16
BLOCK_SIZE = 64  # default, in tokens
NULL_BLOCK = 0  # never allocated: padding, and table entries that no query reads, point at it


def check_block_size(block_size: int) -> None:
    """Raise InvalidInput unless the attention kernels can read blocks of this many tokens."""
    if block_size <= 0 or block_size % BLOCK_SIZE_MULTIPLE != 0:
        raise InvalidInput(
            f"block_size {block_size} is not a positive multiple of {BLOCK_SIZE_MULTIPLE}: the attention kernels read"
            f" keys in groups of {BLOCK_SIZE_MULTIPLE}. Use 16, 32, 64, …"
        )


class BlockPool:
    """Counts references to each block; a freed block with known content can be found until it is reused.

    Free blocks are allocated in this order: first those without content, the last freed one first; then those with
    content, least recently freed first, which evicts the content. Every operation takes time proportional to the number
    of blocks it is given, never to the size of the pool.

    Args:
        num_blocks: blocks of the cache, ids 0 … num_blocks - 1. Block 0 is NULL_BLOCK, so a pool with n usable blocks
            has num_blocks = n + 1.
        block_size: tokens per block, a multiple of 16.
        order: the order in which a new pool allocates its blocks. None is ascending; a permutation of the usable ids
            1 … num_blocks - 1, or a generator that draws one, lets a test place sequences anywhere.

    Raises:
        InvalidInput: a size is invalid, or the order is not a permutation.
    """

    def __init__(self, num_blocks: int, block_size: int, order: Sequence[int] | torch.Generator | None = None) -> None:
        check_block_size(block_size)
        if num_blocks <= 1:
            raise InvalidInput(
                f"num_blocks must be at least 2, got {num_blocks}: block {NULL_BLOCK} is never allocated"
            )
        if isinstance(order, torch.Generator):
            order = (torch.randperm(num_blocks - 1, generator=order, device=order.device) + 1).tolist()
        elif order is None:
            order = range(1, num_blocks)
        elif sorted(order) != list(range(1, num_blocks)):
            raise InvalidInput(f"order must hold each of the usable block ids 1 … {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._block_of: dict[Hashable, int] = {}
        self._empty = list(reversed(order))  # stack of free blocks without content
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with a key, least recently freed first

    @property
    def num_usable(self) -> int:
        """Number of blocks that can be in use at a time: all but NULL_BLOCK."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including those with content."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def num_references(self, block: int) -> int:
        """Return how many tables hold ``block``; 0 if it is free."""
        return self._references[block]

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate free blocks with one reference each; their contents are undefined.

        Raises:
            InvalidInput: fewer blocks are free; nothing is allocated then.
        """
        if num_blocks < 0:
            raise InvalidInput(f"cannot allocate {num_blocks} blocks: ask for zero or more")
        self.require_free(num_blocks)
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(num_blocks)]
        for block in taken:
            self._references[block] = 1
        return taken

    def require_free(self, num_blocks: int) -> None:
        """Raise InvalidInput if fewer blocks are free."""
        if num_blocks > self.num_free:
            raise InvalidInput(
                f"the KV cache is full: {num_blocks} blocks of {self.block_size} tokens requested, {self.num_free} of"
                f" {self.num_usable} free. Give the cache more blocks, or run fewer or shorter sequences at a time"
            )

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block: one in use, or a free one found by ``lookup``."""
        for block in blocks:
            assert 0 < block < self.num_blocks, f"block {block} is not in this pool"
            assert self._references[block] or block in self._cached, f"block {block} is free and has no content"
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, given from the head of a table to its tail.

        A block without references is free. The tail's content is evicted before the head's, because without the head
        it cannot be found.

        Raises:
            InvalidInput: a block is not in this pool, is already free, or is given twice; nothing is freed then.
        """
        for block in blocks:
            if not 0 < block < self.num_blocks:
                raise InvalidInput(f"block {block} is not one of the blocks 1 … {self.num_usable} of this pool")
            if self._references[block] == 0:
                raise InvalidInput(f"block {block} is free already: free each reference once")
        if len(set(blocks)) != len(blocks):
            raise InvalidInput(f"a block appears twice in {blocks}: a table holds each block once")
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: Hashable) -> None:
        """Let ``lookup`` find ``block`` under ``key``, unless another block already has that key.

        Args:
            block: a block in use; it must not be written while it has the key.
            key: identifies the content in full; a block has at most one key.
        """
        assert self._references[block] > 0, f"block {block} is free: only a block in use can be published"
        if self._block_of.setdefault(key, block) == block:
            assert self._keys[block] in (None, key), f"block {block} was written after it was published"
            self._keys[block] = key

    def clear(self) -> None:
        """Free every block and forget all contents."""
        self._references = [0] * self.num_blocks
        self._keys = [None] * self.num_blocks
        self._block_of.clear()
        self._empty = list(reversed(range(1, self.num_blocks)))
        self._cached.clear()

    def lookup(self, key: Hashable) -> int | None:
        """Return the block published under ``key``, free or in use; ``share`` it before the next ``allocate``."""
        return self._block_of.get(key)

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Assert that ``tables`` hold all references, and that every other block is free exactly once.

        Args:
            tables: the block tables of all users of this pool; NULL_BLOCK in them does not count.
        """
        held = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        assert all(0 < block < self.num_blocks for block in held), f"a table holds blocks of another pool: {held}"
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, in {held[block]} tables"
        free = Counter([*self._empty, *self._cached])
        assert all(count == 1 for count in free.values()), f"a block is free twice: {free}"
        lost = {block for block in range(1, self.num_blocks) if self._references[block] == 0} ^ free.keys()
        assert not lost, f"blocks lost, or free while in use: {sorted(lost)}"
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {block: key for key, block in self._block_of.items()} == keyed, "keys and blocks disagree"
        assert len(self._block_of) == len(keyed), "a block has two keys"
        assert not keyed.keys() & set(self._empty), "a block with content is among the empty ones"
        assert self._cached.keys() <= keyed.keys(), "a cached block has no key"

    def _evict(self) -> int:
        """Forget the content of the least recently freed block and return the block."""
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._keys[block]]
        self._keys[block] = None
        self.num_evictions += 1
        return block


def whole_blocks(num_tokens: int) -> int:
    """Round a number of tokens up to whole blocks of BLOCK_SIZE."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE
