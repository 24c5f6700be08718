"""BlockPool loses no block, frees none twice, and evicts in the stated order, whatever the order of calls."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.block_pool import NULL_BLOCK, BlockPool

NUM_USABLE = 6


class PoolMachine(RuleBasedStateMachine):
    """Beside the pool, the obvious model of it: free ids in two lists, the tables handed out, and keys."""

    def __init__(self):
        super().__init__()
        order = (torch.randperm(NUM_USABLE, generator=torch.Generator().manual_seed(3)) + 1).tolist()
        self.pool = BlockPool(NUM_USABLE + 1, 16, order)
        self.empty = order[::-1]  # handed out from the end
        self.cached = []  # evicted from the front
        self.tables = []
        self.keys = {}  # block -> key
        self.num_evictions = 0

    @property
    def held(self):
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, NUM_USABLE + 2))
    def allocate(self, count):
        num_free = len(self.empty) + len(self.cached)
        if count > num_free:
            with pytest.raises(InvalidInput, match=f"{count} blocks .* {num_free} of {NUM_USABLE} free"):
                self.pool.allocate(count)
            return
        expected = []
        for _ in range(count):
            if self.empty:
                expected.append(self.empty.pop())
            else:
                expected.append(self.cached.pop(0))
                del self.keys[expected[-1]]
                self.num_evictions += 1
        assert self.pool.allocate(count) == expected
        self.tables.append(expected)

    @rule(data=st.data())
    def free(self, data):
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if data.draw(st.booleans()):  # only a part, as when a window slides on
            kept = data.draw(st.integers(0, len(table)))
            table, rest = table[:kept], table[kept:]
            self.tables.append(rest)
        self.pool.free(table)
        for block in table[::-1]:
            if block not in self.held:
                (self.cached if block in self.keys else self.empty).append(block)

    @rule(keys=st.permutations(range(10)), most=st.integers(1, NUM_USABLE))
    def publish(self, keys, most):
        for block, key in zip(sorted(self.held - self.keys.keys())[:most], keys):
            self.pool.publish(block, key)
            if key not in self.keys.values():
                self.keys[block] = key

    @rule(data=st.data())
    def share(self, data):
        shareable = sorted(self.held | set(self.cached))
        table = data.draw(st.lists(st.sampled_from(shareable), unique=True)) if shareable else []
        self.pool.share(table)
        self.tables.append(table)
        self.cached = [block for block in self.cached if block not in table]

    @rule(data=st.data())
    def free_something_wrong(self, data):
        wrong = data.draw(st.sampled_from([-1, NULL_BLOCK, NUM_USABLE + 1, *self.empty, *self.cached]))
        with pytest.raises(InvalidInput, match=r"not one of|free already"):
            self.pool.free([*self.held, wrong])

    @rule(data=st.data())
    def share_something_wrong(self, data):
        wrong = data.draw(st.sampled_from([-1, NULL_BLOCK, NUM_USABLE + 1, *self.empty]))
        with pytest.raises(AssertionError, match=r"not in this pool|has no content"):
            self.pool.share([*self.held, *self.cached, wrong])

    @rule(data=st.data())
    def free_a_block_twice_in_one_call(self, data):
        if self.held:
            with pytest.raises(InvalidInput, match="appears twice"):
                self.pool.free([*self.held, data.draw(st.sampled_from(sorted(self.held)))])

    @invariant()
    def nothing_is_lost(self):
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.empty) + len(self.cached)
        assert sorted([*self.empty, *self.cached, *self.held]) == list(range(1, NUM_USABLE + 1))
        for block in range(NUM_USABLE + 1):
            assert self.pool.num_references(block) == sum(table.count(block) for table in self.tables)

    @invariant()
    def keys_find_their_blocks(self):
        blocks = {key: block for block, key in self.keys.items()}
        assert [self.pool.lookup(key) for key in range(10)] == [blocks.get(key) for key in range(10)]
        assert self.pool.num_evictions == self.num_evictions


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=4 * settings().max_examples)


@pytest.mark.parametrize("block_size", [-16, 0, 1, 8, 17, 24])
def test_a_block_size_the_kernels_cannot_read_is_refused(block_size):
    with pytest.raises(InvalidInput, match="multiple of 16"):
        BlockPool(4, block_size)


@pytest.mark.parametrize("order", [[1, 2], [1, 2, 3, 3], [0, 1, 2], [0, 1, 2, 3], [2, 3, 4]])
def test_order_must_be_a_permutation(order):
    with pytest.raises(InvalidInput, match="once"):
        BlockPool(4, 16, order)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(InvalidInput, match="num_blocks must be at least 2"):
        BlockPool(num_blocks, 16)


def test_a_negative_allocation_is_refused():
    with pytest.raises(InvalidInput, match="zero or more"):
        BlockPool(2, 16).allocate(-1)


def test_a_fresh_pool_hands_out_ascending_ids_and_keeps_block_0():
    pool = BlockPool(5, 32)
    assert pool.num_usable == pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_generator_draws_the_order():
    drawn = [BlockPool(65, 16, torch.Generator().manual_seed(seed)).allocate(64) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[2]) == list(range(1, 65))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_blocks_for(num_tokens, num_blocks):
    assert BlockPool(4, 32).blocks_for(num_tokens) == num_blocks


def test_content_is_evicted_least_recently_freed_first_and_from_the_tail():
    pool = BlockPool(7, 16)
    first, second, other = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for block in [*first, *second]:
        pool.publish(block, f"content {block}")
    pool.free(second)
    pool.free(first)
    pool.free(other)
    pool.share(second[:1])  # used again, and so the most recently freed
    pool.free(second[:1])
    assert pool.allocate(6) == [*other, second[1], first[1], first[0], second[0]]
    assert pool.num_evictions == 4
    assert [pool.lookup(f"content {block}") for block in [*first, *second]] == [None] * 4


def test_the_first_block_under_a_key_keeps_it():
    pool = BlockPool(4, 16)
    first, second, third = pool.allocate(3)
    pool.publish(first, "content")
    pool.publish(second, "content")
    pool.publish(first, "content")
    assert pool.lookup("content") == first
    pool.free([first, second])
    assert pool.allocate(2) == [second, first]  # the second holds nothing that could be found
    pool.publish(third, "content")
    assert pool.lookup("content") == third
    pool.check([[first], [second], [third]])


def test_a_block_has_one_key_and_a_free_one_gets_none():
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    pool.publish(block, "content")
    with pytest.raises(AssertionError, match="after it was published"):
        pool.publish(block, "other content")
    with pytest.raises(AssertionError, match="is free"):
        pool.publish(2, "content of nobody")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool: pool._empty.append(1), "lost"),
        (lambda pool: pool._empty.append(5), "twice"),
        (lambda pool: pool._empty.pop(), "lost"),
        (lambda pool: pool._cached.popitem(), "lost"),
        (lambda pool: pool._cached.update({5: None}), "twice"),
        (lambda pool: pool._references.__setitem__(1, 2), "2 references, in 1 tables"),
        (lambda pool: pool._references.__setitem__(0, 1), "1 references, in 0 tables"),
        (lambda pool: pool._block_of.pop("used"), "disagree"),
        (lambda pool: pool._block_of.update(other=1), "disagree"),
        (lambda pool: pool._keys.__setitem__(5, "other"), "disagree"),
        (lambda pool: (pool._keys.__setitem__(5, "5"), pool._block_of.update({"5": 5})), "among the empty ones"),
        (lambda pool: pool._empty.append(pool._cached.popitem()[0]), "among the empty ones"),
        (lambda pool: pool._cached.update({pool._empty.pop(): None}), "a cached block has no key"),
    ],
)
def test_check_sees_a_damaged_pool(damage, words):
    pool = BlockPool(6, 16)
    used, cached = pool.allocate(2)
    pool.publish(used, "used")
    pool.publish(cached, "cached")
    pool.free([cached])
    pool.check([[NULL_BLOCK, used]])
    damage(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check([[NULL_BLOCK, used]])


@pytest.mark.parametrize("tables", [[], [[1], [1]], [[1, 2]], [[1, 9]]])
def test_check_sees_tables_that_are_not_the_pool_s(tables):
    pool = BlockPool(4, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=r"references, in|another pool"):
        pool.check(tables)
