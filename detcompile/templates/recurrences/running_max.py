"""running_max: the greatest value of each channel so far, which falls token by token; before the first token it is 0.

Legend: T tokens, S sequences, C channels, B batch.

    m[t] = max(m[t - 1] + decay[t], x[t])

The exponent that the mLSTM of xLSTM (Beck et al., arXiv:2405.04517) divides its state by. Everything is float32, one
rounding a token. The state between steps is [num_slots, 1, C] float32 (templates.recurrences.states).
"""

import torch
from torch import Tensor

from detcompile.templates.recurrences.running_max_gpu import running_max_cuda
from detcompile.templates.recurrences.states import STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

__all__ = ["reference_running_max", "running_max_cpu"]


def running_max_cpu(
    x: Tensor,
    decay: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    isa: str | None = None,
) -> Tensor:
    """The op on the CPU: x and decay [T, C] float32 -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: metadata that points outside the state; nothing is written.
    """
    (T, C), given, steps = x.shape, [x.contiguous(), decay.contiguous()], (state_slots, cu_seqlens, seq_lens)
    out = torch.empty((T, C), dtype=torch.float32, device="cpu")
    return run_on_cpu("running_max", given, state, steps, out, [C], isa)


def _dense_running_max(x: Tensor, decay: Tensor) -> Tensor:
    """x and decay [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, 1, C), dtype=torch.float32)
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.running_max(x.flatten(0, 1), decay.flatten(0, 1), state, *steps).view(B, T, C)


define(
    "running_max(Tensor x, Tensor decay, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, Tensor seq_lens) "
    "-> Tensor",
    {"x": "float32 T C", "decay": "float32 T C", "state": "contiguous float32 Slots 1 C"} | STEPS,
    cpu=running_max_cpu,
    cuda=running_max_cuda,
    fake=lambda x, *rest: x.new_empty(x.shape),
)
define(
    "dense_running_max(Tensor x, Tensor decay) -> Tensor",
    {"x": "float32 B T C", "decay": "float32 B T C"},
    cpu=_dense_running_max,
    cuda=_dense_running_max,
    fake=lambda x, decay: x.new_empty(x.shape),
)


def reference_running_max(x: Tensor, decay: Tensor) -> Tensor:
    """The dense op's value in float64: [B, T, C]."""
    most, outs = torch.zeros_like(x[:, 0], dtype=torch.float64), []
    for t in range(x.shape[1]):
        most = torch.maximum(most + decay[:, t].double(), x[:, t].double())
        outs.append(most)
    return torch.stack(outs, 1)
