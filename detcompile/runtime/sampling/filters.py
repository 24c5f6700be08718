"""Operations on rows of logits: argmax, grammar masks, top_k, top_p and min_p. Ties go to the lowest id.

The sums of top_p run over fixed-point integers and do not depend on the order.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import detcompile.templates.rows.softmax  # noqa: F401  registers torch.ops.detcompile.softmax and log_softmax
from detcompile.templates.cpu.library import DTYPE_CODES
from detcompile.templates.exact.softmax import exact_log_softmax, exact_softmax
from detcompile.templates.tokens.likeliest import keep_likeliest_cpu, likeliest_cpu
from detcompile.templates.tokens.next_tokens_gpu import LIKELIEST_DTYPES, likeliest_cuda

PROBABILITY_UNIT = 2.0**56  # fixed-point probabilities: a row's sum stays far below 2^63
NO_LIMIT = torch.iinfo(torch.int64).max
DIGITS = ((21, 11), (10, 11), (0, 10))  # lowest bit and width of a float32's digits, the highest first
FEWEST_FOR_DIGITS = 8  # rows


class Filters(NamedTuple):
    """Filters of some rows."""

    top_k: bool
    top_p: bool
    min_p: bool


ALL = Filters(True, True, True)


def likeliest(logits: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Return [R, 2] int64: whether a row of ``logits`` [R, V] is invalid, and the lowest id of its highest logit.

    This is the whole sampling of a plain greedy row. Argmax treats NaN as the highest value.

    Args:
        logits: [R, V] floating point.
        sampled: int64, contiguous, at least R long; the ids are also written to its beginning.
    """
    if logits.is_cuda and logits.dtype in LIKELIEST_DTYPES:
        return likeliest_cuda(logits, sampled)
    if logits.device.type == "cpu" and logits.dtype in DTYPE_CODES and logits.stride(1) == 1:
        drawn = likeliest_cpu(logits)
    else:
        tokens = torch.argmax(logits, dim=-1, keepdim=True)
        drawn = torch.cat([not_finite(logits.gather(1, tokens)), tokens], dim=1)
    if sampled is not None:
        sampled[: len(drawn)].copy_(drawn[:, 1])
    return drawn


def not_finite(x: Tensor) -> Tensor:
    """Return whether each element is NaN or infinite."""
    return x - x != 0  # fewer kernels than ~isfinite


def filtered(
    scaled: Tensor, top_k: Tensor, mass_limit: Tensor, min_p: Tensor, is_exact: bool, filters: Filters = ALL
) -> Tensor:
    """Return ``scaled`` [Q, V] with -inf at tokens excluded by top_k, top_p and min_p, [Q, 1] each.

    Args:
        filters: the filters that some row has; the others exclude nothing.
    """
    kept = scaled + 0.0  # -0.0 becomes +0.0, whose bits are compared
    if filters.top_k:
        kept = keep_likeliest(kept, None, top_k)
    probabilities = softmax(kept, is_exact)
    highest = probabilities.gather(1, kept.argmax(1, keepdim=True)).double() if filters.min_p else None
    if filters.top_p:
        kept = keep_likeliest(kept, probabilities, mass_limit)
    return kept if highest is None else kept.masked_fill(probabilities.double() < highest * min_p, -math.inf)


def keep_likeliest(logits: Tensor, probabilities: Tensor | None, limit: Tensor) -> Tensor:
    """Return ``logits`` [Q, V], -inf at tokens with ``limit`` [Q, 1] or more weight before them, likeliest first.

    A token weighs 1, or its probability in PROBABILITY_UNIT if ``probabilities`` [Q, V] fp32 are given.
    """
    if logits.device.type == "cpu":
        return keep_likeliest_cpu(logits, probabilities, limit)
    weights = _weights(logits, probabilities)
    by_sort = len(logits) < FEWEST_FOR_DIGITS
    keep = _kept_by_sort(logits, weights, limit) if by_sort else _kept_by_digits(logits, weights, limit)
    return logits.masked_fill(~keep, -math.inf)


def _weights(logits: Tensor, probabilities: Tensor | None) -> Tensor:
    if probabilities is None:
        return torch.ones_like(logits, dtype=torch.int64)
    return (probabilities.double() * PROBABILITY_UNIT).nan_to_num_(0.0).long()


def _kept_by_sort(logits: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """Return whether each token is kept: sort them, and add the weights in this order."""
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    descending = weights.gather(1, ids)
    keep = descending.cumsum(dim=-1) - descending < limit
    return torch.empty_like(keep).scatter_(1, ids, keep)


def _kept_by_digits(logits: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """Return whether each token is kept: search the logit that reaches the limit, digit by digit.

    Takes more launches than a sort, but for many rows less time. Sums of integers may be added in any order.
    """
    bits = logits.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the logits; NaNs of a GPU have no sign
    lowest, before = torch.zeros_like(limit, dtype=torch.int32), torch.zeros_like(limit)
    for shift, width in DIGITS:
        digits = keys >> shift
        if shift + width == 32:
            digits, counted, base = digits + (1 << width - 1), weights, -(1 << width - 1)
        else:
            digits, counted = digits & (1 << width) - 1, torch.where(keys >> shift + width == lowest, weights, 0)
            base = 0
        histogram = weights.new_zeros(len(logits), 1 << width).scatter_add_(1, digits.long(), counted)
        above = before + histogram.flip(1).cumsum(1).flip(1) - histogram  # weight of all higher digits
        digit = (above >= limit).sum(1, keepdim=True)
        before, lowest = above.gather(1, digit), (lowest << width) + (digit + base).int()
    ties = keys == lowest
    tied = torch.where(ties, weights, 0)
    return (keys > lowest) | (ties & (before + tied.cumsum(1) - tied < limit))


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """Return ``logits`` [Q, V] with -inf where ``masks`` [Q, at least V / 8] uint8 have a 0 bit, lowest bit first."""
    bits = (masks.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)


def softmax(logits: Tensor, is_exact: bool) -> Tensor:
    """Return the probabilities of each row, by the definition of docs/exact.md if ``is_exact``."""
    return exact_softmax(logits) if is_exact else torch.ops.detcompile.softmax(logits, torch.float32, [])


def log_softmax(logits: Tensor, is_exact: bool) -> Tensor:
    """Return the log-probabilities of each row, by the definition of docs/exact.md if ``is_exact``."""
    return exact_log_softmax(logits) if is_exact else torch.ops.detcompile.log_softmax(logits, torch.float32, [])
