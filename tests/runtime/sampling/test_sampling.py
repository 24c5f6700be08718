"""A row's token ignores its neighbors, follows the right distribution, and breaks ties by the lowest id."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.sampling import filters
from detcompile.runtime.sampling import sampler as sampling
from detcompile.runtime.sampling.filters import NO_LIMIT, PROBABILITY_UNIT, filtered
from detcompile.runtime.sampling.philox import gumbel_noise
from detcompile.runtime.sampling.sampler import SamplingParams, sample
from detcompile.templates.tokens.likeliest import keep_likeliest_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import ISAS

NUM_DRAWS = 100_000
LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.3, 1.1, -4.0, 0.9])
# chi-square at p = 0.001, by degrees of freedom
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 35: 66.62}

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.35]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
)


def draw_logits(num_rows, vocab_size, seed, dtype=torch.float32):
    """Rows with many ties, some -inf, and a NaN row now and then."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(dtype)
    logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.3, logits.round(), logits)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -0.0
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -math.inf
    logits[:, 0] = 1.0  # so that no row is -inf alone
    logits[torch.rand(num_rows, generator=generator) < 0.1, vocab_size // 2] = math.nan
    return logits


@given(
    params=st.lists(PARAMS, min_size=1, max_size=9),
    vocab_size=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_a_row_ignores_its_neighbors(params, vocab_size, seed, dtype, data, device):
    logits = draw_logits(len(params), vocab_size, seed, dtype).to(device)
    positions = data.draw(st.lists(st.integers(0, 2**40), min_size=len(params), max_size=len(params)))
    tokens = sample(logits, params, positions)
    for row in range(len(params)):
        alone = sample(logits[row : row + 1].clone(), params[row : row + 1], positions[row : row + 1])
        assert_bitwise_equal(tokens[row : row + 1], alone)


def test_noise_from_one_generator_for_the_batch_would_be_seen(monkeypatch):
    def of_one_generator(logprobs, keys):
        uniform = torch.rand(logprobs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return torch.argmax(logprobs - torch.log(-torch.log(uniform)), dim=-1)

    monkeypatch.setattr(sampling, "gumbel_argmax", of_one_generator)
    logits, params = torch.zeros(8, 100), [SamplingParams(seed=seed) for seed in range(8)]
    tokens = sample(logits, params, range(8)).tolist()
    assert tokens != [sample(logits[i : i + 1], params[i : i + 1], [i]).item() for i in range(8)]


def test_large_batch_sampled_in_pieces_equals_whole(monkeypatch):
    logits, params = draw_logits(7, 50, 0), [SamplingParams(seed=s, top_p=0.8) for s in range(7)]
    whole = sample(logits, params, range(7))
    monkeypatch.setattr(sampling, "ELEMENTS_AT_ONCE", 100)
    assert_bitwise_equal(sample(logits, params, range(7)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 33, 1000, 40_000])
def test_greedy_takes_the_lowest_of_equals(vocab_size, dtype, device):
    logits = torch.zeros(3, vocab_size, dtype=dtype, device=device)
    first = [0, vocab_size // 3, vocab_size - 1]
    for row, token in enumerate(first):
        logits[row, token::2] = 1.5
    logits[0, ::2] = -0.0  # equal to the +0.0 between
    assert sample(logits, [SamplingParams(temperature=0)] * 3, [0, 0, 0]).tolist() == first


def test_greedy_needs_no_seed_and_sampling_does():
    assert sample(LOGITS[None], [SamplingParams(temperature=0)], [0]).item() == 2
    with pytest.raises(InvalidInput, match="seed"):
        sample(LOGITS[None], [SamplingParams()], [0])


def filter_limits(params, device):
    """Top_k, the mass of top_p and min_p, [1, 1] each."""
    limit = max(1, int(params.top_p * PROBABILITY_UNIT)) if params.top_p < 1 else NO_LIMIT
    top_k = params.top_k if params.top_k > 0 else NO_LIMIT
    columns = [torch.tensor([[value]], device=device) for value in (top_k, limit, params.min_p)]
    return [*columns[:2], columns[2].double()]


def filter_rows(scaled, params):
    """What the sampler keeps of [1, V]."""
    return filtered(scaled, *filter_limits(params, scaled.device), False)


def kept_by_definition(logits, params):
    """Token -> probability after the filters, in Python's floats, one token after another."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: params.top_k or len(order)]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    total, before, kept = sum(weights.values()), 0.0, {}
    for token in order:
        if params.top_p == 1 or before < params.top_p:
            kept[token] = weights[token]
        before += weights[token] / total
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p * weights[order[0]]}
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@given(params=PARAMS.filter(lambda p: not p.greedy), vocab_size=st.integers(1, 120), seed=st.integers(0, 2**32))
def test_filters_equal_definition(params, vocab_size, seed, device):
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    filtered = filter_rows((logits / params.temperature).to(device), params)
    kept = {token for token, value in enumerate(filtered[0].tolist()) if value > -math.inf}
    assert kept == set(kept_by_definition(logits[0].tolist(), params))
    assert_bitwise_equal(filtered[0, sorted(kept)].cpu(), (logits / params.temperature)[0, sorted(kept)])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1, 2, 3}),
        ({"top_p": 0.51}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 4, "top_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, set(range(8))),
    ],
)
def test_filters_break_ties_by_the_lowest_id(params, kept, device):
    logits = torch.tensor([[0.0, -0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0]], device=device)
    filtered = filter_rows(logits, SamplingParams(**params))
    assert set((filtered[0] > -math.inf).nonzero().flatten().tolist()) == kept


def assert_distributed(tokens, probabilities):
    counts = Counter(tokens)
    assert set(counts) <= set(probabilities)
    statistic = sum((counts[t] - len(tokens) * p) ** 2 / (len(tokens) * p) for t, p in probabilities.items())
    assert statistic < CHI_SQUARE[len(probabilities) - 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(seed=11, temperature=0.6),
        SamplingParams(seed=11, top_k=4),
        SamplingParams(seed=11, top_p=0.8),
        SamplingParams(seed=11, min_p=0.2),
        SamplingParams(seed=11, temperature=1.8, top_k=5, top_p=0.95),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "mixed"],
)
def test_tokens_follow_the_softmax(params):
    tokens = sample(LOGITS.expand(NUM_DRAWS, -1), [params] * NUM_DRAWS, range(NUM_DRAWS)).tolist()
    assert_distributed(tokens, kept_by_definition(LOGITS.tolist(), params))


def test_tokens_of_different_seeds_follow_the_softmax():
    params = [SamplingParams(seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sample(LOGITS.expand(NUM_DRAWS, -1), params, [17] * NUM_DRAWS).tolist()
    assert_distributed(tokens, kept_by_definition(LOGITS.tolist(), params[0]))


def test_samples_of_one_seed_follow_softmax_independently():
    params = SamplingParams(seed=11)
    tokens = sample(
        LOGITS.expand(NUM_DRAWS, -1), [params] * NUM_DRAWS, [17] * NUM_DRAWS, sample_indices=range(NUM_DRAWS)
    )
    assert_distributed(tokens.tolist(), kept_by_definition(LOGITS.tolist(), params))


def test_neighboring_positions_are_independent():
    params = SamplingParams(seed=5)
    tokens = sample(LOGITS.expand(NUM_DRAWS, -1), [params] * NUM_DRAWS, range(NUM_DRAWS)).tolist()
    p = kept_by_definition([v for v in LOGITS.tolist() if v > -2], params)
    keep = [token for token in tokens if token != 5]  # the rarest token's pairs are too few for the statistic
    renumbered = [token if token < 5 else 5 for token in keep]
    pairs = Counter(zip(renumbered[::2], renumbered[1::2]))
    num_pairs = len(keep) // 2
    statistic = sum((pairs[a, b] - num_pairs * p[a] * p[b]) ** 2 / (num_pairs * p[a] * p[b]) for a in p for b in p)
    assert statistic < CHI_SQUARE[35]


def test_noise_is_added_to_log_softmax():
    logits = draw_logits(1, 64, 4)
    logits[logits.isnan()] = 0.0
    expected = (logits.double().log_softmax(-1) + gumbel_noise([3], [8], 64, torch.device("cpu"))).argmax()
    assert sample(logits, [SamplingParams(seed=3)], [8]).item() == expected.item()


def test_one_of_each_a_row_is_demanded():
    with pytest.raises(InvalidInput, match="2 rows of logits, 1 params and 2 positions"):
        sample(torch.zeros(2, 3), [SamplingParams(seed=0)], [0, 1])
    with pytest.raises(InvalidInput, match=r"\[R, V\]"):
        sample(torch.zeros(3), [SamplingParams(seed=0)], [0])


def test_an_empty_batch_gives_no_tokens():
    assert sample(torch.zeros(0, 3), [], []).shape == (0,)


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    """So small a share once rounded to nothing, and token 0 came out whatever the logits."""
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    assert sample(logits, [SamplingParams(top_p=1e-18, seed=1)], [0]).tolist() == [2]


@given(
    values=st.lists(st.sampled_from([-math.inf, -3.0, 0.0, -0.0, 1e-40, 0.5, 0.5000001, 2.5, 88.0]), min_size=1),
    params=st.lists(PARAMS, min_size=3, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_cpu_filters_equal_sorted_filters(values, params, seed):
    """Rows of equal, random and infinite logits, each with its own limits."""
    equal, drawn = torch.tensor(values), torch.randn(len(values), generator=torch.Generator().manual_seed(seed))
    scaled = torch.stack([equal, drawn * 5, equal.flip(0)])
    scaled[:, len(values) // 2] = 1.5  # no row is -inf alone
    limits = [torch.cat(parts) for parts in zip(*(filter_limits(one, scaled.device) for one in params))]
    by_sort = filters._filtered_by_sort(scaled, *limits, False)
    has = filters.Filters(*map(any, zip(*(one.filters for one in params))))
    assert_bitwise_equal(filters._filtered_on_cpu(scaled, *limits, False, has), by_sort)


@pytest.mark.parametrize("isa", ISAS)
@given(
    values=st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 1e-40, 0.5, 0.5000001, 2.5, math.nan]), min_size=1),
    weighs=st.booleans(),
    share=st.floats(0, 1.2),
)
def test_the_likeliest_are_those_with_less_weight_before(isa, values, weighs, share):
    """Ties of logits and of weights at the limit, and no limit."""
    logits = torch.tensor([values, values])
    weights = (logits - 90).exp().nan_to_num(0.5) if weighs else torch.ones_like(logits)
    whole = (weights.double() * (PROBABILITY_UNIT if weighs else 1)).long()
    limits = torch.tensor([[max(1, int(whole[0].sum() * share))], [NO_LIMIT]])
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    before = whole.gather(1, order).cumsum(1) - whole.gather(1, order)
    excluded = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before >= limits)
    actual = keep_likeliest_cpu(logits, weights if weighs else None, limits, isa)
    assert_bitwise_equal(actual, logits.masked_fill(excluded, -math.inf))
