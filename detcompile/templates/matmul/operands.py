"""Operands of a GEMM launch and its output, in strides that the kernels support.

Legend: M tokens, N output features, K summed features.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from detcompile.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Operands:
    """What a launch reads and where its result goes."""

    x: Tensor  # [M, K]
    w: Tensor  # [N, K], unit stride along one of them
    bias: Tensor | None  # [N]
    residual: Tensor | None  # [M, N], unit stride along N
    out: Tensor  # [M, N] contiguous
    radices: tuple[int, ...]

    @property
    def leaf_k(self) -> int:
        """K per leaf of the tree."""
        return self.x.shape[1] // math.prod(self.radices)

    @property
    def epilogue(self) -> tuple[Tensor, Tensor, Tensor]:
        """out, bias and residual as kernel arguments; out is a placeholder for absent ones."""
        out = self.out
        return out, out if self.bias is None else self.bias, out if self.residual is None else self.residual

    @property
    def residual_stride(self) -> int:
        """Elements from one row of the residual to the next; 0 without a residual."""
        return 0 if self.residual is None else self.residual.stride(0)

    @property
    def are_gated(self) -> bool:
        """True if out has half the features: see ``gpu.run_gated``."""
        return self.bias is None and self.residual is None and 2 * self.out.shape[1] == len(self.w)


def operands_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Operands:
    """Return the operands x [M, K], w [N, K], bias [N] and residual [M, N]; copy those with unsupported strides.

    Raises:
        InvalidInput: weights of 2^31 elements or more that are contiguous along N.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if 1 not in w.stride():
        w = w.contiguous()
    if w.stride(1) != 1 and w.numel() >= 2**31:  # kernels use 32-bit offsets along K
        raise InvalidInput(
            f"matmul on the GPU: weights [{w.shape[0]}, {w.shape[1]}] contiguous along N exceed 2^31 elements: store"
            " them contiguous along K"
        )
    if bias is not None:
        bias = bias.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    radices = tuple(radix for radix in radices if radix > 1)
    if out is None:
        out = x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
    return Operands(x, w, bias, residual, out, radices)
