"""silu_mul: out = round(round(g / (1 + e^-g)) * u), g = float32(gate): the gate of an MLP, elementwise.

Each round is to the dtype of gate and up, which is out's; product, sum and quotient are in float32. For float32 the
quotient is IEEE's, and on a GPU the exponential is CUDA's expf, as in Inductor's kernel for these operations: the bits
are the same. For 16 bits a GPU uses its approximations of 2^x and of the quotient, whose errors of a few units in 2^24
are small compared to the rounding, and flushes subnormal gates: in a product's epilogue every instruction counts.
Leading dims are arbitrary; rows may be strided.

gated_matmul(x [M, K], w [2 F, K]) = silu_mul(matmul(x, w[:F]), matmul(x, w[F:])), [M, F]: the same bytes, on a GPU in
one launch if that is faster, so that the gate's inputs are never written to memory.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.gpu import gated_matmul_cuda
from detcompile.templates.matmul.op import matmul_cpu, reference_matmul
from detcompile.templates.registration import define


def silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    """Run the op on the CPU, gate and up [..., F] -> [..., F], contiguous."""
    g = gate.float()
    return ((g / (1 + g.neg().exp())).to(gate.dtype) * up).contiguous()


def gated_matmul_cpu(x: Tensor, w: Tensor) -> Tensor:
    """Run the op on the CPU, x [M, K], w [2 F, K] -> [M, F]."""
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
    """Return the op's value in float64, unrounded."""
    return reference_silu_mul(*reference_matmul(x, w).chunk(2, dim=1))


def reference_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return the op's value in float64, unrounded."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def _require_halves(w: Tensor) -> None:
    if w.shape[0] % 2:
        raise InvalidInput(
            f"detcompile::gated_matmul: w {tuple(w.shape)} must be [2 F, K]: stack the gate's weights above up's."
        )
