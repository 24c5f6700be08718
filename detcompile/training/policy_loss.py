"""policy_loss: the clipped objective of PPO, whose gradient of a token has bits of that token alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import detcompile.templates.training.token_sums  # noqa: F401  registers torch.ops.detcompile.token_sum
from detcompile.errors import InvalidInput
from detcompile.runtime.dense.given_tensors import require_values
from detcompile.runtime.requests.plain_values import kind, number
from detcompile.runtime.requests.sampling_params import LARGEST, SMALLEST
from detcompile.templates.training.pointwise import policy_terms

__all__ = ["policy_loss"]

_GRID = -40  # of the loss itself, whose terms add up to less than 2^11


def policy_loss(
    logprobs: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    denominator: float,
    clip: float | Sequence[float] = 0.2,
) -> Tensor:
    """The sum over tokens of -min(r * A, clipped r * A) / denominator, r = e^(logprob - old) (Schulman et al., 2017).

    For gradients that no split into micro-batches changes, a token's weight may depend on the whole batch only: the
    denominator is a number of the global batch, such as its tokens. A token that shall not count has advantage 0,
    and any ``old``.

    Args:
        logprobs: log-probabilities of the tokens, float32 of any shape, with a gradient.
        old: log-probabilities under the policy that drew the tokens, like ``logprobs``; None if that is this one.
        advantages: advantage of each token, like ``logprobs``.
        denominator: positive number that the sum is divided by, in float32's range.
        clip: how far r may be from 1, or how far below and above it.

    Returns:
        The loss, float64 without dimensions: an exact sum, which adds up over micro-batches in any order.

    Raises:
        InvalidInput: tensors that do not fit together, a denominator that is not positive, or a clip out of its range.
    """
    pair = clip if isinstance(clip, Sequence) and len(clip) == 2 else (clip, clip)
    low, high = (number(distance, "policy_loss: clip") for distance in pair)
    denominator = number(denominator, "policy_loss: denominator")
    if not 0 <= low <= 1 or high < 0 or not SMALLEST <= denominator <= LARGEST:
        raise InvalidInput(
            f"policy_loss: clip={clip} must be distances from 1, the lower one at most 1, and "
            f"denominator={denominator} positive and within float32."
        )
    given = {"logprobs": logprobs, "old": logprobs if old is None else old, "advantages": advantages}
    _check_tensors(given)
    loss: Tensor = _PolicyLoss.apply(*given.values(), 1.0 - low, 1.0 + high, denominator)
    return loss


def _check_tensors(given: Mapping[str, Any]) -> None:
    """Refuse what is no float32 tensor, or has not the first one's shape and device: the kernel reads by addresses."""
    shape, device = (getattr(given["logprobs"], what, None) for what in ("shape", "device"))
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(f"policy_loss: {name} is {kind(tensor)}: give a tensor, one number a token")
        require_values(tensor, f"policy_loss: {name}")
        if (tensor.dtype, tensor.shape, tensor.device) != (torch.float32, shape, device):
            raise InvalidInput(
                f"policy_loss: {name} is {tensor.dtype} {tuple(tensor.shape)} and must be float32 "
                f"{tuple(given['logprobs'].shape)}, one a token, on {device} and not on {tensor.device}. Expand the "
                "advantages of sequences over their tokens."
            )


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, denominator: float
    ) -> Tensor:
        given = (tensor.detach().contiguous() for tensor in (logprobs, old, advantages))
        terms, slopes = policy_terms(*given, low=low, high=high, denominator=denominator)
        ctx.save_for_backward(slopes)
        loss: Tensor = torch.ops.detcompile.token_sum(terms.reshape(-1, 1), _GRID)
        return loss.squeeze(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * g.to(slopes.dtype), None, None, None, None, None
