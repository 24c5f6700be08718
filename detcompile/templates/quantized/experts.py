"""dequant_expert_matmul: expert_matmul of templates/experts/op.py with the experts' weights dequantized on the fly.

Legend: T tokens, C experts chosen by each, E experts, N output features, K input features.

    w    = dequantized(weight, x.dtype).view(E, N, K)      the experts' features are those of one weight, in order
    out  = expert_matmul(x, ids, w, bias, radices)
    dequant_expert_matmul_partial(...) -> float32: one rank's subtree of Tree(K, ...), without a bias

The bytes equal those of the two operations in sequence. A CPU dequantizes an expert at a time, of those that the step
uses. A GPU dequantizes all experts of the layer into memory, which it frees afterwards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.experts.gpu import expert_matmul_cuda
from detcompile.templates.experts.op import require_expert_ids, require_expert_rows
from detcompile.templates.matmul.op import matmul_cpu
from detcompile.templates.quantized.gpu import expanded
from detcompile.templates.quantized.op import PART_OPERANDS, PARTS, dequantized_cpu
from detcompile.templates.quantized.weights import QuantizedWeight, require_quantized
from detcompile.templates.registration import define


def dequant_expert_matmul(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    mins: Tensor | None,
    bias: Tensor | None,
    group: int,
    rows: int,
    radices: Sequence[int] | None,
    num_experts: int,
    out_dtype: torch.dtype | None = None,
    isa: str | None = None,
) -> Tensor:
    """Run the op on any device.

    x [T, K] or [T, C, K], ids [T, C], a weight [E * N, K] of weights.py, bias [E, N] -> [T, C, N] in out_dtype
    (default x.dtype). The id E means no expert, as in expert_matmul.

    Raises:
        InvalidInput: the parts of the weight, the rows of x or the ids do not match.
        NumericsError: K does not split into prod(radices) leaves.
    """
    radices = tuple(radices or ())
    weight = QuantizedWeight(w, scales, zeros, mins, x.shape[-1], group, rows)
    require_quantized(weight)
    require_expert_rows(x, ids, radices)
    if len(w) % num_experts:
        raise InvalidInput(
            f"detcompile::dequant_expert_matmul: w {tuple(w.shape)} must have as many features of each of {num_experts}"
            " experts. Join them in order."
        )
    N = len(w) // num_experts
    if bias is not None and bias.shape != (num_experts, N):
        raise InvalidInput(
            f"detcompile::dequant_expert_matmul: bias {tuple(bias.shape)} must be {(num_experts, N)}. Transpose it."
        )
    if x.is_cuda:
        return expert_matmul_cuda(x, ids, expanded(weight, x.dtype).view(num_experts, N, -1), bias, radices, out_dtype)
    require_expert_ids(ids, num_experts)
    flat, x_rows = ids.flatten(), x.flatten(0, -2)
    choices = max(1, len(flat) // max(1, len(x_rows)))
    out = x.new_zeros((len(flat), N), dtype=out_dtype or x.dtype)
    for expert in flat[flat < num_experts].unique().tolist():
        chosen = (flat == expert).nonzero().flatten()
        tile = dequantized_cpu(weight, x.dtype, expert * N, N, isa)
        added = None if bias is None else bias[expert]
        out[chosen] = matmul_cpu(x_rows[chosen // choices], tile, added, None, radices, out_dtype, isa=isa)
    return out.view(*ids.shape, N)


def _partial(x, ids, w, scales, zeros, mins, group, rows, radices, num_experts, tp):
    parts = (x, ids, w, scales, zeros, mins, None, group, rows, radices, num_experts)
    return dequant_expert_matmul(*parts, torch.float32)


def _fake(x: Tensor, ids: Tensor, w: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*ids.shape, w.shape[0] // num_experts), dtype=dtype)


_OPERANDS: dict[str, str | range] = {
    "x": "float * K",
    "ids": "int64 ...",
    "w": "quantized M W",
    **PART_OPERANDS,
    "num_experts": range(1, 2**31),
}
define(
    f"dequant_expert_matmul(Tensor x, Tensor ids, {PARTS}, Tensor? bias, int group, int rows, int[] radices, "
    "int num_experts) -> Tensor",
    _OPERANDS | {"bias": "float E N"},
    cpu=dequant_expert_matmul,
    cuda=dequant_expert_matmul,
    fake=lambda x, ids, w, *rest: _fake(x, ids, w, rest[-1], x.dtype),
)
define(
    f"dequant_expert_matmul_partial(Tensor x, Tensor ids, {PARTS}, int group, int rows, int[] radices, "
    "int num_experts, int tp) -> Tensor",
    _OPERANDS | {"tp": range(1, 2**31)},
    cpu=_partial,
    cuda=_partial,
    fake=lambda x, ids, w, *rest: _fake(x, ids, w, rest[-2], torch.float32),
)
