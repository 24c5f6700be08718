"""label_loss: Hugging Face's loss of labels, over the log-probabilities that a trainer takes."""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.dense.given_tensors import require_integers
from detcompile.runtime.dense.padded_batch import IGNORED_LABEL, UnpaddedBatch

__all__ = ["label_loss"]


def label_loss(logits: Tensor, labels: Tensor, batch: UnpaddedBatch, num_items: Tensor | int | None) -> Tensor:
    """Minus the sum of the labels' log-probabilities, divided by ``num_items``, or by the labels that there are.

    Args:
        logits: [T, V], of the tokens that are no padding.
        labels: [B, C], -100 where none.

    Raises:
        InvalidInput: no token has a label, or they are of another batch.
    """
    require_integers(labels, "labels")
    labels = labels.to(logits.device)
    mask = torch.from_numpy(batch.mask).to(labels.device)
    if labels.shape != mask.shape:
        raise InvalidInput(f"labels {list(labels.shape)} have to be like input_ids {list(mask.shape)}")
    following = labels.new_full(labels.shape, IGNORED_LABEL)
    following[:, :-1] = torch.where(mask[:, 1:], labels[:, 1:], IGNORED_LABEL)
    targets = following[mask]
    counted = targets != IGNORED_LABEL
    count = counted.sum() if num_items is None else torch.as_tensor(num_items, dtype=torch.float64)
    if not int(count):
        raise InvalidInput("no token has a label: every label is -100, at padding, or of a row's first token")
    logprobs, _ = torch.ops.detcompile.token_logprobs(logits, targets.where(counted, 0))
    return -(logprobs * counted / count.to(logprobs)).sum(dtype=torch.float64).float()
