"""Log-probabilities of chosen tokens and of the most likely tokens, from logits.

Legend: R rows, V vocabulary size, N alternatives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.runtime.sampling.filters import log_softmax

ELEMENTS_AT_ONCE = 1 << 24  # bounds the memory of many rows; they are independent, so it cannot change a bit


class TokenLogprobs(NamedTuple):
    """Log-probabilities of rows."""

    chosen: Tensor  # [R] fp32, of the drawn tokens
    top_ids: Tensor  # [R, N] int64, the most likely tokens, most likely first; ties: lowest id first
    top: Tensor  # [R, N] fp32, logprobs of ``top_ids``
    rank: Tensor  # [R] int64, rank of each drawn token in that order, from 1


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int = 0, is_exact: bool = False) -> TokenLogprobs:
    """Return logprobs of ``tokens`` [R] int64 and of the ``num_top`` most likely tokens, from ``logits`` [R, V].

    Runs on the device of ``logits`` without waiting for it.
    """
    rows_at_once = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    pieces = [
        _token_logprobs(logits[start : start + rows_at_once], tokens[start : start + rows_at_once], num_top, is_exact)
        for start in range(0, max(1, len(tokens)), rows_at_once)
    ]
    return joined(pieces)


def joined(pieces: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Return the rows of one or more pieces."""
    return pieces[0] if len(pieces) == 1 else TokenLogprobs(*(torch.cat(parts) for parts in zip(*pieces)))


def _token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, is_exact: bool) -> TokenLogprobs:
    logprobs = log_softmax(logits, is_exact)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    top_ids = _likeliest(logprobs, min(num_top, logits.shape[1]))
    return TokenLogprobs(chosen, top_ids, logprobs.gather(1, top_ids), _rank(logprobs, tokens, chosen))


def _rank(logprobs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Return ranks: 1 + the number of tokens that are likelier than ``tokens`` [R], or equal with a lower id."""
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    before = (logprobs > chosen[:, None]) | ((logprobs == chosen[:, None]) & (ids < tokens[:, None]))
    return before.sum(1) + 1


def _likeliest(logprobs: Tensor, num_top: int) -> Tensor:
    """Return ids [R, N] of the highest of ``logprobs`` [R, V] fp32.

    topk may pick any of several equal values, so it gets distinct int64 keys: the value in the high half, in an
    order-preserving encoding, and the id, counted down, in the low half.
    """
    vocab_size = logprobs.shape[1]
    if num_top == 0:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 becomes +0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys = ascending + torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    return vocab_size - 1 - (torch.topk(keys, num_top, dim=-1).values & 0xFFFFFFFF)
