"""The likeliest token of each row of logits: greedy decoding, and where every other draw starts from."""

import torch
from torch import Tensor

from detcompile.templates.tokens.next_tokens_gpu import LIKELIEST_DTYPES, likeliest_cuda

__all__ = ["likeliest", "not_finite"]


def likeliest(logits: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Whether a row of ``logits`` [R, V] is bad, and the lowest id among its highest logits: [R, 2] int64.

    It is what a row is drawn to that needs no columns of a plan. Argmax takes a NaN for the highest.

    Args:
        logits: [R, V] floating point.
        sampled: int64, contiguous, at least R long; the ids are written to its beginning as well.
    """
    if logits.is_cuda and logits.dtype in LIKELIEST_DTYPES:
        return likeliest_cuda(logits, sampled)
    tokens = torch.argmax(logits, dim=-1, keepdim=True)
    if sampled is not None:
        sampled[: len(tokens)].copy_(tokens[:, 0])
    return torch.cat([not_finite(logits.gather(1, tokens)), tokens], dim=1)


def not_finite(x: Tensor) -> Tensor:
    """Whether each of ``x`` is NaN or infinite."""
    return x - x != 0  # fewer kernels than ~isfinite
