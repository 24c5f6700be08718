"""exact_linear and its relatives: quantized rows times a quantized weight in exact integers; see docs/exact.md.

Legend: M tokens, N output features, K input features, D digits of the weight, E experts, C experts chosen by a token.

    q, s = exact_quantize(x, x_digits, left)
    T    = the exact integers of q [x_digits, M, K] and w [D, N, K], without low digits times low digits
    out  = (float32(T) * s) * w_scale + bias        each operation rounded once

exact_fused_linear adds operations before and after the product. Each is optional:

    x    = exact_function(x, function) * up
    x    = exact_rms_norm(x, norm, eps)
    out  = residual + exact_linear(x, w, w_scale, bias)
    out  = exact_function(out, "bf16")                     if rounded

exact_expert_linear multiplies each row by its expert's weight. The id E means no expert: the result row is zeros.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.exact.gpu import RowFunction, expert_cuda, function_cuda, linear_cuda
from detcompile.templates.exact.rows import function_cpu, require_function, require_length, rms_norm_cpu
from detcompile.templates.experts.op import require_expert_ids, require_expert_rows
from detcompile.templates.registration import define


def linear_cpu(
    x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU: x [M, K], w [D, N, K], w_scale [N], bias [N] -> [M, N]."""
    check_digits("exact_linear", w, x_digits)
    x = x.contiguous()
    D, N, K = w.shape
    out = torch.empty((len(x), N), dtype=torch.float32, device="cpu")
    cpu_library.library(isa).detcompile_exact_linear(
        x.data_ptr(), w.data_ptr(), w_scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        None, None, len(x), N, K, x_digits, D, cpu_library.thread_count(),
    )  # fmt: skip
    return out


def fused_linear_cpu(
    x: Tensor,
    before: RowFunction,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rounded: bool,
    x_digits: int,
) -> Tensor:
    """Run the op on the CPU: x [M, K], residual [M, N], the others as in ``linear_cpu``."""
    if before.up is not None:
        x = function_cpu(x, before.function) * before.up
    if before.norm is not None:
        x = rms_norm_cpu(x, before.norm, before.eps)
    out = linear_cpu(x, w, w_scale, bias, x_digits)
    out = out if residual is None else residual + out
    return function_cpu(out, "bf16") if rounded else out


def totals_cpu(x: Tensor, peaks: Tensor, w: Tensor, x_digits: int, isa: str | None = None) -> Tensor:
    """Return the exact integers T of a part of K: x [M, K], w [D, N, K] -> int64 [M, N].

    Args:
        peaks: int32 [M], the largest magnitude of each whole row as bits.
    """
    x, peaks = x.contiguous(), peaks.contiguous()
    D, N, K = w.shape
    totals = torch.empty((len(x), N), dtype=torch.int64, device="cpu")
    cpu_library.library(isa).detcompile_exact_linear(
        x.data_ptr(), w.data_ptr(), None, None, None, peaks.data_ptr(), totals.data_ptr(),
        len(x), N, K, x_digits, D, cpu_library.thread_count(),
    )  # fmt: skip
    return totals


def expert_linear_cpu(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_digits: int,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU: w [D, E, N, K], w_scale and bias [E, N] -> [*ids.shape, N].

    x [M, K] or [*ids.shape, K], ids [M, C] or [M] int64.

    Raises:
        InvalidInput: x's rows do not match the ids, or an id is outside [0, E].
    """
    check_digits("exact_expert_linear", w, x_digits)
    rows = x.flatten(0, -2)

    def multiply(chosen: Tensor, expert: int) -> Tensor:
        parts = w[:, expert].contiguous(), w_scale[expert], None if bias is None else bias[expert]
        return linear_cpu(rows[chosen], *parts, x_digits, isa)

    return _by_expert(x, ids, w, torch.float32, multiply)


def expert_totals_cpu(
    x: Tensor, peaks: Tensor, ids: Tensor, w: Tensor, x_digits: int, isa: str | None = None
) -> Tensor:
    """Return the exact integers T of a part of K, int64 [*ids.shape, N]; operands as in ``expert_linear_cpu``.

    Args:
        peaks: int32 [M], the largest magnitude of each whole row of x as bits.

    Raises:
        InvalidInput: as ``expert_linear_cpu``.
    """
    rows = x.flatten(0, -2)

    def multiply(chosen: Tensor, expert: int) -> Tensor:
        return totals_cpu(rows[chosen], peaks[chosen], w[:, expert].contiguous(), x_digits, isa)

    return _by_expert(x, ids, w, torch.int64, multiply)


def _by_expert(
    x: Tensor, ids: Tensor, w: Tensor, dtype: torch.dtype, multiply: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the products [*ids.shape, N] of rows with their experts; multiply(rows, expert) computes one expert's."""
    require_expert_rows(x, ids, ())
    require_expert_ids(ids, w.shape[1])
    flat, num_rows = ids.flatten(), x.shape[:-1].numel()
    share = max(1, len(flat) // max(1, num_rows))
    out = torch.zeros((len(flat), w.shape[2]), dtype=dtype, device="cpu")
    for expert in flat[flat < w.shape[1]].unique().tolist():
        (chosen,) = torch.where(flat == expert)
        out[chosen] = multiply(chosen // share, expert)
    return out.view(*ids.shape, w.shape[2])


def _expert_linear_cuda(
    x: Tensor, ids: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int
) -> Tensor:
    check_digits("exact_expert_linear", w, x_digits)
    require_expert_rows(x, ids, ())
    out = expert_cuda(x.flatten(0, -2), ids.flatten(), w, w_scale, bias, x_digits)
    return out.view(*ids.shape, w.shape[2])


def _linear_cuda(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, x_digits: int) -> Tensor:
    check_digits("exact_linear", w, x_digits)
    return linear_cuda(x, w, w_scale, bias, x_digits)


def _fused_linear_cuda(
    x: Tensor,
    before: RowFunction,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rounded: bool,
    x_digits: int,
) -> Tensor:
    check_digits("exact_fused_linear", w, x_digits)
    if before.up is not None:
        require_function(before.function)
    if before.norm is not None:
        require_length(x)
    out = linear_cuda(x, w, w_scale, bias, x_digits, before, residual, rounded)
    return function_cuda(out, "bf16") if rounded and residual is None else out


def _flat(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a function that takes a RowFunction to the operation's flat arguments."""
    return lambda x, up, function, norm, eps, *rest: multiply(x, RowFunction(up, function, norm, eps), *rest)


def check_digits(op: str, w: Tensor, x_digits: int) -> None:
    """Raise InvalidInput if the weight has more digits than x, or none."""
    if not 1 <= len(w) <= x_digits:
        raise InvalidInput(
            f"detcompile::{op}: w has {len(w)} digits; with x_digits={x_digits} it must have 1 to {x_digits}"
        )


define(
    "exact_linear(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, int x_digits) -> Tensor",
    {
        "x": "float32 M K>0",
        "w": "contiguous int8 D N K",
        "w_scale": "contiguous float32 N",
        "bias": "contiguous float32 N",
        "x_digits": range(1, 3),
    },
    cpu=linear_cpu,
    cuda=_linear_cuda,
    fake=lambda x, w, w_scale, bias, x_digits: x.new_empty((x.shape[0], w.shape[1])),
)
define(
    "exact_fused_linear(Tensor x, Tensor? up, str function, Tensor? norm, float eps, Tensor w, Tensor w_scale,"
    " Tensor? bias, Tensor? residual, bool rounded, int x_digits) -> Tensor",
    {
        "x": "unit float32 M K>0",
        "up": "unit float32 M K",
        "norm": "float32 K",
        "w": "contiguous int8 D N K",
        "w_scale": "contiguous float32 N",
        "bias": "contiguous float32 N",
        "residual": "float32 M N",
        "x_digits": range(1, 3),
    },
    cpu=_flat(fused_linear_cpu),
    cuda=_flat(_fused_linear_cuda),
    fake=lambda x, up, function, norm, eps, w, *rest: x.new_empty((x.shape[0], w.shape[1])),
)
define(
    "exact_expert_linear(Tensor x, Tensor ids, Tensor w, Tensor w_scale, Tensor? bias, int x_digits) -> Tensor",
    {
        "x": "float32 * K>0",
        "ids": "int64 ...",
        "w": "contiguous int8 D E N K",
        "w_scale": "contiguous float32 E N",
        "bias": "contiguous float32 E N",
        "x_digits": range(1, 3),
    },
    cpu=expert_linear_cpu,
    cuda=_expert_linear_cuda,
    fake=lambda x, ids, w, *rest: x.new_empty((*ids.shape, w.shape[2])),
)
