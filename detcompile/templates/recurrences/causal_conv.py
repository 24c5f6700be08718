"""causal_conv: a weighted sum of each channel's last W inputs; the state holds the W - 1 inputs before a step.

Legend: T tokens, S sequences, C channels, W taps, B batch.

    out[t, c] = round(sum over w of x[t - W + 1 + w, c] * weight[c, w] + bias[c])

Sequential over the taps, float32 inside, the bias last, one rounding to x.dtype. Inputs before a sequence's first token
are zeros; inputs of earlier steps are in its state, [num_slots, W - 1, C] in x.dtype, oldest first
(templates.recurrences.states).
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.recurrences.causal_conv_gpu import causal_conv_cuda
from detcompile.templates.recurrences.states import STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

__all__ = ["causal_conv_cpu", "reference_causal_conv"]


def causal_conv_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU: x [T, C], weight [C, W], bias [C] -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: metadata points outside the state; nothing is written.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (T, C), W = x.shape, weight.shape[1]
    taps = weight.detach().t().float().contiguous()
    offset = None if bias is None else bias.detach().float().contiguous()
    steps, sizes = (state_slots, cu_seqlens, seq_lens), [C, W, x.stride(0), cpu_library.dtype_code(x)]
    out = torch.empty((T, C), dtype=x.dtype, device="cpu")
    return run_on_cpu("causal_conv", [x, taps, offset], state, steps, out, sizes, isa)


def _causal_conv_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    return causal_conv_cuda(x, weight, bias, state, state_slots, cu_seqlens, seq_lens)


def _dense_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run x [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, weight.shape[1] - 1, C))
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.causal_conv(x.reshape(B * T, C), weight, bias, state, *steps).view(B, T, C)


define(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, "
    "Tensor seq_lens) -> Tensor",
    {"x": "float T C", "weight": "float C W>0", "bias": "float C", "state": "contiguous x Slots W-1 C"} | STEPS,
    cpu=causal_conv_cpu,
    cuda=_causal_conv_cuda,
    fake=lambda x, *rest: x.new_empty(x.shape),
)
define(
    "dense_causal_conv(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    {"x": "float B T C", "weight": "float C W>0", "bias": "float C"},
    cpu=_dense_causal_conv,
    cuda=_dense_causal_conv,
    fake=lambda x, weight, bias: x.new_empty(x.shape),
)


def reference_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the dense op's value in float64, unrounded: [B, T, C]."""
    W = weight.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, 0, W - 1, 0))
    taps = (padded[:, w : w + x.shape[1]] * weight[:, w].double() for w in range(W))
    total = torch.stack(list(taps)).sum(0)
    return total if bias is None else total + bias.double()
