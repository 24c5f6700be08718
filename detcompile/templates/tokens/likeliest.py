"""The most likely tokens of each row of logits on a CPU, by cpu/likeliest.cpp and cpu/keep_likeliest.cpp.

Legend: R rows, V vocabulary size.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library


def likeliest_cpu(logits: Tensor, isa: str | None = None) -> Tensor:
    """Return [R, 2] int64: whether a row's highest logit is NaN or infinite, and its lowest id. NaN is above all.

    Args:
        logits: [R, V] float32, bfloat16 or float16 on the CPU, with a unit stride in the row.
        isa: a build of cpu.library; None is the machine's.
    """
    R, V = logits.shape
    assert logits.device.type == "cpu" and logits.stride(1) == 1 and V > 0, "the kernel reads rows of host memory"
    out = torch.empty(R, 2, dtype=torch.int64, device="cpu")
    cpu_library.library(isa).detcompile_likeliest(
        logits, logits.stride(0), out, R, V, cpu_library.dtype_code(logits), cpu_library.thread_count()
    )
    return out


def keep_likeliest_cpu(logits: Tensor, probabilities: Tensor | None, limits: Tensor, isa: str | None = None) -> Tensor:
    """Return ``logits`` [R, V], and -inf at tokens with at least ``limits`` [R, 1] weight before them.

    Before a token are those with a higher logit, or an equal one and a lower id; NaN is above all.

    Args:
        logits: [R, V] float32 on the CPU, without -0.0.
        probabilities: [R, V] float32; a token weighs its probability times 2^56, rounded down (NaN: 0), or 1 if None.
        limits: [R, 1] int64, at least 1.
        isa: a build of cpu.library; None is the machine's.
    """
    R, V = logits.shape
    assert logits.device.type == "cpu" and logits.dtype == torch.float32, "the kernel reads float32 in host memory"
    assert limits.dtype == torch.int64 and limits.shape == (R, 1), "limits must be [R, 1] int64"
    logits, limits = logits.contiguous(), limits.contiguous()
    probabilities = None if probabilities is None else probabilities.contiguous()
    out = torch.empty_like(logits)
    cpu_library.library(isa).detcompile_keep_likeliest(
        logits, probabilities, limits, out, R, V, cpu_library.thread_count()
    )
    return out
