"""running_max: the greatest value of each channel so far, which falls token by token; before the first token it is 0.

Legend: T tokens, S sequences, C channels, B batch.

    m[t] = max(m[t - 1] + decay[t], x[t])

The exponent that the mLSTM of xLSTM (Beck et al., arXiv:2405.04517) divides its state by. Everything is float32, one
rounding a token. The state between steps is [num_slots, 1, C] float32 (templates.recurrences.states).
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.running_max_gpu import running_max_cuda
from detcompile.templates.recurrences.states import check_state_steps, dense_steps, run_on_cpu

__all__ = ["reference_running_max", "running_max_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "running_max(Tensor x, Tensor decay, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, Tensor seq_lens) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("dense_running_max(Tensor x, Tensor decay) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


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
        InvalidInput: tensors that do not fit together, or metadata that points outside the state; nothing is written.
    """
    _check(x, decay, state, state_slots, cu_seqlens, seq_lens)
    (T, C), given, steps = x.shape, [x.contiguous(), decay.contiguous()], (state_slots, cu_seqlens, seq_lens)
    out = torch.empty((T, C), dtype=torch.float32, device="cpu")
    return run_on_cpu("running_max", given, state, steps, out, [C], isa)


def _running_max_cuda(
    x: Tensor, decay: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor, seq_lens: Tensor
) -> Tensor:
    _check(x, decay, state, state_slots, cu_seqlens, seq_lens)
    return running_max_cuda(x, decay, state, state_slots, cu_seqlens, seq_lens)


def _dense_running_max(x: Tensor, decay: Tensor) -> Tensor:
    """x and decay [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, 1, C), dtype=torch.float32)
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.running_max(x.flatten(0, 1), decay.flatten(0, 1), state, *steps).view(B, T, C)


_LIBRARY.impl("running_max", running_max_cpu, "CPU")
_LIBRARY.impl("running_max", _running_max_cuda, "CUDA")
_LIBRARY.impl("dense_running_max", _dense_running_max, "CPU")
_LIBRARY.impl("dense_running_max", _dense_running_max, "CUDA")


@torch.library.register_fake("detcompile::running_max", lib=_LIBRARY)
def _(x, decay, state, state_slots, cu_seqlens, seq_lens):
    return x.new_empty(x.shape)


@torch.library.register_fake("detcompile::dense_running_max", lib=_LIBRARY)
def _(x, decay):
    return x.new_empty(x.shape)


def reference_running_max(x: Tensor, decay: Tensor) -> Tensor:
    """The dense op's value in float64: [B, T, C]."""
    most, outs = torch.zeros_like(x[:, 0], dtype=torch.float64), []
    for t in range(x.shape[1]):
        most = torch.maximum(most + decay[:, t].double(), x[:, t].double())
        outs.append(most)
    return torch.stack(outs, 1)


def _check(x: Tensor, decay: Tensor, state: Tensor, *steps: Tensor) -> None:
    if x.dim() != 2 or x.shape != decay.shape or {x.dtype, decay.dtype} != {torch.float32}:
        raise InvalidInput(
            f"detcompile::running_max: x {tuple(x.shape)} {x.dtype} and decay {tuple(decay.shape)} {decay.dtype} must "
            "be [T, C] float32."
        )
    check_state_steps("running_max", state, (1, x.shape[1]), torch.float32, *steps)
