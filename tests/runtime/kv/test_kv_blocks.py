"""KVBlocks case by case: ends of hits, sharing, freed windows. test_kv_blocks_machine.py has any order of calls."""

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.kv.block_pool import NULL_BLOCK, BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.step import NO_SLOT, KVGroup

SIZE = 16


def make(num_usable=40, windows=(0,), prefix_caching=True, salt=b"", size=SIZE):
    groups = [KVGroup((index,), window) for index, window in enumerate(windows)]
    return KVBlocks(BlockPool(num_usable + 1, size), groups, prefix_caching=prefix_caching, salt=salt)


def compute(kv_blocks, sequence, num_tokens=None):
    """One step up to ``num_tokens``, by default over all that is known."""
    sequence.num_computed = len(sequence.token_ids) if num_tokens is None else num_tokens
    assert kv_blocks.grow(sequence, sequence.num_computed)
    kv_blocks.commit(sequence)


def serve(kv_blocks, tokens):
    """Admit and compute a whole prompt; it keeps its blocks."""
    sequence = Sequence(list(tokens))
    assert kv_blocks.admit(sequence, len(sequence.token_ids)) is not None
    compute(kv_blocks, sequence)
    return sequence


def num_used(kv_blocks):
    return kv_blocks.pool.num_usable - kv_blocks.pool.num_free


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48), (90, 48)]
)
def test_hit_ends_at_block_boundary_before_last_token(num_tokens, hit):
    kv_blocks = make()
    first = serve(kv_blocks, range(50))
    second = Sequence(list(range(50))[:num_tokens] + [99] * (num_tokens - 50))
    assert kv_blocks.admit(second, 1) == hit == second.num_computed
    shared = hit // SIZE
    assert second.block_tables[0][:shared] == first.block_tables[0][:shared]
    assert not set(second.block_tables[0][shared:]) & set(first.block_tables[0])
    kv_blocks.check([first, second])


def test_a_shared_prefix_takes_its_blocks_once():
    kv_blocks = make(windows=(0, 40))
    prefix = list(range(64))
    sequences = [serve(kv_blocks, [*prefix, 1000 + index]) for index in range(5)]
    # Four blocks of the first group and, for positions 25 … 63, three of the second; then two of each sequence's own.
    assert num_used(kv_blocks) == 4 + 3 + 5 * 2
    assert kv_blocks.statistics == (5 * 65, 4 * 64, 0)
    for sequence in sequences:
        kv_blocks.release(sequence)
    kv_blocks.check([])
    assert num_used(kv_blocks) == 0


def test_the_same_prompt_computed_twice_at_once():
    """The second sequence keeps its own block, unpublished, and publishes what it computes after it."""
    kv_blocks = make()
    first, second = (Sequence(list(range(40))) for _ in range(2))
    for sequence in (first, second):
        assert kv_blocks.admit(sequence, 40) == 0
    compute(kv_blocks, first, 16)
    compute(kv_blocks, second, 40)
    compute(kv_blocks, first, 40)
    assert not set(first.block_tables[0]) & set(second.block_tables[0])
    third = Sequence(list(range(40)))
    assert kv_blocks.admit(third, 40) == 32
    assert third.block_tables[0][:2] == [first.block_tables[0][0], second.block_tables[0][1]]
    kv_blocks.check([first, second, third])
    for sequence in (first, second, third):
        kv_blocks.release(sequence)
    kv_blocks.check([])


@pytest.mark.parametrize(
    ("windows", "cached", "hit"),
    [
        ((0,), [{0, 1, 2}], 48),
        ((0,), [{1, 2}], 0),
        ((0,), [{0, 2}], 16),
        ((2,), [set()], 0),
        ((2,), [{1}], 32),
        ((17,), [{2}], 48),  # a query at 48 sees the keys 32 … 48
        ((18,), [{2}], 0),  # and here 31
        ((18,), [{1, 2}], 48),
        ((18,), [{0, 2}], 16),
        ((0, 17), [{0, 1, 2}, {0}], 16),
        ((0, 17), [{0, 1}, {1, 2}], 32),
        ((0, 17), [{1, 2}, {0, 1, 2}], 0),
        ((17, 18, 0), [{0, 2}, {0, 1, 2}, {0, 1, 2}], 48),
        ((17, 18, 0), [{0, 1}, {0, 2}, {0, 1, 2}], 16),
    ],
)
def test_hit_covers_visible_keys_in_every_group(windows, cached, hit):
    kv_blocks = make(windows=windows)
    tokens, held = list(range(49)), []
    for index, present in enumerate(cached):
        for j, digest in enumerate(chain(b"", tokens)):
            if j in present:
                held += kv_blocks.pool.allocate(1)
                kv_blocks.pool.publish(held[-1], (index, digest))
    sequence = Sequence(tokens)
    assert kv_blocks.admit(sequence, 49) == hit
    for table, window in zip(sequence.block_tables, windows):
        first = max(0, hit - window + 1) // SIZE if window else 0
        assert [block in held for block in table] == [first <= j < hit // SIZE for j in range(4)]
        assert table[:first] == [NULL_BLOCK] * first
    kv_blocks.pool.check([held, *sequence.block_tables])


def chain(salt, tokens, size=SIZE):
    """The digests that this version promises."""
    digest = blake2b(salt, digest_size=32).digest()
    for start in range(0, len(tokens) - size + 1, size):
        digest = blake2b(digest + struct.pack(f"<{size}q", *tokens[start : start + size]), digest_size=32).digest()
        yield digest


def test_digests_are_chained_from_the_salt():
    sequences = [serve(make(salt=salt), range(3, 50)) for salt in (b"", b"model", b"other model")]
    for salt, sequence in zip((b"", b"model", b"other model"), sequences):
        assert sequence.block_digests == list(chain(salt, list(range(3, 50))))
    assert len({digest for sequence in sequences for digest in sequence.block_digests}) == 3 * 2


def test_digests_grow_with_the_tokens():
    kv_blocks = make()
    sequence = serve(kv_blocks, range(30))
    for token in range(30, 80):
        sequence.token_ids.append(token)
        compute(kv_blocks, sequence)
    assert sequence.block_digests == list(chain(b"", list(range(80))))


def test_nothing_is_published_or_found_without_prefix_caching():
    kv_blocks = make(prefix_caching=False)
    sequences = [serve(kv_blocks, range(40)) for _ in range(2)]
    assert not any(sequence.block_digests for sequence in sequences)
    assert num_used(kv_blocks) == 6 and kv_blocks.statistics == (0, 0, 0)


def test_a_sequence_that_wants_all_logits_finds_nothing_but_can_be_found():
    kv_blocks = make()
    first, second = Sequence(list(range(40))), Sequence(list(range(40)))
    for sequence in (first, second):
        assert kv_blocks.admit(sequence, 40, reuse=False) == 0
        compute(kv_blocks, sequence)
    assert kv_blocks.statistics == (0, 0, 0)
    assert kv_blocks.admit(Sequence(list(range(40))), 40) == 32


def test_too_few_blocks_change_nothing():
    kv_blocks = make(num_usable=5)
    kv_blocks.release(serve(kv_blocks, range(33)))
    holder, late = Sequence([7]), Sequence([*range(32), *[8] * 32])
    assert kv_blocks.admit(holder, 17) == 0  # three blocks left: two that ``late`` hits, and one
    assert kv_blocks.admit(late, 64) is None
    assert late.block_tables == [] and late.num_computed == 0
    kv_blocks.check([holder])
    assert kv_blocks.pool.num_free == 3
    assert kv_blocks.admit(late, 48) == 32
    assert not kv_blocks.grow(late, 49)
    assert len(late.block_tables[0]) == 3
    assert kv_blocks.grow(late, 48)
    kv_blocks.release(holder)
    assert kv_blocks.grow(late, 80)
    assert not kv_blocks.grow(late, 81)
    kv_blocks.check([late])


def test_an_admission_does_not_evict_its_own_hit():
    kv_blocks = make(num_usable=6)
    for start in (0, 100):
        kv_blocks.release(serve(kv_blocks, range(start, start + 33)))
    late = Sequence([*range(32), *[8] * 64])  # hits what was given back first
    assert kv_blocks.admit(late, 96) == 32
    assert late.block_tables[0][:2] == [kv_blocks.pool.lookup((0, digest)) for digest in chain(b"", range(32))]
    kv_blocks.check([late])


def test_the_tail_of_every_group_is_evicted_before_any_head():
    kv_blocks = make(num_usable=6, windows=(0, 0))
    kv_blocks.release(serve(kv_blocks, range(48)))
    assert kv_blocks.admit(Sequence([7]), 1) == 0
    assert kv_blocks.statistics.num_evictions == 2
    assert kv_blocks.admit(Sequence([*range(48), 9]), 1) == 32


@given(window=st.integers(1, 99), chunk=st.integers(1, 70), size=st.sampled_from([16, 32]), length=st.integers(1, 300))
def test_window_group_blocks_are_bounded(window, chunk, size, length):
    kv_blocks = make(windows=(window, 0), size=size)
    sequence = Sequence([1] * length)
    bound, most = -(-(window + chunk) // size) + 1, 0
    assert kv_blocks.admit(sequence, min(chunk, length)) == 0
    while sequence.num_computed < length:
        start, stop = sequence.num_computed, min(sequence.num_computed + chunk, length)
        assert kv_blocks.grow(sequence, stop)
        window_table, table = sequence.block_tables
        num_held = len(window_table) - window_table.count(NULL_BLOCK)
        assert num_held <= bound
        assert num_used(kv_blocks) == kv_blocks.needed(stop, start) == num_held + len(table)
        most = max(most, num_used(kv_blocks))
        compute(kv_blocks, sequence, stop)
    assert most <= kv_blocks.peak(length, chunk) <= 2 * kv_blocks.pool.blocks_for(length)


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (2, 1), (17, 1), (18, 1), (40, 7)])
def test_the_peak_is_reached(window, chunk):
    kv_blocks = make(windows=(window,))
    sequence = Sequence([1] * 400)
    kv_blocks.admit(sequence, 1, reuse=False)  # a window of 1 needs no cached block, and would hit everything
    compute(kv_blocks, sequence, 1)
    most = 0
    for stop in range(1 + chunk, 400, chunk):
        assert kv_blocks.grow(sequence, stop)
        most = max(most, num_used(kv_blocks))
        compute(kv_blocks, sequence, stop)
    assert most == kv_blocks.peak(400, chunk)


class Untouchable(list):
    """Tokens that may be counted and not read."""

    def __getitem__(self, place):
        raise AssertionError("tokens are read between two block borders")

    __iter__ = __getitem__


def test_settle_reads_no_token_until_a_block_is_full():
    kv_blocks = make(windows=(0, 20))
    sequence = serve(kv_blocks, range(33))
    for token in range(33, 47):
        sequence.token_ids = Untouchable(list.__add__(list(range(token)), [token]))
        compute(kv_blocks, sequence)
    sequence.token_ids = Untouchable(range(48))
    with pytest.raises(AssertionError, match="tokens are read"):
        compute(kv_blocks, sequence)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda kv_blocks, sequence: kv_blocks._progress.clear(), "sequences lost"),
        (lambda kv_blocks, sequence: sequence.block_tables[0].pop(), "unequal length"),
        (lambda kv_blocks, sequence: setattr(sequence, "num_computed", 90), "without a block"),
        (lambda kv_blocks, sequence: sequence.block_tables[0].__setitem__(0, NULL_BLOCK), "NULL_BLOCK at"),
        (lambda kv_blocks, sequence: sequence.block_tables[1].__setitem__(0, 1), "NULL_BLOCK at"),
        (lambda kv_blocks, sequence: sequence.block_tables[0].__setitem__(0, 40), "references"),
        (lambda kv_blocks, sequence: sequence.token_ids.__delitem__(slice(31, None)), "unknown content"),
        (lambda kv_blocks, sequence: sequence.block_digests.append(b""), "digests of"),
    ],
)
def test_check_sees_damage(damage, words):
    kv_blocks = make(windows=(0, 4))
    sequence = serve(kv_blocks, range(45))
    kv_blocks.check([sequence])
    damage(kv_blocks, sequence)
    with pytest.raises(AssertionError, match=words):
        kv_blocks.check([sequence])


def test_a_sequence_is_admitted_once():
    kv_blocks = make()
    sequence = serve(kv_blocks, range(5))
    with pytest.raises(AssertionError, match="admitted once"):
        kv_blocks.admit(sequence, 5)
    kv_blocks.release(sequence)
    with pytest.raises(AssertionError, match="only an admitted sequence"):
        kv_blocks.grow(sequence, 5)
    with pytest.raises(KeyError):
        kv_blocks.release(sequence)
    sequence.block_tables = [[3]]
    with pytest.raises(AssertionError, match="already has blocks"):
        kv_blocks.admit(sequence, 5)


def test_a_sequence_has_a_state_of_its_own_from_admission_to_release() -> None:
    kv_blocks = KVBlocks(BlockPool(40, 16), [KVGroup((), 1)], prefix_caching=False, num_state_slots=2)
    first, second, third = (Sequence(list(range(20))) for _ in range(3))
    assert kv_blocks.admit(first, 20) == kv_blocks.admit(second, 20) == 0
    assert {first.state_slot, second.state_slot} == {0, 1}
    free = kv_blocks.pool.num_free
    assert kv_blocks.admit(third, 20) is None and kv_blocks.pool.num_free == free
    assert third.state_slot == NO_SLOT
    kv_blocks.check([first, second])
    freed = first.state_slot
    kv_blocks.release(first)
    assert first.state_slot == NO_SLOT
    assert kv_blocks.admit(third, 20) == 0 and third.state_slot == freed
    kv_blocks.check([second, third])
    second.state_slot = third.state_slot
    with pytest.raises(AssertionError, match="state slots shared or lost"):
        kv_blocks.check([second, third])
