"""clip_grad_norm_: the norm of all gradients as an exact sum over rows, so sharding changes no bit of it.

A row is one index of a gradient's first dimension, which fully_shard never splits. Its squares are rounded to float32
and added in Row order. Row sums are split into four 32-bit integers, rounded down to a multiple of 2^-96; integer sums
in 64 bits do not depend on the order.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import kind, number, shown
from detcompile.templates.rows.sums import row_square_sum
from detcompile.training.optimizer import local_part

_LIMBS, _BITS = 4, 32
_MOST = 2.0**31  # per row: 2^32 rows add up in 64 bits


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of ``parameters`` in place so that their total norm is at most ``max_norm``.

    Gradients are float32, plain or sharded by ``fully_shard``; ranks that share them must all call this. A parameter
    that is given twice counts once; a gradient that several parameters share is scaled once.

    Returns:
        The norm before scaling, a float64 scalar: infinite if a row is, or if a row's squares exceed 2^31; NaN if a row
        has a NaN.

    Raises:
        InvalidInput: max_norm is not positive, something given is not a tensor, or a gradient is not float32, not dense
            or not split into rows.
    """
    max_norm = number(max_norm, "clip_grad_norm_: max_norm")
    if max_norm <= 0:
        raise InvalidInput(f"clip_grad_norm_: max_norm={max_norm} must be positive.")
    gradients = [parameter.grad for parameter in _each_once(parameters) if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    norm = _norm(gradients)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    parts = {(part.data_ptr(), part.shape, part.stride()): part for part in map(local_part, gradients)}
    torch._foreach_mul_(list(parts.values()), factor)
    return norm


def _each_once(parameters: Any) -> list[Tensor]:
    """Return the given tensors without repetitions."""
    given = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else [*parameters]
    for one in given:
        if not isinstance(one, Tensor):
            raise InvalidInput(
                f"clip_grad_norm_: {shown(one)} is {kind(one)}: give tensors, such as module.parameters()"
            )
    return list(dict.fromkeys(given))


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm in float64: sums of integers over each group of ranks that share rows, then over all groups.

    The row sums of all gradients are split into integers together: many small launches would take the host longer than
    the sums.
    """
    of_group: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        of_group[_group_of(gradient)].append(_row_sums(local_part(gradient)))
    totals = []
    for group, sums in of_group.items():
        total = _limbs(torch.cat(sums))
        if group is not None:
            dist.all_reduce(total, group=group)
        totals.append(total)
    *limbs_, large, nan = torch.stack([total.to(totals[0].device) for total in totals]).sum(0).unbind()
    square = torch.zeros((), dtype=torch.float64, device=nan.device)
    for place in reversed(range(_LIMBS)):
        square = square + limbs_[place].double() * 2.0 ** (-_BITS * place)
    norm = square.sqrt().where(large == 0, torch.inf)
    return norm.where(nan == 0, torch.nan)


def _row_sums(gradient: Tensor) -> Tensor:
    """Return each row's sum of squares: [rows] float32."""
    if gradient.dtype != torch.float32:
        raise InvalidInput(f"clip_grad_norm_: a gradient is {gradient.dtype}, not float32. Train float32 parameters.")
    is_plain = gradient.layout is torch.strided and not gradient.is_neg()
    if not is_plain or any(size > 1 and not step for size, step in zip(gradient.shape, gradient.stride(), strict=True)):
        raise InvalidInput(
            "clip_grad_norm_: a gradient is sparse, expanded or a negated view. Assign a dense copy of it to .grad."
        )
    if not gradient.numel():
        return gradient.new_empty(0)
    return row_square_sum(gradient.reshape(len(gradient) if gradient.dim() else 1, -1))


def _limbs(row_sums: Tensor) -> Tensor:
    """Return [6] int64: four limbs of the total of the rows' squares, and the counts of too large and of NaN rows."""
    sums = row_sums.double()
    nan, large = sums.isnan(), sums > _MOST
    rest, limbs = sums.where(~(nan | large), 0.0), []
    for place in range(_LIMBS):
        limb = (rest * 2.0 ** (_BITS * place)).floor()
        rest = rest - limb * 2.0 ** (-_BITS * place)
        limbs.append(limb.long().sum())
    return torch.stack([*limbs, large.sum(), nan.sum()])


def _group_of(gradient: Tensor) -> Any:
    """Return the ranks that hold a gradient's other rows; None if this rank has all rows."""
    if not isinstance(gradient, DTensor):
        return None
    sharded = [dim for dim, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
    if len(sharded) > 1 or any(gradient.placements[dim] != Shard(0) for dim in sharded):
        raise InvalidInput(
            f"clip_grad_norm_: a gradient is placed as {gradient.placements}; only whole rows over one mesh dimension "
            "are supported, as placed by fully_shard."
        )
    return gradient.device_mesh.get_group(sharded[0]) if sharded else None
