"""Filters of a draw: masks, top_k, top_p and min_p, each row by itself, ties by the lowest id.

The cumulative sum of top_p runs over fixed-point integers, where every order gives the same sum.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import detcompile.templates.rows.softmax  # noqa: F401  registers torch.ops.detcompile.softmax

__all__ = ["NO_LIMIT", "PROBABILITY_UNIT", "filtered", "masked"]

PROBABILITY_UNIT = 2.0**56  # fixed-point probabilities: a row's sum stays far below 2^63
NO_LIMIT = torch.iinfo(torch.int64).max


def filtered(scaled: Tensor, top_k: Tensor, mass_limit: Tensor, min_p: Tensor, radices: Sequence[int]) -> Tensor:
    """``scaled`` [Q, V] with -inf at the tokens that top_k, top_p and min_p, [Q, 1] each, leave out."""
    # -0.0 becomes +0.0: CUDA picks its sorting algorithm by batch size, and a radix sort may tell the two apart.
    descending, ids = torch.sort(scaled + 0.0, dim=-1, descending=True, stable=True)
    keep = torch.arange(scaled.shape[1], device=scaled.device) < top_k
    descending = descending.masked_fill(~keep, -math.inf)

    # Back in the order of the vocabulary, so that the leaves of its sum are the shards'.
    top_k_logits = torch.empty_like(scaled).scatter_(1, ids, descending)
    probabilities = torch.ops.detcompile.softmax(top_k_logits, torch.float32, list(radices)).double().gather(1, ids)

    mass = (probabilities * PROBABILITY_UNIT).long()
    mass_before = mass.cumsum(dim=-1) - mass
    keep &= mass_before < mass_limit
    keep &= probabilities >= probabilities[:, :1] * min_p
    return torch.empty_like(scaled).scatter_(1, ids, descending.masked_fill(~keep, -math.inf))


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """``logits`` [Q, V] with -inf where ``masks`` [Q, at least V / 8] uint8 have no bit, the lowest bit first."""
    bits = (masks.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)
