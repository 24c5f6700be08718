"""Sampler: a row of any batch equals the row alone, bit for bit, in every step, without leaving the device."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling import sampler as sampling
from detcompile.runtime.sampling.filters import likeliest
from detcompile.runtime.sampling.logprobs import token_logprobs
from detcompile.runtime.sampling.sampler import Sampler, SampleRow, sample
from tests.bits import assert_bitwise_equal

EOS = 1
VOCAB_SIZE = 40
TOKENS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    min_tokens=st.sampled_from([0, 0, 2, 30]),
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.35]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(TOKENS, max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 1, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.9]),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.sampled_from([-math.inf, -100.0, -0.3, 5.0]), max_size=3),
)
REQUESTS = st.lists(st.tuples(PARAMS, st.lists(TOKENS, min_size=1, max_size=6)), min_size=1, max_size=9)


def draw_logits(num_rows, seed, dtype=torch.float32):
    """Rows with many ties, some -inf, and a bad row now and then."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 4).to(dtype)
    logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.3, logits.round(), logits)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -math.inf
    logits[torch.rand(num_rows, generator=generator) < 0.05, VOCAB_SIZE // 2] = math.nan
    return logits


def row_of(request, tokens, sample_index=0):
    params, prompt = request
    return SampleRow(params, len(tokens), len(tokens) - len(prompt), sample_index, (id(params), sample_index), tokens)


WISHES = {
    "temperature": 0.5,
    "top_k": 3,
    "min_tokens": 2,
    "logprobs": 0,
    "logit_bias": {3: 1.0},
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}


@given(wishes=st.lists(st.sampled_from(sorted(WISHES)), unique=True, max_size=3))
def test_plain_requests_need_no_columns(wishes):
    """Requests that count as plain skip the check for columns, which would find none."""
    params = SamplingParams(**{"temperature": 0} | {wish: WISHES[wish] for wish in wishes})
    row = SampleRow(params.seeded(), 1, token_ids=[5])
    quick = Sampler(VOCAB_SIZE, "cpu", eos_token_ids=[EOS]).prepare([row])
    with mock.patch.object(SamplingParams, "plain", False):
        plan = Sampler(VOCAB_SIZE, "cpu", eos_token_ids=[EOS]).prepare([row])
    assert (quick.tensors is None) == (plan.tensors is None)
    assert not params.plain or plan.tensors is None


@given(requests=REQUESTS, seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_ignores_its_neighbors(requests, seed, dtype, device):
    """Several steps; some requests sit a step out, some are forgotten and built anew from their tokens."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(VOCAB_SIZE, device, eos_token_ids=[EOS])
    histories = [list(prompt) for _, prompt in requests]
    for step in range(4):
        chosen = [i for i in range(len(requests)) if torch.rand((), generator=generator) < 0.8]
        for i in chosen:
            if torch.rand((), generator=generator) < 0.3:
                sampler.forget((id(requests[i][0]), i))
        rows = [row_of(requests[i], list(histories[i]), i) for i in chosen]
        logits = draw_logits(len(rows) + 2, seed + step, dtype).to(device)  # two rows of padding
        before, plan = logits.clone(), sampler.prepare(rows)
        sampled = sampler(logits, plan, likeliest(logits) if step % 2 else None)
        assert_bitwise_equal(logits, before)
        for place, row in enumerate(rows):
            lone = Sampler(VOCAB_SIZE, device, eos_token_ids=[EOS])
            own_plan = lone.prepare([row])
            alone = lone(logits[place : place + 1].clone(), own_plan)
            assert_bitwise_equal(sampled.tokens[place : place + 1], alone.tokens)
            assert_bitwise_equal(sampled.invalid[place : place + 1], alone.invalid)
            assert (alone.logprobs is not None) == (place in plan.logprob_rows)
            if alone.logprobs is not None:
                at = plan.logprob_rows.index(place)
                width = row.params.logprobs
                assert_bitwise_equal(sampled.logprobs.chosen[at : at + 1], alone.logprobs.chosen)
                assert_bitwise_equal(sampled.logprobs.top_ids[at : at + 1, :width], alone.logprobs.top_ids)
                assert_bitwise_equal(sampled.logprobs.top[at : at + 1, :width], alone.logprobs.top)
        for i, token in zip(chosen, sampled.tokens.tolist()):
            histories[i].append(token)


@given(requests=REQUESTS, seed=st.integers(0, 2**32))
def test_sample_equals_sampler(requests, seed, device):
    logits, num = draw_logits(len(requests), seed).to(device), len(requests)
    histories = [[*prompt, *range(i)] for i, (_, prompt) in enumerate(requests)]
    plain = sample(
        logits,
        [params for params, _ in requests],
        [len(h) for h in histories],
        sample_indices=range(num),
        num_prompt_tokens=[len(prompt) for _, prompt in requests],
        token_ids=histories,
        eos_token_ids=[EOS],
    )
    sampler = Sampler(VOCAB_SIZE, device, eos_token_ids=[EOS])
    rows = [row_of(request, history, i) for i, (request, history) in enumerate(zip(requests, histories))]
    assert_bitwise_equal(sampler(logits, sampler.prepare(rows)).tokens, plain)


def test_groups_sampled_in_pieces_equal_whole_batch(monkeypatch):
    params = [SamplingParams(seed=i, top_p=[1, 0.8][i % 2], logit_bias={i: 1.0} if i % 3 else None) for i in range(12)]
    logits = draw_logits(12, 0)
    whole = sample(logits, params, range(12))
    monkeypatch.setattr(sampling, "ELEMENTS_AT_ONCE", 2 * VOCAB_SIZE)
    assert_bitwise_equal(sample(logits, params, range(12)), whole)


def test_a_plan_may_be_made_before_the_tokens_are_known():
    """Overlapped steps: the second plan is made before the first is called, from a count alone."""
    params = SamplingParams(seed=3, repetition_penalty=1.5, frequency_penalty=0.5)
    logits = [draw_logits(1, seed) for seed in (2, 3)]
    sampler = Sampler(VOCAB_SIZE, "cpu")
    first = sampler.prepare([SampleRow(params, 2, 0, key="a", token_ids=[5, 6])])
    second = sampler.prepare([SampleRow(params, 3, 1, key="a")])
    tokens = [sampler(logits[0], first).tokens.item(), sampler(logits[1], second).tokens.item()]
    expected = [5, 6]
    for x in logits:
        position = len(expected)
        expected += sample(x, [params], [position], num_prompt_tokens=[2], token_ids=[list(expected)]).tolist()
    assert tokens == expected[2:]


def test_stale_counts_are_seen():
    params = SamplingParams(seed=3, presence_penalty=1.0)
    sampler = Sampler(VOCAB_SIZE, "cpu")
    sampler.prepare([SampleRow(params, 2, 0, key="a", token_ids=[5, 6])])
    with pytest.raises(AssertionError, match="draws token 4, its counts hold 3"):
        sampler.prepare([SampleRow(params, 4, 2, key="a")])
    sampler.forget("a")
    with pytest.raises(AssertionError, match="give all of them"):
        sampler.prepare([SampleRow(params, 4, 2, key="a", token_ids=[1, 2])])
    sampler.forget("never seen")


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_flagged_and_moves_no_other(options, bad, device):
    params = SamplingParams(seed=1, **options)
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).to(device)
    sampler = Sampler(VOCAB_SIZE, device)
    rows = [SampleRow(params, position) for position in range(5)]
    clean = sampler(logits, sampler.prepare(rows))
    logits[2, 7] = bad
    logits[4] = -math.inf
    sampled = sampler(logits, sampler.prepare(rows))
    assert clean.invalid.tolist() == [False] * 5
    assert sampled.invalid.tolist() == [False, False, True, False, True]
    assert_bitwise_equal(sampled.tokens[[0, 1, 3]], clean.tokens[[0, 1, 3]])
    assert sampled.tokens.min() >= 0 and sampled.tokens.max() < VOCAB_SIZE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_excluding_all_tokens_is_flagged(temperature, device):
    params = SamplingParams(temperature=temperature, seed=0, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -math.inf))
    sampler = Sampler(VOCAB_SIZE, device)
    logits = torch.zeros(2, VOCAB_SIZE, device=device)
    rows = [SampleRow(params, 0), SampleRow(SamplingParams(temperature=0), 0)]
    assert sampler(logits, sampler.prepare(rows)).invalid.tolist() == [True, False]


def test_logits_that_a_temperature_drives_out_of_range_are_flagged(device):
    logits = torch.zeros(2, VOCAB_SIZE, device=device)
    logits[1, 3] = 3e38
    sampler = Sampler(VOCAB_SIZE, device)
    plan = sampler.prepare([SampleRow(SamplingParams(seed=0, temperature=0.01), 0)] * 2)
    assert sampler(logits, plan).invalid.tolist() == [False, True]


def test_a_forbidden_nan_is_still_a_nan(device):
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    logits[0, 3] = math.nan
    sampler = Sampler(VOCAB_SIZE, device)
    plan = sampler.prepare([SampleRow(SamplingParams(temperature=0, logit_bias={3: -math.inf}), 0)])
    assert sampler(logits, plan).invalid.tolist() == [True]


def test_bias_moves_tokens(device):
    logits = torch.zeros(4, VOCAB_SIZE, device=device)
    logits[:, 5] = 50.0
    biases = [{5: -math.inf}, {5: -100.0}, {5: -49.5}, {5: -50.0, 7: 0.25, 9: 0.25}]
    params = [SamplingParams(temperature=0, logit_bias=bias) for bias in biases]
    assert sample(logits, params, [0] * 4).tolist() == [0, 0, 5, 7]
    drawn = [SamplingParams(seed=seed, logit_bias={t: -math.inf for t in range(2, VOCAB_SIZE)}) for seed in range(200)]
    assert set(sample(logits[:1].expand(200, -1), drawn, [0] * 200).tolist()) == {0, 1}


def test_min_tokens_excludes_ending_tokens():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [3, EOS, 4, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0])

    def drawn(num_generated, **options):
        params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(3, 4), **options)
        return sample(logits, [params], [5 + num_generated], num_prompt_tokens=[5], eos_token_ids=[EOS]).item()

    assert [drawn(n) for n in range(4)] == [9, 9, 3, 3]
    assert [drawn(n, ignore_eos=True) for n in range(4)] == [EOS, EOS, 3, 3]
    assert drawn(1, logit_bias={3: 100.0}) == 9


def test_logprobs_are_of_the_raw_logits(device):
    params = SamplingParams(seed=1, temperature=0.5, top_k=1, logit_bias={0: -math.inf}, logprobs=3)
    logits = draw_logits(3, 3).to(device)
    sampler = Sampler(VOCAB_SIZE, device)
    rows = [SampleRow(SamplingParams(seed=1), 0), SampleRow(params, 0), SampleRow(params, 1)]
    plan = sampler.prepare(rows)
    sampled = sampler(logits, plan)
    assert plan.logprob_rows == (1, 2)
    for actual, expected in zip(sampled.logprobs, token_logprobs(logits[1:], sampled.tokens[1:], 3)):
        assert_bitwise_equal(actual, expected)


def test_samples_of_one_request_have_separate_streams():
    params = SamplingParams(seed=4)
    logits = torch.zeros(1, VOCAB_SIZE).expand(50, -1)
    tokens = sample(logits, [params] * 50, [3] * 50, sample_indices=range(50)).tolist()
    assert len(set(tokens)) > 20
    assert tokens[7] == sample(logits[:1], [params], [3], sample_indices=[7]).item()


def test_missing_argument_is_named():
    logits = torch.zeros(1, VOCAB_SIZE)
    with pytest.raises(InvalidInput, match="num_prompt_tokens"):
        sample(logits, [SamplingParams(seed=0, min_tokens=1)], [0])
    with pytest.raises(InvalidInput, match="token_ids"):
        sample(logits, [SamplingParams(seed=0, presence_penalty=1)], [3], num_prompt_tokens=[3])
    with pytest.raises(InvalidInput, match="seed"):
        Sampler(VOCAB_SIZE, "cpu").prepare([SampleRow(SamplingParams(), 0)])


def test_an_empty_step():
    sampler = Sampler(VOCAB_SIZE, "cpu")
    sampled = sampler(torch.zeros(3, VOCAB_SIZE), sampler.prepare([]))
    assert sampled.tokens.shape == sampled.invalid.shape == (0,) and sampled.logprobs is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 151_936])
def test_the_host_never_waits(vocab_size):
    """torch raises where it would synchronize; a first round outside compiles the kernels."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5, top_p=0.9, min_p=0.1, logprobs=4),
        SamplingParams(seed=3, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={3: 1.0}, min_tokens=5),
    ]
    logits = torch.randn(len(params), vocab_size, device="cuda")
    sampler = Sampler(vocab_size, "cuda", eos_token_ids=[EOS])
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for step in range(3):
                keys = [(mode, i) for i in range(len(params))]
                rows = [SampleRow(p, 2 + step, step, 0, key, [5, 6]) for p, key in zip(params, keys)]
                sampled = sampler(logits, sampler.prepare(rows))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not sampled.invalid.any()
