"""The likeliest tokens are argmax's for any row, and pending tokens are filled in."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.sampling.filters import likeliest
from detcompile.templates.tokens.next_tokens_gpu import fill_pending_cuda, likeliest_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON

STRANGE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0]


@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 2, 100, 2048, 2049, 5000]),
    seed=st.integers(0, 2**32),
    strange=st.lists(st.sampled_from(STRANGE), max_size=6),
    few_values=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])),
)
def test_the_likeliest_is_that_of_argmax(num_rows, vocab_size, seed, strange, few_values, dtype):
    """Rows with many equal logits, with few, and with special values only."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
    if few_values:
        logits = -torch.randint(0, 3, (num_rows, vocab_size), generator=generator).to(dtype)
    if strange:
        logits[1::2] = strange[0]
        place = torch.randint(0, vocab_size, (num_rows, len(strange)), generator=generator)
        logits.scatter_(1, place, torch.tensor(strange).to(dtype).expand(num_rows, -1))
    expected = likeliest(logits)
    sampled = torch.full((num_rows + 2,), -7, dtype=torch.int64, device=DEVICE)
    padded = torch.nn.functional.pad(logits, (0, 3), value=torch.inf).to(DEVICE)[:, :vocab_size]
    for rows in (logits.to(DEVICE), logits.to(DEVICE).t().contiguous().t(), padded):
        assert_bitwise_equal(likeliest_cuda(rows, sampled).cpu(), expected)
    assert sampled[:num_rows].tolist() == expected[:, 1].tolist() and sampled[num_rows:].tolist() == [-7, -7]


def test_no_rows_have_no_likeliest():
    assert likeliest_cuda(torch.empty(0, 9, device=DEVICE)).shape == (0, 2)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
def test_tokens_drawn_before_take_their_places(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    ids, drawn = torch.randint(0, 9**9, (2, num_tokens + 3), generator=generator)
    pending = torch.randint(-1, num_tokens + 3, (num_tokens,), generator=generator)
    actual = fill_pending_cuda(ids[:num_tokens].to(DEVICE), pending.to(DEVICE), drawn.to(DEVICE))
    assert actual.tolist() == [known if row < 0 else drawn[row] for known, row in zip(ids.tolist(), pending.tolist())]
