"""KVBlocks: the blocks of every admitted sequence, over all KV groups, and the prefixes that sequences share.

A hit ends at a block border, so a shared block is full and is never written again: nothing is ever copied.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.kv.block_pool import NULL_BLOCK, BlockPool
from detcompile.runtime.requests.sequence import Sequence
from detcompile.step import NO_SLOT, KVGroup

__all__ = ["KVBlocks", "KVStatistics"]

DIGEST_BYTES = 32  # prompts come from strangers: no collision may be findable


class KVStatistics(NamedTuple):
    """Counts since the start; a sequence admitted again after a preemption counts again."""

    num_queried_tokens: int  # tokens of the sequences admitted with a look at the cache
    num_hit_tokens: int  # tokens among those that were found there
    num_evictions: int  # blocks whose content was forgotten for lack of empty ones


@dataclass(slots=True)
class _Progress:
    """What ``settle`` has done for one admitted sequence."""

    num_published: int  # blocks at the head of the table that need no publishing any more
    first_held: list[int]  # one a group: table entries before it are NULL_BLOCK, the others are blocks


class KVBlocks:
    """Gives sequences their blocks, shares blocks of equal content among them, and takes blocks back.

    A sequence is between ``admit`` and ``release``; in between it alternates ``grow``, a step, and ``settle``. All its
    block tables have the same length; the table of a window group starts with NULL_BLOCK where no query looks any
    more. ``token_ids`` may only grow meanwhile, and this object must be the only user of ``pool``.

    A block's key is its group and a chained digest: blake2b over the digest of the block before it and the block's
    token ids as little-endian int64. It says all tokens from position 0 on, and so all that keys and values depend on.
    A sequence's ``cache_salt`` begins its chain, so that sequences of other salts do not find its blocks.

    Args:
        groups: all layers' groups; each has a table in ``Sequence.block_tables``, at the same index.
        prefix_caching: publish full blocks and look prompts up among them.
        salt: begins every chain; what the contents depend on besides tokens (model, dtype of the cache) belongs here.
        num_state_slots: sequences that can have a state at a time; 0 for a model whose layers carry none. A prefix has
            no state of its own, so such models have no prefix caching.
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
        """What prefix caching has found and lost so far."""
        return KVStatistics(self._num_queried_tokens, self._num_hit_tokens, self.pool.num_evictions)

    def forget_prefixes(self, salt: bytes) -> None:
        """Begin every chain with another salt: nothing that was published is found again. No sequence is admitted."""
        assert not self._progress, "a running sequence would publish keys of before"
        self.salt_digest = blake2b(salt, digest_size=DIGEST_BYTES).digest()

    def needed(self, num_tokens: int, num_computed: int = 0) -> int:
        """Blocks, over all groups, that a sequence without hits holds to compute tokens num_computed … num_tokens - 1.

        A group of window w holds the blocks of positions num_computed - w + 1 … num_tokens - 1, the others all.
        """
        stop = self.pool.blocks_for(num_tokens)
        return sum(stop - self.first_visible(group, num_computed) for group in self.groups)

    def peak(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of ``num_tokens`` tokens ever holds, at most, if no step computes over ``chunk``.

        A group of window w never holds more than ceil((w + chunk - 2) / block_size) + 1. With steps in flight,
        ``chunk`` is the tokens from the first one not settled to the last one that has a block.
        """
        whole = self.pool.blocks_for(num_tokens)
        return sum(
            min(whole, self.pool.blocks_for(group.window + chunk - 2) + 1) if group.window else whole
            for group in self.groups
        )

    def admit(self, sequence: Sequence, num_tokens: int, *, reuse: bool = True) -> int | None:
        """Give a new sequence its longest cached prefix, and blocks to compute on from there to ``num_tokens``.

        Sets ``block_tables`` and ``num_computed``. The hit is a multiple of the block size, leaves one token to
        compute, and may be longer than ``num_tokens``.

        Args:
            num_tokens: tokens to have blocks for, counted from position 0.
            reuse: look for a cached prefix; False computes every token, for callers that want the logits of all.

        Returns:
            The number of tokens hit; None if the blocks do not suffice, or no state is free, with nothing changed but
            digests computed.
        """
        assert sequence not in self._progress, "a sequence is admitted once, then released"
        assert sequence.num_computed == 0 and not any(sequence.block_tables), "a sequence that others gave blocks"
        looks = self.prefix_caching and reuse
        num_hit = self._longest_hit(sequence) if looks else 0
        first_held = [self.first_visible(group, num_hit * self.pool.block_size) for group in self.groups]
        hits = [
            [self._found(index, sequence.block_digests[j]) for j in range(first, num_hit)]
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
        """Blocks so that positions < ``num_tokens`` can be written; False, and nothing changed, if too few are free."""
        assert sequence in self._progress, "only an admitted sequence grows"
        num_new = self.pool.blocks_for(num_tokens) - len(sequence.block_tables[0])
        if num_new * len(self.groups) > self.pool.num_free:
            return False
        if num_new > 0:
            self._extend(sequence, num_new)
        return True

    def branch(self, sequence: Sequence, start: int, num_tokens: int) -> list[list[int]] | None:
        """Tables of a draft that parts from the sequence at index ``start``: its blocks before, then fresh ones.

        The caller copies what stands before ``start`` in its block, and gives the fresh blocks back by ``discard``
        before anything else happens to the sequence. None if too few are free.
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
        """Blocks [G, branches, n] of drafts that part from a sequence at index ``start``, from that index' block on.

        For ``num_branches`` at once, or as many as the pool has blocks for. The caller copies what stands before
        ``start`` in its block, and gives them back by ``adopt`` or ``discard``.
        """
        num_new = self.pool.blocks_for(num_tokens) - start // self.pool.block_size
        count = min(num_branches, self.pool.num_free // (num_new * len(self.groups)))
        fresh = self.pool.allocate(count * num_new * len(self.groups))
        return np.array(fresh, np.int32).reshape(len(self.groups), count, num_new)

    def adopt(self, sequence: Sequence, blocks: SequenceOf[list[int]], first: int) -> None:
        """A draft was right: its ``blocks`` of each group replace the sequence's own from entry ``first`` on."""
        for own, forked in zip(sequence.block_tables, blocks, strict=True):
            self.pool.free(own[first : first + len(forked)])
            own[first : first + len(forked)] = forked

    def discard(self, blocks: SequenceOf[int]) -> None:
        """Drafts were wrong: blocks of their own are free again."""
        self.pool.free(blocks)

    def settle(self, sequence: Sequence) -> None:
        """Publish the blocks that known tokens have filled; free those of window groups that no later query sees.

        Called once a step's tokens are known. Tokens computed beyond ``token_ids`` (in flight, or drafts that may be
        rejected) are not published, and free nothing. ``num_computed`` may count steps that were launched and still
        run, as later steps run after them; it must not count a step that is still being planned, where another
        sequence could get a freed block while this one reads it.
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
        """Take all blocks back, at any time; the sequence can be admitted again, here or elsewhere."""
        del self._progress[sequence]
        # Position by position, so that what is evicted first is the tail of every group, not all of one group.
        self.pool.free([block for entries in zip(*sequence.block_tables) for block in entries if block != NULL_BLOCK])
        if self._keeps_states:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = NO_SLOT
        sequence.block_tables = []
        sequence.block_digests = []  # another KVBlocks has another salt, or another block size
        sequence.num_computed = 0

    def check(self, sequences: Iterable[Sequence], forked: SequenceOf[int] = ()) -> None:
        """Assert that ``sequences`` are those admitted, that their tables are sound, and that the pool agrees.

        Args:
            forked: blocks of drafts, which ``fork`` gave and nobody gave back yet.
        """
        sequences = list(sequences)
        assert len(sequences) == len(self._progress) and set(sequences) == self._progress.keys(), "sequences lost"
        for sequence in sequences:
            progress, tables = self._progress[sequence], sequence.block_tables
            assert [len(table) for table in tables] == [len(tables[0])] * len(self.groups), "tables of unequal length"
            assert self.pool.blocks_for(sequence.num_computed) <= len(tables[0]), "computed tokens without a block"
            for table, first in zip(tables, progress.first_held):
                nulls = [j for j, block in enumerate(table) if block == NULL_BLOCK]
                assert nulls == list(range(first)), f"NULL_BLOCK at {nulls} of a table that holds all from {first} on"
            num_known = min(sequence.num_computed, len(sequence.token_ids))
            assert progress.num_published <= num_known // self.pool.block_size, "unknown content was published"
            num_full = len(sequence.token_ids) // self.pool.block_size
            assert len(sequence.block_digests) <= num_full, "digests of tokens that are not known"
        if self._keeps_states:
            slots = [sequence.state_slot for sequence in sequences] + self._free_slots
            assert sorted(slots) == list(range(self.num_state_slots)), f"states of two sequences, or of none: {slots}"
        self.pool.check([forked, *(table for sequence in sequences for table in sequence.block_tables)])

    def next_digest(self, previous: bytes, token_ids: SequenceOf[int]) -> bytes:
        """Digest of a full block behind another one, or behind ``salt_digest``."""
        return blake2b(previous + self._tokens_as_bytes(*token_ids), digest_size=DIGEST_BYTES).digest()

    def first_visible(self, group: KVGroup, position: int) -> int:
        """The first block of which a query at ``position``, or a later one, sees a key."""
        return max(0, position - group.window + 1) // self.pool.block_size if group.window else 0

    def _longest_hit(self, sequence: Sequence) -> int:
        """The largest number of blocks after which every group has what the next query sees; one token is left over."""
        longest = 0
        runs = [0] * len(self.groups)  # cached blocks in a row, up to the one looked at
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

    def _found(self, group: int, digest: bytes) -> int:
        """The block that ``_longest_hit`` saw."""
        block = self.pool.lookup((group, digest))
        assert block is not None
        return block

    def _digest(self, sequence: Sequence, block: int) -> bytes:
        """Chained digest of the tokens up to the end of block ``block``, which are known; kept in ``block_digests``."""
        digests, size = sequence.block_digests, self.pool.block_size
        for j in range(len(digests), block + 1):
            previous = digests[-1] if digests else self._root(sequence.cache_salt)
            digests.append(self.next_digest(previous, sequence.token_ids[j * size : (j + 1) * size]))
        return digests[block]

    def _root(self, cache_salt: str) -> bytes:
        """What a chain of this salt begins with."""
        if not cache_salt:
            return self.salt_digest
        salt = cache_salt.encode(errors="surrogatepass")
        return blake2b(self.salt_digest + salt, digest_size=DIGEST_BYTES).digest()

    def _extend(self, sequence: Sequence, num_new: int) -> None:
        """Append ``num_new`` fresh blocks to every table."""
        blocks = self.pool.allocate(num_new * len(self.groups))
        for index, table in enumerate(sequence.block_tables):
            table += blocks[index * num_new : (index + 1) * num_new]
