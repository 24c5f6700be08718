"""Probabilities, filters and draws in exact arithmetic have the bytes of the definition on every device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.filters import log_softmax, softmax
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from tests.exact import definition as exact
from tests.exact import golden
from tests.templates.exact.cases import assert_same, tensor

F = np.float32


def logits(rows: int, V: int, seed: int) -> exact.Array:
    """Rows of every spread, with ties, -0.0 and -inf."""
    z = golden.values((rows, V), seed) * (F(2) ** np.arange(-20, 2 * rows - 20, 2, dtype=F))[:, None]
    z = np.where(np.arange(V) % 7 == 3, np.round(z), z).astype(F)
    z[:, 1::50] = -np.inf
    return z


@pytest.mark.parametrize("V", [1, 2, 33, 5000])
def test_probabilities_equal_the_definition(V: int, device: str) -> None:
    z = logits(14, V, V)
    z[-3:, V // 2] = [np.nan, np.inf, -np.inf]
    for function, expected in ((softmax, exact.softmax(z)), (log_softmax, exact.log_softmax(z))):
        actual = function(tensor(z).to(device), True)
        assert_same(actual, expected)
        assert_same(function(tensor(z[3:4]).to(device), True), expected[3:4])


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 2**40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.35]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_draws_equal_the_definition(seed, position, temperature, top_k, top_p, min_p, device):  # type: ignore[no-untyped-def]
    z = logits(14, 300, 5)[6:]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, logprobs=2)
    rows = [SampleRow(params, position + row, 0, row) for row in range(len(z))]
    sampler = Sampler(300, device, is_exact=True)
    sampled = sampler(tensor(z).to(device), sampler.prepare(rows))
    scaled = (z / F(temperature)).astype(F)
    if top_k > 0 or top_p < 1 or min_p > 0:
        scaled = np.stack([exact.filtered(row, top_k or None, top_p, min_p) for row in scaled])
    drawn = [exact.draw(row, seed, position + number, number) for number, row in enumerate(scaled)]
    assert sampled.tokens.tolist() == drawn
    assert not sampled.invalid.any()
    expected = exact.log_softmax(z)
    assert sampled.logprobs is not None
    assert_same(sampled.logprobs.chosen, expected[np.arange(len(z)), drawn])
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :2]
    assert sampled.logprobs.top_ids.tolist() == best.tolist()


def test_penalties_and_biases_are_single_operations(device: str) -> None:
    z = logits(8, 60, 2)
    prompt, answer = [4, 5, 6], [5, 7, 7, 59]
    values = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.3, "logit_bias": {9: 0.1}}
    params = SamplingParams(seed=3, temperature=0.8, **values)
    rows = [SampleRow(params, 7, 4, row, row, prompt + answer) for row in range(8)]
    sampler = Sampler(60, device, is_exact=True)
    drawn = sampler(tensor(z).to(device), sampler.prepare(rows)).tokens.tolist()
    expected = []
    for number, row in enumerate(z):
        row = row.copy()
        row[9] += F(0.1)
        seen = np.isin(np.arange(60), prompt + answer)
        row = np.where(seen, np.where(row > 0, row / F(1.3), row * F(1.3)), row)
        times = np.bincount(answer, minlength=60)
        row = (row - F(0.7) * times.astype(F)) - F(-0.3) * (times > 0).astype(F)
        expected.append(exact.draw(row / F(0.8), 3, 7, number))
    assert drawn == expected
