"""Probabilities of rows of logits [R, V], float32, in the arithmetic of the model."""

import torch
from torch import Tensor

import detcompile.templates.rows.softmax  # noqa: F401  registers torch.ops.detcompile.softmax and log_softmax
from detcompile.templates.exact.softmax import exact_log_softmax, exact_softmax


def softmax(logits: Tensor, is_exact: bool) -> Tensor:
    """Return the probabilities of each row, by the definition of docs/exact.md if ``is_exact``."""
    return exact_softmax(logits) if is_exact else torch.ops.detcompile.softmax(logits, torch.float32, [])


def log_softmax(logits: Tensor, is_exact: bool) -> Tensor:
    """Return the log-probabilities of each row, by the definition of docs/exact.md if ``is_exact``."""
    return exact_log_softmax(logits) if is_exact else torch.ops.detcompile.log_softmax(logits, torch.float32, [])
