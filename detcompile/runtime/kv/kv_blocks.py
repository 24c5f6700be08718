"""KVBlocks: the blocks of every admitted sequence, over all KV groups, and the prefixes that sequences share.

A cache hit ends at a block boundary. A shared block is therefore full and never written again, so nothing is copied.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from detcompile.runtime.kv.block_pool import BLOCK_SIZE, NULL_BLOCK, BlockPool
from detcompile.runtime.requests.sequence import Sequence
from detcompile.step import NO_SLOT, KVGroup, ModelFacts

DIGEST_BYTES = 32  # prompts are untrusted: collisions must be infeasible


class KVStatistics(NamedTuple):
    """Counts since the start; a sequence admitted again after a preemption is counted again."""

    num_queried_tokens: int  # tokens of sequences that were looked up in the prefix cache
    num_hit_tokens: int  # of these, tokens that were cached
    num_evictions: int  # cached blocks that were reused for lack of empty ones


@dataclass(slots=True)
class _Progress:
    """Progress of ``commit`` for one admitted sequence."""

    num_published: int  # blocks at the head of the table that are already published
    first_held: list[int]  # per group: index of the first table entry that is not NULL_BLOCK


class KVBlocks:
    """Allocates blocks to sequences, shares blocks of equal content, and frees blocks.

    A sequence lives between ``admit`` and ``release``; in between, ``grow``, a step and ``commit`` alternate. All its
    block tables have the same length; the table of a window group starts with NULL_BLOCK where no query looks any
    more. Meanwhile ``token_ids`` may only grow, and this object must be the only user of ``pool``.

    A block's key is its group and a chained digest: blake2b over the previous block's digest and the block's token ids
    as little-endian int64. The digest identifies all tokens from position 0 on, which determine the keys and values. A
    sequence's ``cache_salt`` starts its chain, so sequences with different salts never share blocks.

    Args:
        groups: all layers' groups; each has a table in ``Sequence.block_tables``, at the same index.
        prefix_caching: publish full blocks, and look up prompts among them.
        salt: starts every chain; must identify everything besides tokens that contents depend on (model, cache dtype).
        num_state_slots: sequences that can have a recurrent state at a time; 0 if the layers have none. Prefixes have
            no state, so models with states have no prefix caching.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: SequenceOf[KVGroup],
        *,
        prefix_caching: bool,
        salt: bytes = b"",
        num_state_slots: int = 0,
    ) -> None:
        assert groups and all(group.window >= 0 for group in groups), f"no groups of layers: {groups}"
        assert not (num_state_slots and prefix_caching), "a cached prefix would lack its state"
        self._keeps_states = num_state_slots > 0
        self._free_slots = list(reversed(range(num_state_slots)))
        self.num_state_slots = num_state_slots
        self.pool = pool
        self.groups = tuple(groups)
        self.prefix_caching = prefix_caching
        self.salt_digest = blake2b(salt, digest_size=DIGEST_BYTES).digest()
        self._tokens_as_bytes = Struct(f"<{pool.block_size}q").pack
        self._windows = [(index, group) for index, group in enumerate(self.groups) if group.window]
        self._progress: dict[Sequence, _Progress] = {}
        self._num_queried_tokens = self._num_hit_tokens = 0

    @property
    def statistics(self) -> KVStatistics:
        """Prefix cache statistics so far."""
        return KVStatistics(self._num_queried_tokens, self._num_hit_tokens, self.pool.num_evictions)

    def forget_prefixes(self, salt: bytes) -> None:
        """Change the salt, so that nothing published before is found. No sequence may be admitted."""
        assert not self._progress, "a running sequence would publish keys of the old weights"
        self.salt_digest = blake2b(salt, digest_size=DIGEST_BYTES).digest()

    def needed(self, num_tokens: int, num_computed: int = 0) -> int:
        """Return the blocks, over all groups, to compute tokens num_computed … num_tokens - 1 without cache hits.

        A group of window w needs the blocks of positions num_computed - w + 1 … num_tokens - 1; other groups need all.
        """
        stop = self.pool.blocks_for(num_tokens)
        return sum(stop - self.first_visible(group, num_computed) for group in self.groups)

    def peak(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` tokens holds, with steps of up to ``chunk`` tokens.

        A group of window w never holds more than ceil((w + chunk - 2) / block_size) + 1. With steps in flight,
        ``chunk`` spans from the first uncommitted token to the last one that has a block.
        """
        whole = self.pool.blocks_for(num_tokens)
        return sum(
            min(whole, self.pool.blocks_for(group.window + chunk - 2) + 1) if group.window else whole
            for group in self.groups
        )

    def admit(self, sequence: Sequence, num_tokens: int, *, reuse: bool = True) -> int | None:
        """Give a new sequence its longest cached prefix, and blocks up to ``num_tokens``.

        Sets ``block_tables`` and ``num_computed``. The hit is a multiple of the block size, leaves at least one token
        to compute, and may be longer than ``num_tokens``.

        Args:
            num_tokens: tokens to have blocks for, counted from position 0.
            reuse: look up a cached prefix; False computes every token, for callers that need all logits.

        Returns:
            The number of tokens hit. None if too few blocks or no state slot are free; nothing changes then, except
            that digests may have been computed.
        """
        assert sequence not in self._progress, "a sequence is admitted once, then released"
        assert sequence.num_computed == 0 and not any(sequence.block_tables), "the sequence already has blocks"
        looks = self.prefix_caching and reuse
        num_hit = self._longest_hit(sequence) if looks else 0
        first_held = [self.first_visible(group, num_hit * self.pool.block_size) for group in self.groups]
        hits = [
            [self._cached(index, sequence.block_digests[j]) for j in range(first, num_hit)]
            for index, first in enumerate(first_held)
        ]
        shared = [block for table in hits for block in table]
        num_new = max(0, self.pool.blocks_for(num_tokens) - num_hit)
        num_taken = num_new * len(self.groups) + sum(self.pool.num_references(block) == 0 for block in shared)
        if num_taken > self.pool.num_free or (self._keeps_states and not self._free_slots):
            return None
        if self._keeps_states:
            sequence.state_slot = self._free_slots.pop()
        self.pool.share(shared)  # before the allocation, which could evict them
        sequence.block_tables = [[NULL_BLOCK] * first + table for first, table in zip(first_held, hits)]
        self._extend(sequence, num_new)
        sequence.num_computed = num_hit * self.pool.block_size
        self._progress[sequence] = _Progress(num_hit, first_held)
        self._num_queried_tokens += len(sequence.token_ids) if looks else 0
        self._num_hit_tokens += sequence.num_computed
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for positions < ``num_tokens``. Return False, with nothing changed, if too few are free."""
        assert sequence in self._progress, "only an admitted sequence grows"
        num_new = self.pool.blocks_for(num_tokens) - len(sequence.block_tables[0])
        if num_new * len(self.groups) > self.pool.num_free:
            return False
        if num_new > 0:
            self._extend(sequence, num_new)
        return True

    def branch(self, sequence: Sequence, start: int, num_tokens: int) -> list[list[int]] | None:
        """Return tables of a draft that branches off at index ``start``: the sequence's blocks, then new ones.

        The caller copies the tokens before ``start`` in its block, and frees the new blocks with ``discard`` before
        anything else happens to the sequence. None if too few blocks are free.
        """
        first = start // self.pool.block_size
        num_new = self.pool.blocks_for(num_tokens) - first
        if num_new * len(self.groups) > self.pool.num_free:
            return None
        fresh = self.pool.allocate(num_new * len(self.groups))
        return [
            table[:first] + fresh[index * num_new : (index + 1) * num_new]
            for index, table in enumerate(sequence.block_tables)
        ]

    def fork(self, start: int, num_tokens: int, num_branches: int) -> NDArray[np.int32]:
        """Allocate blocks [G, branches, n] for drafts that branch off at index ``start``, from its block on.

        Serves ``num_branches`` drafts, or as many as the pool has blocks for. The caller copies the tokens before
        ``start`` in its block, and returns the blocks with ``adopt`` or ``discard``.
        """
        num_new = self.pool.blocks_for(num_tokens) - start // self.pool.block_size
        count = min(num_branches, self.pool.num_free // (num_new * len(self.groups)))
        fresh = self.pool.allocate(count * num_new * len(self.groups))
        return np.array(fresh, np.int32).reshape(len(self.groups), count, num_new)

    def adopt(self, sequence: Sequence, blocks: SequenceOf[list[int]], first: int) -> None:
        """Accept a draft: its ``blocks`` of each group replace the sequence's blocks from entry ``first`` on."""
        for table, forked in zip(sequence.block_tables, blocks, strict=True):
            self.pool.free(table[first : first + len(forked)])
            table[first : first + len(forked)] = forked

    def discard(self, blocks: SequenceOf[int]) -> None:
        """Reject drafts: free their blocks."""
        self.pool.free(blocks)

    def commit(self, sequence: Sequence) -> None:
        """Publish blocks that known tokens have filled; free blocks of window groups that no later query reads.

        Call it once a step's tokens are known. Tokens computed beyond ``token_ids`` (in flight, or drafts that may be
        rejected) are not published and free nothing. ``num_computed`` may count launched steps that still run, because
        later steps run after them. It must not count a step that is still being planned: another sequence could get a
        freed block while that step reads it.
        """
        progress = self._progress[sequence]
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        num_full = num_known // self.pool.block_size
        if num_full > progress.num_published and self.prefix_caching:
            for j in range(progress.num_published, num_full):
                digest = self._digest(sequence, j)
                for index, table in enumerate(sequence.block_tables):
                    self.pool.publish(table[j], (index, digest))
            progress.num_published = num_full
        for index, group in self._windows:
            held, first = progress.first_held[index], self.first_visible(group, num_known)
            if first > held:
                table = sequence.block_tables[index]
                self.pool.free(table[held:first])
                table[held:first] = [NULL_BLOCK] * (first - held)
                progress.first_held[index] = first

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, at any time; it can be admitted again, here or elsewhere."""
        del self._progress[sequence]
        # Position by position, so that every group's tail is evicted before its head.
        self.pool.free([block for entries in zip(*sequence.block_tables) for block in entries if block != NULL_BLOCK])
        if self._keeps_states:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = NO_SLOT
        sequence.block_tables = []
        sequence.block_digests = []  # another KVBlocks may have another salt or block size
        sequence.num_computed = 0

    def check(self, sequences: Iterable[Sequence], forked: SequenceOf[int] = ()) -> None:
        """Assert that ``sequences`` are those admitted, that their tables are sound, and that the pool agrees.

        Args:
            forked: blocks from ``fork`` that were not returned yet.
        """
        sequences = list(sequences)
        assert len(sequences) == len(self._progress) and set(sequences) == self._progress.keys(), "sequences lost"
        for sequence in sequences:
            progress, tables = self._progress[sequence], sequence.block_tables
            assert [len(table) for table in tables] == [len(tables[0])] * len(self.groups), "tables of unequal length"
            assert self.pool.blocks_for(sequence.num_computed) <= len(tables[0]), "computed tokens without a block"
            for table, first in zip(tables, progress.first_held):
                nulls = [j for j, block in enumerate(table) if block == NULL_BLOCK]
                assert nulls == list(range(first)), f"NULL_BLOCK at {nulls} of a table with blocks from {first} on"
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            assert progress.num_published <= num_known // self.pool.block_size, "unknown content was published"
            num_full = len(sequence.token_ids) // self.pool.block_size
            assert len(sequence.block_digests) <= num_full, "digests of unknown tokens"
        if self._keeps_states:
            slots = [sequence.state_slot for sequence in sequences] + self._free_slots
            assert sorted(slots) == list(range(self.num_state_slots)), f"state slots shared or lost: {slots}"
        self.pool.check([forked, *(table for sequence in sequences for table in sequence.block_tables)])

    def next_digest(self, previous: bytes, token_ids: SequenceOf[int]) -> bytes:
        """Return the digest of a full block after the block with digest ``previous`` (or ``salt_digest``)."""
        return blake2b(previous + self._tokens_as_bytes(*token_ids), digest_size=DIGEST_BYTES).digest()

    def first_visible(self, group: KVGroup, position: int) -> int:
        """Return the first block that queries at ``position`` or later read."""
        return max(0, position - group.window + 1) // self.pool.block_size if group.window else 0

    def _longest_hit(self, sequence: Sequence) -> int:
        """Return the largest number of blocks to reuse such that every group has all keys that the next query reads."""
        longest = 0
        runs = [0] * len(self.groups)  # consecutive cached blocks up to the current one
        for num_blocks in range(1, (len(sequence.token_ids) - 1) // self.pool.block_size + 1):
            digest = self._digest(sequence, num_blocks - 1)
            for index, group in enumerate(self.groups):
                runs[index] = runs[index] + 1 if self.pool.lookup((index, digest)) is not None else 0
                if not group.window and runs[index] < num_blocks:
                    return longest
            position = num_blocks * self.pool.block_size
            if all(run >= num_blocks - self.first_visible(group, position) for run, group in zip(runs, self.groups)):
                longest = num_blocks
        return longest

    def _cached(self, group: int, digest: bytes) -> int:
        """Return a block that ``_longest_hit`` has found."""
        block = self.pool.lookup((group, digest))
        assert block is not None
        return block

    def _digest(self, sequence: Sequence, block: int) -> bytes:
        """Return the chained digest of the tokens up to the end of block ``block``; cached in ``block_digests``."""
        digests, size = sequence.block_digests, self.pool.block_size
        for j in range(len(digests), block + 1):
            previous = digests[-1] if digests else self._root(sequence.cache_salt)
            digests.append(self.next_digest(previous, sequence.token_ids[j * size : (j + 1) * size]))
        return digests[block]

    def _root(self, cache_salt: str) -> bytes:
        """Return the start of the digest chain for this salt."""
        if not cache_salt:
            return self.salt_digest
        salt = cache_salt.encode(errors="surrogatepass")
        return blake2b(self.salt_digest + salt, digest_size=DIGEST_BYTES).digest()

    def _extend(self, sequence: Sequence, num_new: int) -> None:
        """Append ``num_new`` new blocks to every table."""
        blocks = self.pool.allocate(num_new * len(self.groups))
        for index, table in enumerate(sequence.block_tables):
            table += blocks[index * num_new : (index + 1) * num_new]


def plain_blocks(
    facts: ModelFacts,
    num_tokens: int,
    block_size: int = BLOCK_SIZE,
    order: SequenceOf[int] | torch.Generator | None = None,
    num_sequences: int | None = None,
    prefix_caching: bool = False,
) -> KVBlocks:
    """Return the blocks of a KV cache for at least ``num_tokens`` tokens.

    Args:
        num_tokens: tokens of all sequences together, each rounded up to whole blocks by the caller.
        order: the pool hands out its blocks in this order.
        num_sequences: sequences that have a state at a time; None takes as many as there are blocks.
        prefix_caching: equal prefixes share blocks; not for models with states.
    """
    whole = max(1, -(-num_tokens // block_size))
    pool = BlockPool(whole * len(facts.kv_groups) + 1, block_size, order)
    num_states = (num_sequences or whole) if facts.state_shapes else 0
    return KVBlocks(pool, facts.kv_groups, prefix_caching=prefix_caching, num_state_slots=num_states)
