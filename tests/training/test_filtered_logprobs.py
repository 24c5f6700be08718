"""filtered_logprobs has the bits of what the sampler draws from, and the gradient of the tokens that it keeps."""

from typing import Any

import pytest
import torch

from detcompile import SamplingParams
from detcompile.runtime.sampling.sampler import Sampler
from detcompile.runtime.sampling.sampling_tensors import SampleRow
from detcompile.training.filtered_logprobs import filtered_logprobs
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal

ROWS, VOCABULARY = 24, 301
FILTERS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.7, "temperature": 0.6}, {"min_p": 0.1, "temperature": 1.7},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
]  # fmt: skip


def logits_of(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return (3 * normal((ROWS, VOCABULARY), torch.float32, 1)).to(device, dtype)


def drawn(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities by the engine's sampler."""
    sampler = Sampler(VOCABULARY, logits.device)
    sampled = sampler(logits, sampler.prepare([SampleRow(params, place) for place in range(ROWS)]))
    assert sampled.sampling is not None
    return sampled.tokens, sampled.sampling.chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_logprobs_have_sampler_bits(filters: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    logits = logits_of(dtype, device)
    params = SamplingParams(seed=7, logprobs=0, sampling_logprobs=0, **filters)
    tokens, expected = drawn(logits, params)
    assert_bitwise_equal(filtered_logprobs(logits, tokens, params), expected)
    assert_bitwise_equal(filtered_logprobs(logits[3:4], tokens[3:4], params), expected[3:4])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_gradient_matches_softmax_over_kept_tokens(filters: dict[str, Any]) -> None:
    logits = logits_of(torch.float32).requires_grad_()
    params = SamplingParams(seed=7, logprobs=0, sampling_logprobs=0, **filters)
    tokens, _ = drawn(logits.detach(), params)
    weights = normal((ROWS,), torch.float32, 2)
    (filtered_logprobs(logits, tokens, params) * weights).sum().backward()
    every = torch.arange(VOCABULARY).repeat(ROWS)
    kept = filtered_logprobs(logits.detach().repeat_interleave(VOCABULARY, 0), every, params).view(ROWS, -1).isfinite()
    assert kept.any(1).all() and not kept.all(1).any()
    exact = logits.detach().double().requires_grad_()
    whole = (exact / params.temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    (whole.gather(1, tokens[:, None]).squeeze(1) * weights.double()).sum().backward()
    assert logits.grad is not None and exact.grad is not None
    assert (logits.grad - exact.grad).abs().max() < 1e-5 and not logits.grad[~kept].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_filter_gives_bits_of_token_logprobs(temperature: float, dtype: torch.dtype, device: str) -> None:
    params = SamplingParams(top_k=VOCABULARY, temperature=temperature)
    tokens, weights = torch.arange(ROWS, device=device) * 7, normal((ROWS,), torch.float32, 2).to(device)
    gradients = []
    for score in (
        lambda x: filtered_logprobs(x, tokens, params),
        lambda x: torch.ops.detcompile.token_logprobs(x, tokens, temperature)[0],
    ):
        logits = logits_of(dtype, device).requires_grad_()
        values = score(logits)
        (values * weights).sum().backward()
        gradients.append((values.detach(), logits.grad))
    for actual, expected in zip(*gradients, strict=True):
        assert_bitwise_equal(actual, expected)


def test_excluded_targets_with_zero_weight_have_zero_gradient() -> None:
    logits, params = logits_of(torch.bfloat16).requires_grad_(), SamplingParams(top_k=1)
    tokens = logits.argmin(1)
    logprobs = filtered_logprobs(logits, tokens, params)
    assert (logprobs == -torch.inf).all()
    logprobs.masked_fill(torch.ones(ROWS, dtype=torch.bool), 0.0).sum().backward()
    assert logits.grad is not None and not logits.grad.any()
