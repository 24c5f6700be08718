"""Gumbel-max: argmax of logprob + noise over a row, by cpu/gumbel.cpp or gumbel_gpu.py; runtime.sampling.philox's bits.

Legend: T rows, V vocabulary size.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.tokens.gumbel_gpu import gumbel_argmax_cuda

__all__ = ["best_scores_cpu", "gumbel_argmax"]


def gumbel_argmax(logprobs: Tensor, keys: Tensor) -> Tensor:
    """Token of each row whose logprob + Gumbel noise is highest, in float64.

    Args:
        logprobs: [T, V] float32 with a unit stride in the row.
        keys: [T, 5] int64, runtime.sampling.philox.noise_keys, on the same device.

    Returns:
        [T] int64.
    """
    return gumbel_argmax_cuda(logprobs, keys) if logprobs.is_cuda else best_scores_cpu(logprobs, keys)[1]


def best_scores_cpu(logprobs: Tensor, keys: Tensor, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """The highest score of each row [T] float64, and the lowest id [T] int64 that has it; a NaN is above all.

    Args:
        logprobs, keys: operands of ``gumbel_argmax``, on the CPU. isa: a build of cpu.library; None is the machine's.
    """
    T, V = logprobs.shape
    assert logprobs.dtype == torch.float32 and logprobs.stride(1) == 1 and V > 0, "logprobs must be [T, V] float32"
    assert keys.dtype == torch.int64 and keys.shape == (T, 5), "keys must be [T, 5] int64"
    assert logprobs.device.type == keys.device.type == "cpu", "the kernel reads memory of the host"
    keys = keys.contiguous()
    scores, tokens = torch.empty(T, dtype=torch.float64, device="cpu"), torch.empty(T, dtype=torch.int64, device="cpu")
    cpu_library.library(isa).detcompile_gumbel_argmax(
        logprobs.data_ptr(),
        logprobs.stride(0),
        keys.data_ptr(),
        scores.data_ptr(),
        tokens.data_ptr(),
        T,
        V,
        cpu_library.thread_count(),
    )
    return scores, tokens
