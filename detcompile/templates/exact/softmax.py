"""exact_softmax and log_softmax of docs/exact.md over rows of logits: for routers, sampling and log-probabilities.

Legend: V vocabulary.

    q_i = floor(exp(z_i - max z) * 2^40)        S = sum of q_i: integers, so the order is free
    softmax     = float32(q_i) / float32(S)
    log_softmax = (z_i - max z) - log(float32(S) * 2^-40)

S is below 2^63 for fewer than 2^23 logits. A row with NaN, +inf or only -inf gives NaN. Every torch operation here is
one IEEE operation or an integer operation.
"""

import torch
from torch import Tensor

import detcompile.templates.exact.rows  # noqa: F401  registers torch.ops.detcompile.exact_function
from detcompile.errors import InvalidInput
from detcompile.templates.registration import define

_UNIT = 2.0**40
_MOST_LOGITS = (1 << 23) - 1


def exact_softmax(logits: Tensor) -> Tensor:
    """Return the probabilities [..., V] of float32 logits [..., V]."""
    shifted, weights, total = _weights(logits)
    return torch.where(shifted == shifted, weights.float() / total.float(), shifted)


def exact_log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities [..., V] of float32 logits [..., V]."""
    shifted, _, total = _weights(logits)
    return shifted - torch.ops.detcompile.exact_function(total.float() * (1 / _UNIT), "log")


def _weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z - max z, the integers q, and their sum [..., 1]."""
    if logits.shape[-1] > _MOST_LOGITS:
        raise InvalidInput(f"detcompile: an exact softmax of {logits.shape[-1]} logits; the limit is {_MOST_LOGITS}")
    shifted = logits - (logits.amax(-1, keepdim=True) + 0.0)  # -0.0 becomes +0.0
    exponentials = torch.ops.detcompile.exact_function(shifted, "exp")
    finite = torch.where(shifted == shifted, exponentials, 0.0)  # no NaN is converted to an integer
    weights = (finite.double() * _UNIT).long()
    return shifted, weights, weights.sum(-1, keepdim=True)


define(
    "exact_softmax(Tensor x) -> Tensor",
    {"x": "float32 ... V>0"},
    cpu=exact_softmax,
    cuda=exact_softmax,
    fake=lambda x: x.new_empty(x.shape),
)
