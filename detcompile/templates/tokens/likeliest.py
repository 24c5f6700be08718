"""The most likely token of each row of logits on a CPU, by cpu/likeliest.cpp.

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
