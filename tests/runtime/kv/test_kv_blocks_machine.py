"""KVBlocks under any order of calls: a query sees its own sequence's content, bit for bit.

The model writes into each slot whose content it is: the group, and a name for all tokens up to that position. Stale,
overwritten, misplaced or wrongly shared content then shows as another sequence's name.
"""

import itertools
from dataclasses import dataclass
from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from detcompile.runtime.kv.block_pool import NULL_BLOCK, BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.step import KVGroup

SALT = b"a model"
MAX_BLOCKS = 6  # of one sequence
ACTIONS = ["arrive", "serve", "run", "release", "serve", "resume", "settle", "learn_tokens", "arrive", "reject"]


@dataclass(eq=False)
class Row:
    """A sequence, and all the tokens that it will ever have: those not known yet may be computed ahead."""

    sequence: Sequence
    script: list[int]
    content: list[list[tuple[int, int]]]  # [group][position]: what belongs into the slot
    num_settled: int = 0  # blocks

    @property
    def num_known(self):
        return min(self.sequence.num_computed, len(self.sequence.token_ids))


class KVMachine(RuleBasedStateMachine):
    """Sequences arrive, run ahead, are settled, canceled and preempted in any order over a small pool."""

    @initialize(
        block_size=st.sampled_from([16, 16, 16, 16, 32, 64, 256]), num_usable=st.integers(3, 40), data=st.data()
    )
    def build(self, block_size, num_usable, data):
        borders = st.sampled_from([0, 0, 1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size])
        windows = data.draw(st.lists(borders | st.integers(1, 3 * block_size), min_size=1, max_size=3))
        self.size, self.windows = block_size, windows
        self.pool = BlockPool(num_usable + 1, block_size)
        groups = [KVGroup((index,), window) for index, window in enumerate(windows)]
        self.caching = data.draw(st.sampled_from([True, True, True, True, False]))
        self.kv_blocks = KVBlocks(self.pool, groups, prefix_caching=self.caching, salt=SALT)
        self.slots = {}  # block -> what each of its slots holds
        self.waiting, self.running = [], []
        self.prompts = []  # and answers of the past, to share prefixes with
        self.fresh = itertools.count(1)  # tokens nobody has had
        self.names = {}  # (name of the tokens before, token) -> name
        self.published = {}  # key -> what the block must hold
        self.num_queried = self.num_hit = 0

    # What the model says

    def write_script(self, row, tokens):
        for token in tokens:
            previous = row.content[0][-1][1] if row.script else 0
            name = self.names.setdefault((previous, token), len(self.names) + 1)
            row.script.append(token)
            for index, content in enumerate(row.content):
                content.append((index, name))

    def digests(self, tokens):
        digest = blake2b(SALT, digest_size=32).digest()
        for start in range(0, len(tokens) - self.size + 1, self.size):
            in_bytes = [token.to_bytes(8, "little", signed=True) for token in tokens[start : start + self.size]]
            digest = blake2b(digest + b"".join(in_bytes), digest_size=32).digest()
            yield digest

    def visible_blocks(self, window, position):
        """Blocks of the keys before ``position`` that a query there sees."""
        return sorted({p // self.size for p in range(position) if not window or p > position - window})

    def expected_hit(self, sequence, reuse):
        """The blocks of the longest hit, for each group, and its tokens; every length is tried."""
        digests = list(self.digests(sequence.token_ids))
        hits = range((len(sequence.token_ids) - 1) // self.size * self.size, 0, -self.size)
        for hit in hits if self.caching and reuse else []:
            tables = [
                [self.pool.lookup((index, digests[j])) for j in self.visible_blocks(window, hit)]
                for index, window in enumerate(self.windows)
            ]
            if None not in itertools.chain(*tables):
                return hit, tables
        return 0, [[] for _ in self.windows]

    # What happens

    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def act(self, action, data):
        """One rule, as hypothesis switches single rules off for whole runs: without arrivals nothing would happen."""
        getattr(self, action)(data)

    def arrive(self, data):
        old = data.draw(st.sampled_from([*self.prompts[-1:-6:-1], []]))
        kept = data.draw(st.sampled_from([len(old), len(old) // self.size * self.size]) | st.integers(0, len(old)))
        lengths = st.sampled_from([2 * self.size + 1, self.size, 1]) | st.integers(0 if kept else 1, 2 * self.size)
        num_fresh = data.draw(lengths)
        prompt = old[:kept][: MAX_BLOCKS * self.size // 2] + [next(self.fresh) for _ in range(num_fresh)]
        if data.draw(st.sampled_from([False] * 5 + [True])):
            prompt[0] = next(self.fresh)  # the same blocks of tokens, after another beginning
        row = Row(Sequence(list(prompt)), [], [[] for _ in self.windows])
        self.write_script(row, prompt)
        self.prompts.append(prompt)
        self.waiting.append(row)
        self.admit(row, data)

    def resume(self, data):
        if self.waiting:
            self.admit(data.draw(st.sampled_from(self.waiting)), data)

    def admit(self, row, data):
        sequence = row.sequence
        num_tokens = data.draw(st.just(len(sequence.token_ids)) | st.integers(1, len(sequence.token_ids)))
        reuse = data.draw(st.sampled_from([True] * 5 + [False]))
        hit, tables = self.expected_hit(sequence, reuse)
        num_new = max(0, self.pool.blocks_for(num_tokens) - hit // self.size) * len(self.windows)
        num_taken = num_new + sum(self.pool.num_references(block) == 0 for block in itertools.chain(*tables))
        num_free = self.pool.num_free
        result = self.kv_blocks.admit(sequence, num_tokens, reuse=reuse)
        if num_taken > num_free:
            assert result is None and sequence.block_tables == [] and sequence.num_computed == 0
            assert self.pool.num_free == num_free
            return
        assert result == sequence.num_computed == hit
        assert self.pool.num_free == num_free - num_taken
        for table, expected in zip(sequence.block_tables, tables):
            held = table[: hit // self.size]
            assert held == [NULL_BLOCK] * (len(held) - len(expected)) + expected
            assert len(table) == max(hit // self.size, self.pool.blocks_for(num_tokens))
        self.num_queried += len(sequence.token_ids) if self.caching and reuse else 0
        self.num_hit += hit
        row.num_settled = hit // self.size
        self.waiting.remove(row)
        self.running.append(row)

    def run(self, data):
        if not self.running:
            return
        row = data.draw(st.sampled_from(self.running))
        most = len(row.sequence.token_ids) + data.draw(st.sampled_from([0, 0, 0, 1, 5])) - row.sequence.num_computed
        if most > 0:
            self.compute(row, data.draw(st.integers(1, most) | st.just(most)))

    def serve(self, data):
        """As an engine does it: everybody computes, draws a token if all others are computed, and is settled."""
        chunk, rounds = data.draw(st.sampled_from([1000, 1, 16, 17, 40])), data.draw(st.integers(1, 20))
        for row in self.running * rounds:
            if self.compute(row, max(0, min(chunk, len(row.sequence.token_ids) - row.sequence.num_computed))):
                self.draw_tokens(row, 1)
                self.settle_row(row)

    def compute(self, row, n):
        sequence = row.sequence
        start, stop = sequence.num_computed, sequence.num_computed + n
        before = [list(table) for table in sequence.block_tables]
        num_missing = max(0, self.pool.blocks_for(stop) - len(before[0])) * len(before)
        num_free = self.pool.num_free
        grown = self.kv_blocks.grow(sequence, stop)
        assert grown == (num_missing <= num_free)
        assert self.pool.num_free == num_free - num_missing * grown
        if not grown:
            assert sequence.block_tables == before
            return False
        self.write_script(row, [next(self.fresh) for _ in range(stop - len(row.script))])
        for table, content in zip(sequence.block_tables, row.content):
            for position in range(start, stop):
                block = table[position // self.size]
                assert block != NULL_BLOCK
                self.slots.setdefault(block, [None] * self.size)[position % self.size] = content[position]
        sequence.num_computed = stop
        return True

    def learn_tokens(self, data):
        if self.running:
            self.draw_tokens(data.draw(st.sampled_from(self.running)), data.draw(st.integers(1, 40)))

    def draw_tokens(self, row, count):
        """A token is known at the earliest once the one before it is computed."""
        sequence = row.sequence
        known = len(sequence.token_ids)
        stop = min(known + count, sequence.num_computed + 1, MAX_BLOCKS * self.size)
        self.write_script(row, [next(self.fresh) for _ in range(stop - len(row.script))])
        sequence.token_ids += row.script[known:stop]

    def reject(self, data):
        """Tokens computed ahead turn out to be others."""
        if not self.running:
            return
        row = data.draw(st.sampled_from(self.running))
        known = len(row.sequence.token_ids)
        row.sequence.num_computed = min(row.sequence.num_computed, known)
        del row.script[known:]
        for content in row.content:
            del content[known:]

    def settle(self, data):
        if self.running:
            self.settle_row(data.draw(st.sampled_from(self.running)))

    def settle_row(self, row):
        tables, size = row.sequence.block_tables, self.size
        self.kv_blocks.commit(row.sequence)
        for table, window in zip(tables, self.windows):
            first = max(0, row.num_known - window + 1) // size if window else 0
            assert [block == NULL_BLOCK for block in table] == [j < first for j in range(len(table))]
            ahead = len(table) * size - row.num_known
            assert not window or len(table) - table.count(NULL_BLOCK) <= -(-(window + ahead) // size) + 1
        if self.caching:
            for j, digest in enumerate(self.digests(row.script[: row.num_known])):
                for index, content in enumerate(row.content):
                    self.published[index, digest] = content[j * size : (j + 1) * size]
                    assert j < row.num_settled or self.pool.lookup((index, digest)) is not None
            row.num_settled = row.num_known // size

    def release(self, data):
        if not self.running:
            return
        row = data.draw(st.sampled_from(self.running))
        self.running.remove(row)
        self.prompts.append(list(row.sequence.token_ids))  # the next turn of a dialogue begins with it
        self.kv_blocks.release(row.sequence)
        assert row.sequence.block_tables == row.sequence.block_digests == [] and row.sequence.num_computed == 0
        if data.draw(st.booleans()):  # preempted
            self.waiting.append(row)

    # What holds at every moment

    @invariant()
    def a_query_sees_its_own_content(self):
        for row in self.running:
            stop = row.sequence.num_computed
            for table, content, window in zip(row.sequence.block_tables, row.content, self.windows):
                for j in self.visible_blocks(window, row.num_known):
                    end = min(stop - j * self.size, self.size)
                    assert table[j] != NULL_BLOCK
                    assert self.slots[table[j]][:end] == content[j * self.size : j * self.size + end]
                for p in range(row.num_known, stop):  # computed, its token not known yet
                    assert self.slots[table[p // self.size]][p % self.size] == content[p]

    @invariant()
    def what_can_be_found_is_what_its_key_says(self):
        actual = {key: self.pool.lookup(key) for key in self.published}
        for key, block in actual.items():
            assert block is None or self.slots[block] == self.published[key]
        assert len(self.pool._block_of) == sum(block is not None for block in actual.values()), "a key of no content"

    @invariant()
    def the_books_balance(self):
        self.kv_blocks.check([row.sequence for row in self.running])
        if not self.running:
            assert self.pool.num_free == self.pool.num_usable
        assert self.kv_blocks.statistics == (self.num_queried, self.num_hit, self.pool.num_evictions)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=4 * settings().max_examples)
