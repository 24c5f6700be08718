"""silu_mul on the GPU: elementwise, so there is no order to preserve.

Legend: T rows, F features. A row's address is computed once per program, not per element: a 64-bit division for every
element takes three times as long as loading it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.device.primitives import LOG2_E


@triton.jit
def silu_mul(gate, up, ON_GPU: tl.constexpr):
    """round(round(silu(gate)) * up) for operands of one dtype."""
    x = gate.to(tl.float32)
    if not ON_GPU:  # the interpreter has no libdevice
        silu = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif gate.dtype.primitive_bitwidth == 16:
        silu = libdevice.fast_dividef(x, 1.0 + tl.exp2(x * -LOG2_E))
    else:
        silu = tl.div_rn(x, 1.0 + libdevice.exp(-x))
    silu = silu.to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["T"])
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, T, gate_stride, up_stride,
    F: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    feature = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = feature < F
    gate = tl.load(gate_ptr + t * gate_stride + feature, mask=inside, other=0.0)
    up = tl.load(up_ptr + t * up_stride + feature, mask=inside, other=0.0)
    tl.store(out_ptr + t * F + feature, silu_mul(gate, up, ON_GPU), mask=inside)


def silu_mul_cuda(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu_mul of gate and up [..., F], contiguous, in their dtype."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    F = gate.shape[-1]
    gate, up = _rows(gate), _rows(up)
    block = min(2048 if out.numel() >= 1 << 20 else 512, max(128, next_power_of_2(F)))
    launcher(_silu_mul_kernel)[(gate.shape[0] * cdiv(F, block),)](
        gate, up, out, gate.shape[0], gate.stride(0), up.stride(0),
        F=F, BLOCK=block, ON_GPU=gate.is_cuda, num_warps=max(1, min(4, block // 256)), enable_fp_fusion=False,
        **launch_options(gate.device),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """View [..., F] as [T, F] of unit last stride; copy only if the strides require it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
