"""Padding a step to a bucket changes no bit of its logits and no byte of the cache.

The forward here is a one-layer model whose attention reads StepInputs token by token, in float64 and in a loop: every
token's arithmetic is its own, so that only wrong metadata can change a bit.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.block_pool import BlockPool
from detcompile.runtime.runner import TOKEN_BUCKETS, KVCache, KVShape, PackedStep, Runner, pad_step
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import build_step
from detcompile.step import PADDING_SLOT
from tests.bits import assert_bitwise_equal

VOCAB_SIZE, DIM, NUM_BLOCKS, BLOCK_SIZE = 50, 4, 16, 16
GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB_SIZE, DIM, dtype=torch.float64, generator=GENERATOR)
HEAD = torch.randn(DIM, 7, dtype=torch.float64, generator=GENERATOR)


def forward(input_ids, position_ids, step, logits_to_keep):
    """Causal attention of one head over the paged cache, then the head at ``logits_to_keep``."""
    hidden = EMBEDDING[input_ids[0]] + position_ids[0].unsqueeze(1) * 0.01
    keys = step.k_caches[0].view(-1, DIM)
    values = step.v_caches[0].view(-1, DIM)
    for t, slot in enumerate(step.slot_mapping.tolist()):
        if slot != PADDING_SLOT:
            keys[slot], values[slot] = hidden[t], -hidden[t]
    attended = torch.zeros_like(hidden)
    cu_seqlens, seq_lens = step.cu_seqlens.tolist(), step.seq_lens.tolist()
    for s, num_keys in enumerate(seq_lens):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            position = num_keys - cu_seqlens[s + 1] + t
            blocks = step.block_table[s].tolist()
            slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(position + 1)]
            weights = torch.softmax((keys[slots] * hidden[t]).sum(1), 0)
            attended[t] = (values[slots] * weights.unsqueeze(1)).sum(0)
    return torch.stack([((hidden + attended)[t].unsqueeze(1) * HEAD).sum(0) for t in logits_to_keep.tolist()])


def make_cache(value=float("nan")):
    cache = KVCache(
        [KVShape(1, DIM, DIM)], dtype=torch.float64, device="cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )
    for tensor in cache.k_caches + cache.v_caches:
        tensor.fill_(value)
    return cache


@st.composite
def packed_steps(draw):
    """A step of a few sequences, some of whose keys are in the cache already."""
    placement = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    cache, pool = make_cache(), BlockPool(NUM_BLOCKS, BLOCK_SIZE, placement)
    plan = []
    for _ in range(draw(st.integers(1, 4))):
        num_cached, n = draw(st.sampled_from([0, 1, 15, 16, 17, 30])), draw(st.sampled_from([1, 1, 1, 2, 5]))
        tokens = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(num_cached + n)]
        sequence = Sequence(tokens)
        if num_cached:
            forward(*build_step([(sequence, num_cached)], pool, cache, "cpu"))
            sequence.num_computed = num_cached
        plan.append((sequence, n))
    return cache, build_step(plan, pool, cache, "cpu", all_logits=draw(st.booleans()))


def on_cache(packed, k_caches, v_caches):
    return packed._replace(step=packed.step._replace(k_caches=k_caches, v_caches=v_caches))


@given(case=packed_steps(), more=st.integers(0, 9), more_blocks=st.integers(0, 5))
def test_padding_changes_no_bit(case, more, more_blocks):
    cache, packed = case
    bucket = packed.input_ids.shape[1] + more
    padded_caches = [tuple(tensor.clone() for tensor in part) for part in (cache.k_caches, cache.v_caches)]
    expected = forward(*packed)
    padded = pad_step(on_cache(packed, *padded_caches), bucket, packed.step.block_table.shape[1] + more_blocks)
    assert_bitwise_equal(forward(*padded)[: len(expected)], expected)
    for padded_cache, plain_cache in zip(padded_caches, (cache.k_caches, cache.v_caches)):
        assert_bitwise_equal(padded_cache[0], plain_cache[0])


@given(case=packed_steps(), more=st.integers(0, 9), more_blocks=st.integers(0, 5))
def test_the_shape_and_content_of_a_padded_step(case, more, more_blocks):
    _, packed = case
    num_tokens, num_sequences = packed.input_ids.shape[1], len(packed.step.seq_lens)
    bucket, num_blocks = num_tokens + more, packed.step.block_table.shape[1] + more_blocks
    input_ids, position_ids, step, logits_to_keep = pad_step(packed, bucket, num_blocks)
    assert input_ids.shape == position_ids.shape == (1, bucket)
    assert step.slot_mapping[num_tokens:].tolist() == [PADDING_SLOT] * more
    assert step.cu_seqlens[num_sequences:].tolist() == [num_tokens] * (bucket - num_sequences + 1)
    assert step.seq_lens[num_sequences:].tolist() == [0] * (bucket - num_sequences)
    assert step.block_table.shape == (bucket, num_blocks)
    assert step.block_table.count_nonzero() == packed.step.block_table.count_nonzero()
    assert logits_to_keep.shape == (bucket,)
    plain = [packed.input_ids, packed.position_ids, packed.logits_to_keep, *packed.step[:4]]
    padded = [input_ids, position_ids, logits_to_keep, *step[:4]]
    for before, after in zip(plain, padded):
        assert after.dtype == before.dtype
        assert_bitwise_equal(after[tuple(slice(0, size) for size in before.shape)], before)


@pytest.mark.parametrize("wrong", ["slot", "cu_seqlens"])
def test_wrong_padding_is_seen(wrong):
    """The two tests above would fail had the padding written to a slot, or had it lengthened the last sequence."""
    cache, pool, sequence = make_cache(0.0), BlockPool(NUM_BLOCKS, BLOCK_SIZE), Sequence([3, 4, 5])
    packed = build_step([(sequence, 3)], pool, cache, "cpu", all_logits=True)
    expected = forward(*packed)
    padded = pad_step(packed, 4, 1)
    if wrong == "slot":
        padded.step.slot_mapping[3] = 0
    else:
        padded.step.cu_seqlens[1:] = 4
    assert not torch.equal(forward(*padded)[:3], expected)


def test_a_plain_run_is_the_forward():
    caches = [make_cache(), make_cache()]
    for cache in caches:
        packed = build_step([(Sequence([1, 2, 3]), 3)], BlockPool(NUM_BLOCKS, BLOCK_SIZE), cache, "cpu")
        if cache is caches[0]:
            expected = forward(*packed)
        else:
            assert_bitwise_equal(Runner(forward, cache, cuda_graphs=False).run(*packed), expected)
    assert_bitwise_equal(caches[0].k_caches[0], caches[1].k_caches[0])


def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(InvalidInput, match="GPU"):
        Runner(forward, make_cache(), cuda_graphs=True)


def test_cache_shapes():
    cache = KVCache(
        [KVShape(2, 8, 4), KVShape(1, 6, 6)], dtype=torch.bfloat16, device="cpu", num_blocks=3, block_size=32
    )
    assert [tuple(t.shape) for t in cache.k_caches] == [(3, 32, 2, 8), (3, 32, 1, 6)]
    assert [tuple(t.shape) for t in cache.v_caches] == [(3, 32, 2, 4), (3, 32, 1, 6)]
    assert {t.dtype for t in cache.k_caches + cache.v_caches} == {torch.bfloat16}
    for num_blocks, block_size, words in [(0, 16, "num_blocks"), (1, 8, "multiple of 16")]:
        with pytest.raises(InvalidInput, match=words):
            KVCache([], dtype=torch.float32, device="cpu", num_blocks=num_blocks, block_size=block_size)


def cuda_forward(input_ids, position_ids, step, logits_to_keep):
    """A forward that a graph can hold: it writes a number a token into the cache, and reads it back."""
    written = (input_ids[0] * 3 + position_ids[0]).to(torch.float64)
    keys = step.k_caches[0].view(-1)
    live = step.slot_mapping != PADDING_SLOT
    slots = step.slot_mapping.clamp_min(0)
    keys.index_add_(0, slots, torch.where(live, written - keys[slots], 0.0))
    sequence = torch.bucketize(logits_to_keep, step.cu_seqlens[1:].long(), right=True).clamp_max(len(step.seq_lens) - 1)
    first_key = keys[step.block_table[sequence, 0].long() * BLOCK_SIZE]
    return torch.stack([written[logits_to_keep], first_key, step.seq_lens[sequence].double()], dim=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replayed_steps_equal_plain_ones():
    results = []
    for cuda_graphs in (False, True):
        cache = KVCache([KVShape(1, 1, 1)], dtype=torch.float64, device="cuda", num_blocks=64, block_size=BLOCK_SIZE)
        runner, pool = Runner(cuda_forward, cache, cuda_graphs), BlockPool(64, BLOCK_SIZE)
        sequences = [Sequence([10 * i + t for t in range(80)]) for i in range(9)]
        logits = []
        for count in [300, 1, 9, 2, 9, 5, 9, 9, 3]:  # tokens of a prefill first, then sequences that decode
            chosen = sequences[:9] if count == 300 else sequences[:count]
            plan: list[tuple[Sequence, int]] = [(s, 34 if count == 300 else 1) for s in chosen]
            packed: PackedStep = build_step(plan, pool, cache, "cuda")
            logits.append(runner.run(*packed))
            for sequence, n in plan:
                sequence.num_computed += n
        results.append([torch.cat(logits), *cache.k_caches])
        if cuda_graphs:
            assert {bucket for bucket, _ in runner._graphs} == {1, 2, 4, 8, 16} <= set(TOKEN_BUCKETS)
    for replayed, plain in zip(*results):
        assert_bitwise_equal(replayed, plain)
