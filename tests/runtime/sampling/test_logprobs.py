"""Logprobs of the model are right, in one order, and independent of other rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.sampling import logprobs
from detcompile.runtime.sampling.logprobs import token_logprobs
from tests.bits import assert_bitwise_equal


@given(
    num_rows=st.integers(1, 6), vocab_size=st.integers(1, 100), num_top=st.integers(0, 5), seed=st.integers(0, 2**32)
)
def test_token_logprobs(num_rows, vocab_size, num_top, seed, device):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul(4).round().to(device)
    logits[:, vocab_size // 2 + 1 :: 3] = -torch.inf
    tokens = torch.randint(vocab_size, (num_rows,), generator=generator).to(device)
    result = token_logprobs(logits, tokens, num_top)
    expected = logits.cpu().double().log_softmax(-1)
    torch.testing.assert_close(
        result.chosen.cpu().double(), expected[range(num_rows), tokens.cpu()], atol=1e-5, rtol=1e-5
    )
    for row in range(num_rows):
        order = sorted(range(vocab_size), key=lambda token: (-logits[row, token].item(), token))
        assert result.rank[row] == order.index(tokens[row]) + 1
        order = order[:num_top]
        assert result.top_ids[row].tolist() == order
        for place, token in enumerate(order):
            again = token_logprobs(logits[row : row + 1], torch.tensor([token], device=device)).chosen
            assert_bitwise_equal(result.top[row, place : place + 1], again)
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], num_top)
        for whole, single in zip(result, alone):
            assert_bitwise_equal(whole[row : row + 1], single)


def test_logprobs_of_pieces_equal_whole_batch(monkeypatch):
    logits, tokens = torch.randn(7, 30, generator=torch.Generator().manual_seed(0)), torch.arange(7)
    whole = token_logprobs(logits, tokens, 4)
    monkeypatch.setattr(logprobs, "ELEMENTS_AT_ONCE", 70)
    for a, b in zip(token_logprobs(logits, tokens, 4), whole):
        assert_bitwise_equal(a, b)


def test_no_rows_and_rows_of_nan(device):
    none = token_logprobs(torch.zeros(0, 9, device=device), torch.zeros(0, dtype=torch.int64, device=device), 3)
    assert none.chosen.shape == (0,) and none.top_ids.shape == none.top.shape == (0, 3)
    nan = token_logprobs(torch.full((1, 9), torch.nan, device=device), torch.zeros(1, dtype=torch.int64).to(device), 3)
    assert nan.top_ids.min() >= 0 and nan.top_ids.max() < 9
