"""silu_mul: out = round(round(g / (1 + e^-g)) * u), g = float32(gate): the gate of an MLP, elementwise.

Each round is to the dtype of gate and up, which is out's; product, sum and quotient are float32's. For float32 the
quotient is IEEE's, and on a GPU the exponential CUDA's expf, as in a kernel that Inductor makes of these operations:
the bits are the same. For 16 bits a GPU takes its own approximations of 2^x and of the quotient, whose errors of a
few units in 2^24 are small beside the rounding, and counts subnormal gates as zeros: in the epilogue of a product
every instruction shows.
Leading dims are any; rows may be strided.

gated_matmul(x [M, K], w [2 F, K]) = silu_mul(matmul(x, w[:F]), matmul(x, w[F:])), [M, F]: the same bytes, on a GPU in
one launch where that is sooner, so that what the gate reads is never written.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.gpu import gated_matmul_cuda
from detcompile.templates.matmul.op import matmul_cpu, reference_matmul
from detcompile.templates.registration import define

__all__ = ["gated_matmul_cpu", "reference_gated_matmul", "reference_silu_mul", "silu_mul_cpu"]


def silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    """The op on the CPU, gate and up [..., F] -> [..., F], contiguous."""
    g = gate.float()
    return ((g / (1 + g.neg().exp())).to(gate.dtype) * up).contiguous()


def gated_matmul_cpu(x: Tensor, w: Tensor) -> Tensor:
    """The op on the CPU."""
    _require_halves(w)
    return silu_mul_cpu(*matmul_cpu(x, w, None, None, ()).chunk(2, dim=1))


def _gated_matmul_cuda(x: Tensor, w: Tensor) -> Tensor:
    _require_halves(w)
    return gated_matmul_cuda(x, w)


define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    {"gate": "float ... F", "up": "gate ... F"},
    cpu=silu_mul_cpu,
    cuda=silu_mul_cuda,
    fake=lambda gate, up: gate.new_empty(gate.shape),
    tags=(torch.Tag.pointwise,),
)
define(
    "gated_matmul(Tensor x, Tensor w) -> Tensor",
    {"x": "float M K", "w": "x F K"},
    cpu=gated_matmul_cpu,
    cuda=_gated_matmul_cuda,
    fake=lambda x, w: x.new_empty((x.shape[0], w.shape[0] // 2)),
)


def reference_gated_matmul(x: Tensor, w: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return reference_silu_mul(*reference_matmul(x, w).chunk(2, dim=1))


def reference_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def _require_halves(w: Tensor) -> None:
    if w.shape[0] % 2:
        raise InvalidInput(
            f"detcompile::gated_matmul: w {tuple(w.shape)} must be [2 F, K]: put the gate's weights before up's."
        )
