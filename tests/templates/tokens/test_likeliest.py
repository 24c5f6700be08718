"""The likeliest tokens on a CPU are argmax's, whatever a row holds, on every instruction set."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.sampling.filters import likeliest, not_finite
from detcompile.templates.tokens.likeliest import likeliest_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS

STRANGE = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0]


@pytest.mark.parametrize("isa", ISAS)
@given(
    rows=st.integers(0, 5),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 40_000]),
    seed=st.integers(0, 2**32),
    strange=st.lists(st.sampled_from(STRANGE), max_size=6),
    few_values=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_the_likeliest_is_argmaxs(isa, rows, vocab_size, seed, strange, few_values, dtype):
    """Rows with many equal logits, with few, and with special values only."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator).to(dtype)
    if few_values:
        logits = -torch.randint(0, 3, (rows, vocab_size), generator=generator).to(dtype)
    if strange:
        logits[1::2] = strange[0]
        place = torch.randint(0, vocab_size, (rows, len(strange)), generator=generator)
        logits.scatter_(1, place, torch.tensor(strange).to(dtype).expand(rows, -1))
    tokens = logits.argmax(dim=-1, keepdim=True)
    expected = torch.cat([not_finite(logits.gather(1, tokens)), tokens], dim=1)
    padded = torch.nn.functional.pad(logits, (0, 3), value=torch.inf)[:, :vocab_size]
    for given_rows in (logits, padded):
        assert_bitwise_equal(likeliest_cpu(given_rows, isa), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sampled_tokens_are_stored(dtype):
    logits = torch.tensor([[0.0, 2.0, 2.0], [math.nan, 1.0, 5.0]], dtype=dtype)
    sampled = torch.full((3,), -7)
    for rows in (logits, logits.t().contiguous().t()):
        assert likeliest(rows, sampled).tolist() == [[0, 1], [1, 0]]
        assert sampled.tolist() == [1, 0, -7]
