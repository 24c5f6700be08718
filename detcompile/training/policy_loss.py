"""Losses of a trainer's log-probabilities: policy_loss, PPO's clipped objective, and Hugging Face's label_loss.

The bits of a token's gradient depend only on that token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import detcompile.templates.training.token_sums  # noqa: F401  registers torch.ops.detcompile.token_sum
from detcompile.errors import InvalidInput
from detcompile.runtime.dense.padded_batch import IGNORED_LABEL, UnpaddedBatch, require_integers, require_values
from detcompile.runtime.requests.plain_values import kind, number
from detcompile.runtime.requests.sampling_params import LARGEST, SMALLEST
from detcompile.templates.training.logprobs import scored_tokens
from detcompile.templates.training.pointwise import policy_terms

_GRID = -40  # for the loss itself, whose terms add up to less than 2^11


def policy_loss(
    logprobs: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    denominator: float,
    clip: float | Sequence[float] = 0.2,
) -> Tensor:
    """Return the sum over tokens of -min(r * A, clipped r * A) / denominator, r = e^(logprob - old).

    This is PPO's objective (Schulman et al., 2017). So that gradients do not depend on micro-batching, a token's weight
    must depend only on the global batch: the denominator is a number of the global batch, such as its token count. A
    token without weight has advantage 0, and any ``old``.

    Args:
        logprobs: log-probabilities of the tokens, float32 of any shape, with a gradient.
        old: log-probabilities under the policy that sampled the tokens, like ``logprobs``; None if that is this policy.
        advantages: advantage of each token, like ``logprobs``.
        denominator: positive divisor of the sum, in float32's range.
        clip: maximum distance of r from 1, or the distances below and above 1.

    Returns:
        The loss, a float64 scalar: an exact sum, which adds up over micro-batches in any order.

    Raises:
        InvalidInput: tensors do not match, the denominator is not positive, or the clip is out of range.
    """
    pair = clip if isinstance(clip, Sequence) and len(clip) == 2 else (clip, clip)
    low, high = (number(distance, "policy_loss: clip") for distance in pair)
    denominator = number(denominator, "policy_loss: denominator")
    if not 0 <= low <= 1 or high < 0 or not SMALLEST <= denominator <= LARGEST:
        raise InvalidInput(
            f"policy_loss: clip={clip} must be distances from 1, the lower one at most 1, and "
            f"denominator={denominator} positive and within float32."
        )
    tensors = {"logprobs": logprobs, "old": logprobs if old is None else old, "advantages": advantages}
    _check_tensors(tensors)
    loss: Tensor = _PolicyLoss.apply(*tensors.values(), 1.0 - low, 1.0 + high, denominator)
    return loss


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    """Reject anything but float32 tensors of the first one's shape and device: the kernel reads raw addresses."""
    shape, device = (getattr(tensors["logprobs"], what, None) for what in ("shape", "device"))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(f"policy_loss: {name} is {kind(tensor)}: pass a tensor with one number per token")
        require_values(tensor, f"policy_loss: {name}")
        if (tensor.dtype, tensor.shape, tensor.device) != (torch.float32, shape, device):
            raise InvalidInput(
                f"policy_loss: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, but must be float32 "
                f"{tuple(tensors['logprobs'].shape)} on {device}, one number per token. Expand the advantages of "
                "sequences over their tokens."
            )


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, denominator: float
    ) -> Tensor:
        operands = (tensor.detach().contiguous() for tensor in (logprobs, old, advantages))
        terms, slopes = policy_terms(*operands, low=low, high=high, denominator=denominator)
        ctx.save_for_backward(slopes)
        loss: Tensor = torch.ops.detcompile.token_sum(terms.reshape(-1, 1), _GRID)
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable  # slopes depend on the log-probabilities, but have no gradient
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * g.to(slopes.dtype), None, None, None, None, None


def label_loss(logits: Tensor, labels: Tensor, batch: UnpaddedBatch, num_items: Tensor | int | None) -> Tensor:
    """Return minus the sum of the labels' log-probabilities, divided by ``num_items`` or the number of labels.

    Args:
        logits: [T, V], of the tokens that are not padding.
        labels: [B, C], -100 for none.

    Raises:
        InvalidInput: no token has a label, a label is outside the vocabulary, the shape is not the batch's, or
            ``num_items`` is not positive.
    """
    require_integers(labels, "labels")
    labels = labels.to(logits.device)
    mask = torch.from_numpy(batch.mask).to(labels.device)
    if labels.shape != mask.shape:
        raise InvalidInput(f"labels {list(labels.shape)} must have the shape of input_ids {list(mask.shape)}")
    following = labels.new_full(labels.shape, IGNORED_LABEL)
    following[:, :-1] = torch.where(mask[:, 1:], labels[:, 1:], IGNORED_LABEL)
    targets = following[mask]
    counted = targets != IGNORED_LABEL
    bad = targets[counted & ((targets < 0) | (targets >= logits.shape[1]))]
    if len(bad):
        raise InvalidInput(f"label {int(bad[0])}: labels are 0 to {logits.shape[1] - 1}, or {IGNORED_LABEL} for none")
    count = float(counted.sum()) if num_items is None else number(num_items, "num_items_in_batch")
    if num_items is None and not count:
        raise InvalidInput("no token has a label: every label is -100, at padding, or at a row's first token")
    if not SMALLEST <= count <= LARGEST:
        raise InvalidInput(f"num_items_in_batch={count} divides the loss: pass the number of labels of the whole batch")
    logprobs, _ = scored_tokens(logits, targets.where(counted, 0))
    return -(logprobs * counted / logprobs.new_full((), count)).sum(dtype=torch.float64).float()
