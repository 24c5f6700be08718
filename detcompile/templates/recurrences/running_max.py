"""running_max: each channel's maximum so far, which decays token by token and starts from 0.

Legend: T tokens, S sequences, C channels, B batch.

    m[t] = max(m[t - 1] + decay[t], x[t])

The mLSTM of xLSTM (Beck et al., arXiv:2405.04517) divides its state by the exponential of this. Everything is float32,
with one rounding per token. The state between steps is [num_slots, 1, C] float32 (templates.recurrences.states). On a
GPU one program per sequence and block of channels iterates over the tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.recurrences.states import STATE, STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

BLOCK = 32  # channels per program


def running_max_cpu(x: Tensor, decay: Tensor, state: Tensor, *step: Tensor, isa: str | None = None) -> Tensor:
    """Run the op on the CPU: x and decay [T, C] float32 -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: metadata points outside the state; nothing is written.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    return run_on_cpu("running_max", [x.contiguous(), decay.contiguous()], state, step, out, [x.shape[1]], isa)


@triton.jit
def _max_kernel(
    x_ptr, decay_ptr, state_ptr, out_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr, C: tl.constexpr, BLOCK: tl.constexpr
):
    s = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    first = tl.load(cu_seqlens_ptr + s)
    end = tl.load(cu_seqlens_ptr + s + 1)
    slot = tl.load(slots_ptr + s)
    known = inside & (slot >= 0) & (tl.load(seq_lens_ptr + s) > end - first)
    slot_ptr = state_ptr + slot.to(tl.int64) * C + channel
    most = tl.load(slot_ptr, mask=known, other=0.0)
    for t in range(first, end):
        place = tl.cast(t, tl.int64) * C + channel
        fallen = most + tl.load(decay_ptr + place, mask=inside, other=0.0)
        most = tl.maximum(fallen, tl.load(x_ptr + place, mask=inside, other=0.0), propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + place, most, mask=inside)
    tl.store(slot_ptr, most, mask=inside & (slot >= 0) & (end > first))


def running_max_cuda(x: Tensor, decay: Tensor, state: Tensor, *step: Tensor) -> Tensor:
    """Run the op on the GPU: x and decay [T, C] float32 -> [T, C]."""
    (T, C), S = x.shape, len(step[0])
    out = torch.zeros((T, C), dtype=torch.float32, device=x.device)  # padding rows stay zeros
    if out.numel() == 0 or S == 0:
        return out
    operands = (x.contiguous(), decay.contiguous(), state, out, *step)
    _max_kernel[(S, triton.cdiv(C, BLOCK))](*operands, C=C, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False)
    return out


def _dense_running_max(x: Tensor, decay: Tensor) -> Tensor:
    """Run x and decay [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, 1, C), dtype=torch.float32)
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.running_max(x.flatten(0, 1), decay.flatten(0, 1), state, *steps).view(B, T, C)


define(
    f"running_max(Tensor x, Tensor decay, {STATE}) -> Tensor",
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
    """Return the dense op's value in float64: [B, T, C]."""
    most, outs = torch.zeros_like(x[:, 0], dtype=torch.float64), []
    for t in range(x.shape[1]):
        most = torch.maximum(most + decay[:, t].double(), x[:, t].double())
        outs.append(most)
    return torch.stack(outs, 1)
