"""AdamW's update, a policy's loss and a gradient's rounding: elementwise, so an element's place changes no bit.

    adamw:  m = m + (g - m) * (1 - beta1);  v = v * beta2 + g * g * (1 - beta2)
            p = p * (1 - lr * decay) - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
    policy: ratio = exp(logprob - old), and 1 where A is 0, so a token without weight may have any old logprob
            term = -min(ratio * A, min(max(ratio, low), high) * A) / denominator

All in float32, each operation rounded once (no FMA), with IEEE root and division, and constants rounded to float32
first. On a CPU the exponential is the templates', because torch's has other bits in a row's last elements.
"""

import ctypes
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.device.launcher import cdiv, launcher

_BLOCK = 1024
_WIDE_BLOCK = 4096  # for a kernel that returns a number per block


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """The hyperparameters of one step.

    Attributes:
        lr: learning rate.
        betas: decays of the averages of gradients and of their squares.
        eps: added to the root.
        weight_decay: decay of the parameter, multiplied by lr.
        step: number of steps, including this one.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int

    @property
    def scalars(self) -> tuple[float, ...]:
        """Return the constants in the kernels' order."""
        beta1, beta2 = self.betas
        of_average, of_root = self.lr / (1 - beta1**self.step), math.sqrt(1 - beta2**self.step)
        return 1 - self.lr * self.weight_decay, 1 - beta1, beta2, 1 - beta2, of_average, of_root, self.eps


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, count, keep, weight1, beta2, weight2, rate, root, eps,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    g, p = tl.load(g_ptr + i, mask=ok, other=0.0), tl.load(p_ptr + i, mask=ok, other=0.0)
    m, v = tl.load(m_ptr + i, mask=ok, other=0.0), tl.load(v_ptr + i, mask=ok, other=0.0)
    m = m + (g - m) * weight1
    v = v * beta2 + (g * g) * weight2
    divisor = tl.div_rn(tl.sqrt_rn(v), tl.zeros((BLOCK,), tl.float32) + root) + eps
    p = p * keep - rate * tl.div_rn(m, divisor)
    tl.store(m_ptr + i, m, mask=ok)
    tl.store(v_ptr + i, v, mask=ok)
    tl.store(p_ptr + i, p, mask=ok)
    if HAS_COPY:
        tl.store(copy_ptr + i, p.to(tl.bfloat16), mask=ok)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, step: AdamWStep) -> None:
    """Update p, m and v, float32 and contiguous, by g, in place; ``copy``, bfloat16, receives the new p, rounded."""
    if not p.numel():
        return
    if p.device.type == "cpu":
        cpu_library.library().detcompile_adamw(
            p, g, m, v, copy, (ctypes.c_float * 7)(*step.scalars), p.numel(), cpu_library.thread_count()
        )
        return
    adamw_cuda(p, g, m, v, copy, step)


def adamw_cuda(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, step: AdamWStep) -> None:
    """Run ``adamw`` on the GPU."""
    launcher(adamw_kernel)[(cdiv(p.numel(), _BLOCK),)](
        p, g, m, v, p if copy is None else copy, p.numel(), *step.scalars, HAS_COPY=copy is not None, BLOCK=_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def rounding_kernel(exact_ptr, out_ptr, largest_ptr, count, BLOCK: tl.constexpr):
    """Round float64 to float32, and store the largest magnitude of each block. NaN is above all numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exact = tl.load(exact_ptr + i, mask=i < count, other=0.0)
    tl.store(out_ptr + i, exact.to(tl.float32), mask=i < count)
    bits = exact.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF  # ordered like the magnitudes
    tl.store(largest_ptr + tl.program_id(0), tl.max(bits, 0).to(tl.float64, bitcast=True))


def rounded_gradient(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return a contiguous float64 tensor rounded to float32, and float64 values with the same largest magnitude."""
    if exact.device.type == "cpu":
        return exact.float(), exact
    return rounded_gradient_cuda(exact)


def rounded_gradient_cuda(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``rounded_gradient`` on the GPU, in one pass."""
    blocks = cdiv(exact.numel(), _WIDE_BLOCK)
    out = torch.empty(exact.shape, dtype=torch.float32, device=exact.device)
    largest = torch.empty(blocks, dtype=torch.float64, device=exact.device)
    launcher(rounding_kernel)[(blocks,)](exact, out, largest, exact.numel(), BLOCK=_WIDE_BLOCK, num_warps=8)
    return out, largest


def policy_terms(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float, denominator: float
) -> tuple[Tensor, Tensor]:
    """Return the loss's terms and their derivatives by the logprobs, of contiguous float32 tensors of one shape."""
    if logprobs.device.type == "cpu":
        terms, slopes = torch.empty_like(logprobs), torch.empty_like(logprobs)
        cpu_library.library().detcompile_policy_loss(
            logprobs, old, advantages, terms, slopes, (ctypes.c_float * 3)(low, high, denominator), logprobs.numel(),
            cpu_library.thread_count(),
        )  # fmt: skip
        return terms, slopes
    return policy_terms_cuda(logprobs, old, advantages, low=low, high=high, denominator=denominator)


def policy_terms_cuda(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float, denominator: float
) -> tuple[Tensor, Tensor]:
    """Run ``policy_terms`` on the GPU."""
    ratio = torch.exp(logprobs - old).masked_fill(advantages == 0, 1.0)
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    is_clipped = clipped < plain
    divisor = logprobs.new_full((), denominator)  # a scalar would become a product with its reciprocal
    return -torch.where(is_clipped, clipped, plain) / divisor, torch.where(is_clipped, 0.0, -plain) / divisor
