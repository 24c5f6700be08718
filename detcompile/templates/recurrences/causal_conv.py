"""causal_conv: each channel's last W inputs, weighted and added; a state of W - 1 columns for what is before a step.

Legend: T tokens, S sequences, C channels, W taps, B batch.

    out[t, c] = round(sum over w of x[t - W + 1 + w, c] * weight[c, w] + bias[c])

Sequential over the taps, float32 inside, the bias last, one rounding to x.dtype. Inputs before a sequence's first token
are zeros; those of earlier steps are in its state, [num_slots, W - 1, C] in x.dtype, oldest first
(templates.recurrences.states).
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.recurrences.causal_conv_gpu import causal_conv_cuda
from detcompile.templates.recurrences.states import check_state_steps, dense_steps, run_on_cpu

__all__ = ["causal_conv_cpu", "reference_causal_conv"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, "
    "Tensor seq_lens) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dense_causal_conv(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


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
    """The op on the CPU: x [T, C], weight [C, W], bias [C] -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: tensors that do not fit together, or metadata that points outside the state; nothing is written.
    """
    x = _checked(x, weight, bias, state, state_slots, cu_seqlens, seq_lens)
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
    x = _checked(x, weight, bias, state, state_slots, cu_seqlens, seq_lens)
    return causal_conv_cuda(x, weight, bias, state, state_slots, cu_seqlens, seq_lens)


def _dense_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, weight.shape[1] - 1, C))
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.causal_conv(x.reshape(B * T, C), weight, bias, state, *steps).view(B, T, C)


_LIBRARY.impl("causal_conv", causal_conv_cpu, "CPU")
_LIBRARY.impl("causal_conv", _causal_conv_cuda, "CUDA")
_LIBRARY.impl("dense_causal_conv", _dense_causal_conv, "CPU")
_LIBRARY.impl("dense_causal_conv", _dense_causal_conv, "CUDA")


@torch.library.register_fake("detcompile::causal_conv", lib=_LIBRARY)
def _(x, weight, bias, state, state_slots, cu_seqlens, seq_lens):
    return x.new_empty(x.shape)


@torch.library.register_fake("detcompile::dense_causal_conv", lib=_LIBRARY)
def _(x, weight, bias):
    return x.new_empty(x.shape)


def reference_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The dense op's value in float64, unrounded: [B, T, C]."""
    W = weight.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, 0, W - 1, 0))
    taps = (padded[:, w : w + x.shape[1]] * weight[:, w].double() for w in range(W))
    total = torch.stack(list(taps)).sum(0)
    return total if bias is None else total + bias.double()


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *steps: Tensor) -> Tensor:
    """x with a unit last stride."""
    fits = x.dim() == 2 and weight.dim() == 2 and weight.shape[0] == x.shape[1] and weight.shape[1] > 0
    if not fits or (bias is not None and tuple(bias.shape) != (x.shape[1],)):
        raise InvalidInput(
            f"detcompile::causal_conv: x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)} must be [T, C], [C, W] and [C]."
        )
    check_state_steps("causal_conv", state, (weight.shape[1] - 1, x.shape[1]), x.dtype, *steps)
    return x if x.stride(1) == 1 else x.contiguous()
