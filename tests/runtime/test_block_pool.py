"""BlockPool loses no block and frees none twice, whatever the order of calls."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from detcompile.errors import InvalidInput
from detcompile.runtime.block_pool import BlockPool

NUM_BLOCKS = 13


class PoolMachine(RuleBasedStateMachine):
    """Beside the pool, the obvious model of it: a stack of free ids and the lists handed out."""

    def __init__(self):
        super().__init__()
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        self.pool = BlockPool(NUM_BLOCKS, 16, order)
        self.stack = order[::-1]
        self.held = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count):
        if count > len(self.stack):
            with pytest.raises(InvalidInput, match=f"{count} blocks .* {len(self.stack)} of {NUM_BLOCKS} free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == [self.stack.pop() for _ in range(count)]
        self.held += blocks

    @rule(data=st.data())
    def free(self, data):
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True) if self.held else st.just([]))
        self.pool.free(blocks)
        self.stack += blocks
        self.held = [block for block in self.held if block not in blocks]

    @rule(data=st.data())
    def free_something_wrong(self, data):
        wrong = data.draw(st.sampled_from([-1, NUM_BLOCKS, *self.stack]))
        with pytest.raises(InvalidInput, match=r"not one of|free already"):
            self.pool.free([*self.held, wrong])

    @rule(data=st.data())
    def free_a_block_twice_in_one_call(self, data):
        if self.held:
            with pytest.raises(InvalidInput, match="stands twice"):
                self.pool.free([*self.held, data.draw(st.sampled_from(self.held))])

    @invariant()
    def nothing_is_lost(self):
        self.pool.check()
        assert self.pool.num_free == len(self.stack)
        assert sorted(self.stack + self.held) == list(range(NUM_BLOCKS))


TestPoolMachine = PoolMachine.TestCase


@pytest.mark.parametrize("block_size", [-16, 0, 1, 8, 17, 24])
def test_a_block_size_the_kernels_cannot_read_is_refused(block_size):
    with pytest.raises(InvalidInput, match="multiple of 16"):
        BlockPool(4, block_size)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(InvalidInput, match="once"):
        BlockPool(4, 16, order)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(InvalidInput, match="num_blocks"):
        BlockPool(0, 16)
    with pytest.raises(InvalidInput, match="zero or more"):
        BlockPool(1, 16).allocate(-1)


def test_a_fresh_pool_hands_out_ascending_ids():
    assert BlockPool(4, 32).allocate(4) == [0, 1, 2, 3]


def test_a_generator_draws_the_order():
    drawn = [BlockPool(64, 16, torch.Generator().manual_seed(seed)).allocate(64) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[2]) == list(range(64))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_blocks_for(num_tokens, num_blocks):
    assert BlockPool(4, 32).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("damage", [lambda pool: pool._free.append(0), lambda pool: pool._free.pop()])
def test_check_sees_a_damaged_pool(damage):
    pool = BlockPool(4, 16)
    damage(pool)
    with pytest.raises(AssertionError, match=r"twice|lost"):
        pool.check()
