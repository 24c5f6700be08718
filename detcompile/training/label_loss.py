"""label_loss: Hugging Face's loss of labels, from a trainer's log-probabilities."""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.dense.given_tensors import require_integers
from detcompile.runtime.dense.padded_batch import IGNORED_LABEL, UnpaddedBatch
from detcompile.runtime.requests.plain_values import number
from detcompile.runtime.requests.sampling_params import LARGEST, SMALLEST

__all__ = ["label_loss"]


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
    logprobs, _ = torch.ops.detcompile.token_logprobs(logits, targets.where(counted, 0))
    return -(logprobs * counted / logprobs.new_full((), count)).sum(dtype=torch.float64).float()
