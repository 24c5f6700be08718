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
    limits = (top_k, mass_limit, min_p)
    if scaled.device.type == "cpu":
        return _filtered_on_cpu(scaled, *limits, is_exact, filters)
    return _filtered_by_sort(scaled, *limits, is_exact)


def _filtered_by_sort(scaled: Tensor, top_k: Tensor, mass_limit: Tensor, min_p: Tensor, is_exact: bool) -> Tensor:
    # -0.0 becomes +0.0: CUDA picks its sorting algorithm by batch size, and a radix sort may tell the two apart.
    descending, ids = torch.sort(scaled + 0.0, dim=-1, descending=True, stable=True)
    keep = torch.arange(scaled.shape[1], device=scaled.device) < top_k
    descending = descending.masked_fill(~keep, -math.inf)

    # Back in vocabulary order, in which the softmax sums.
    top_k_logits = torch.empty_like(scaled).scatter_(1, ids, descending)
    probabilities = softmax(top_k_logits, is_exact).double().gather(1, ids)

    mass = (probabilities * PROBABILITY_UNIT).long()
    mass_before = mass.cumsum(dim=-1) - mass
    keep &= mass_before < mass_limit
    keep &= probabilities >= probabilities[:, :1] * min_p
    return torch.empty_like(scaled).scatter_(1, ids, descending.masked_fill(~keep, -math.inf))


def _filtered_on_cpu(
    scaled: Tensor, top_k: Tensor, mass_limit: Tensor, min_p: Tensor, is_exact: bool, filters: Filters
) -> Tensor:
    """Return the same by a search for the logits at the limits, which takes less time than a sort."""
    kept = scaled + 0.0
    if filters.top_k:
        kept = keep_likeliest_cpu(kept, None, top_k)
    probabilities = softmax(kept, is_exact)
    highest = probabilities.gather(1, kept.argmax(1, keepdim=True)).double() if filters.min_p else None
    if filters.top_p:
        kept = keep_likeliest_cpu(kept, probabilities, mass_limit)
    return kept if highest is None else kept.masked_fill(probabilities.double() < highest * min_p, -math.inf)


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
