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

__all__ = ["gated_matmul_cpu", "reference_gated_matmul", "reference_silu_mul", "silu_mul_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define("silu_mul(Tensor gate, Tensor up) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))
_LIBRARY.define("gated_matmul(Tensor x, Tensor w) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    """The op on the CPU, gate and up [..., F] -> [..., F], contiguous.

    Raises:
        InvalidInput: shapes or dtypes that differ.
    """
    _check(gate, up)
    g = gate.float()
    return ((g / (1 + g.neg().exp())).to(gate.dtype) * up).contiguous()


def gated_matmul_cpu(x: Tensor, w: Tensor) -> Tensor:
    """The op on the CPU.

    Raises:
        InvalidInput: shapes or dtypes that do not fit together.
    """
    _check_product(x, w)
    return silu_mul_cpu(*matmul_cpu(x, w, None, None, ()).chunk(2, dim=1))


def _gated_matmul_cuda(x: Tensor, w: Tensor) -> Tensor:
    _check_product(x, w)
    return gated_matmul_cuda(x, w)


def _silu_mul_cuda(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return silu_mul_cuda(gate, up)


_LIBRARY.impl("silu_mul", silu_mul_cpu, "CPU")
_LIBRARY.impl("silu_mul", _silu_mul_cuda, "CUDA")
_LIBRARY.impl("gated_matmul", gated_matmul_cpu, "CPU")
_LIBRARY.impl("gated_matmul", _gated_matmul_cuda, "CUDA")


@torch.library.register_fake("detcompile::silu_mul", lib=_LIBRARY)
def _(gate, up):
    return gate.new_empty(gate.shape)


@torch.library.register_fake("detcompile::gated_matmul", lib=_LIBRARY)
def _(x, w):
    return x.new_empty((x.shape[0], w.shape[0] // 2))


def reference_gated_matmul(x: Tensor, w: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return reference_silu_mul(*reference_matmul(x, w).chunk(2, dim=1))


def reference_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() == 0:
        raise InvalidInput(
            f"detcompile::silu_mul: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be "
            "[..., F] of one shape and dtype. Convert or expand one."
        )


def _check_product(x: Tensor, w: Tensor) -> None:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or w.shape[0] % 2 or x.dtype != w.dtype:
        raise InvalidInput(
            f"detcompile::gated_matmul: x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} must be [M, K] "
            "and [2 F, K] of one dtype. Flatten the leading dimensions of x; put the gate's weights before up's."
        )
