"""silu_mul: out = round(round(g / (1 + e^-g)) * u), g = float32(gate): the gate of an MLP, elementwise.

Each round is to the dtype of gate and up, which is out's; product, sum and quotient are float32's, the quotient IEEE's.
On a GPU the exponential is CUDA's expf, as in a kernel that Inductor makes of these operations: the bits are the same.
Leading dims are any; rows may be strided.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.gates_triton import silu_mul_cuda

__all__ = ["reference_silu_mul", "silu_mul_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define("silu_mul(Tensor gate, Tensor up) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))


def silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    """The op on the CPU, gate and up [..., F] -> [..., F], contiguous.

    Raises:
        InvalidInput: shapes or dtypes that differ.
    """
    _check(gate, up)
    g = gate.float()
    return ((g / (1 + g.neg().exp())).to(gate.dtype) * up).contiguous()


def _silu_mul_cuda(gate: Tensor, up: Tensor) -> Tensor:
    _check(gate, up)
    return silu_mul_cuda(gate, up)


_LIBRARY.impl("silu_mul", silu_mul_cpu, "CPU")
_LIBRARY.impl("silu_mul", _silu_mul_cuda, "CUDA")


@torch.library.register_fake("detcompile::silu_mul", lib=_LIBRARY)
def _(gate, up):
    return gate.new_empty(gate.shape)


def reference_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() == 0:
        raise InvalidInput(
            f"detcompile::silu_mul: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be "
            "[..., F] of one shape and dtype. Convert or expand one."
        )
