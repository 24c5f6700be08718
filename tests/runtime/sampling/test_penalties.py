"""Penalties follow their definition over the whole history, and counts depend on the tokens alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.penalties import FreshCounts, TokenCounts, penalize
from detcompile.runtime.sampling.sampler import sample
from tests.bits import assert_bitwise_equal

VOCAB_SIZE = 20
TOKENS = st.integers(0, VOCAB_SIZE - 1)
HISTORY = st.tuples(st.lists(TOKENS, min_size=1, max_size=8), st.lists(TOKENS, max_size=12))
PENALTIES = st.tuples(
    st.sampled_from([1.0, 1.3, 0.6]), st.sampled_from([0.0, 0.3, -1.7]), st.sampled_from([0.0, 0.5, -2.0])
)


def by_definition(logits, prompt, output, repetition, frequency, presence):
    """One token after another, each operation rounded to fp32."""
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            factor = torch.tensor(repetition, dtype=torch.float32)
            value = value / factor if value > 0 else value * factor
        value = value - torch.tensor(frequency, dtype=torch.float32) * output.count(token)
        result.append(value - torch.tensor(presence, dtype=torch.float32) * (token in output))
    return torch.stack(result)


def admit(counts, device):
    counts.admit(counts.num_slots, FreshCounts(*(part.to(device) for part in counts.fresh())))


@given(
    requests=st.lists(st.tuples(HISTORY, PENALTIES), min_size=1, max_size=5),
    known=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_penalties_equal_definition(requests, known, seed, device):
    """``known`` tokens of each output are there from the start, the others are counted as they are drawn."""
    counts = TokenCounts(VOCAB_SIZE, torch.device(device))
    slots = []
    for key, ((prompt, output), _) in enumerate(requests):
        start = [*prompt, *output[:known]]
        slots.append(counts.place(key, start, len(start), len(output[:known])))
    admit(counts, device)
    for i in range(known, 12):
        more = [(slot, output[i]) for slot, ((_, output), _) in zip(slots, requests) if i < len(output)]
        if more:
            counts.count(*torch.tensor(more).to(device).unbind(1))
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    columns = [torch.tensor([p[i] for _, p in requests]).unsqueeze(1).to(device) for i in range(3)]
    actual = penalize(logits.to(device), counts.words[torch.tensor(slots).to(device)], *columns)
    expected = [by_definition(x, *history, *item) for x, (history, item) in zip(logits, requests)]
    assert_bitwise_equal(actual.cpu(), torch.stack(expected))


@given(
    history=HISTORY,
    penalties=PENALTIES,
    bias=st.dictionaries(TOKENS, st.sampled_from([-5.0, 3.0]), max_size=3),
    options=st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 0.4, 2.0]), "top_k": st.sampled_from([0, 3])}),
    seed=st.integers(0, 2**32),
)
def test_bias_comes_before_penalties_and_both_before_the_rest(history, penalties, bias, options, seed, device):
    prompt, output = history
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    biased = logits.clone()
    for token, value in bias.items():
        biased[0, token] += value
    prepared = by_definition(biased[0], prompt, output, *penalties)[None]
    repetition, frequency, presence = penalties
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        seed=seed,
        **options,
    )
    position, tokens = len(prompt) + len(output), [[*prompt, *output]]
    drawn = sample(logits.to(device), [params], [position], num_prompt_tokens=[len(prompt)], token_ids=tokens)
    assert_bitwise_equal(drawn, sample(prepared.to(device), [SamplingParams(seed=seed, **options)], [position]))


def test_a_slot_is_used_again_and_holds_nothing_of_its_last_request():
    counts = TokenCounts(VOCAB_SIZE, torch.device("cpu"))
    slots = [counts.place(key, [key, key], 2, 1) for key in range(3)]
    admit(counts, "cpu")
    counts.forget(1)
    assert counts.place("new", [7], 1, 0) == slots[1]
    admit(counts, "cpu")
    assert counts.words[slots[1]].nonzero().tolist() == [[7]]
    assert counts.words[slots[0], 0] == counts.words[slots[2], 2] == 3


def test_growing_table_keeps_its_counts():
    counts = TokenCounts(VOCAB_SIZE, torch.device("cpu"))
    for key in range(9):
        slot = counts.place(key, [key], 1, 0)
        admit(counts, "cpu")
        counts.count(torch.tensor([slot]), torch.tensor([key + 1]))
    for key in range(9):
        assert counts.words[key].nonzero().flatten().tolist() == [key, key + 1]


@pytest.mark.parametrize("tokens", [[-1], [VOCAB_SIZE]])
def test_placeholders_are_not_counted(tokens):
    with pytest.raises(AssertionError, match="tokens that the host knows"):
        TokenCounts(VOCAB_SIZE, torch.device("cpu")).place("a", tokens, 1, 0)
