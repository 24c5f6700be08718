"""AdamW: torch's optimizer with bits that follow each element alone, however parameters are sharded."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detcompile.errors import InvalidInput
from detcompile.templates.training.pointwise import AdamWStep, adamw

__all__ = ["AdamW", "local_part"]


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019) over float32 parameters, plain or sharded by ``fully_shard``.

    torch's ``fused=True`` has other bits in the last elements of a tensor on a CPU, so that they depend on the shards.

    Args:
        params: parameters, or groups of them, as torch.optim.AdamW takes them.
        lr: learning rate.
        betas: decays of the averages of gradients and of their squares.
        eps: what is added to the root of the second average.
        weight_decay: decay of the parameters, times ``lr``.
        compute_copies: bfloat16 tensors by parameter, each contiguous and of the shape of what this process holds of
            it, which get its new value rounded in the same pass.

    Raises:
        InvalidInput: a number out of its range, or, in ``step``, a parameter or gradient that is not float32, dense and
            contiguous.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compute_copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.compute_copies = dict(compute_copies or {})
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_numbers(group)
        for parameter, copy in self.compute_copies.items():
            own = local_part(parameter)
            if copy.dtype != torch.bfloat16 or copy.shape != own.shape or not copy.is_contiguous():
                raise InvalidInput(
                    f"AdamW: a compute copy must be contiguous bfloat16 {tuple(own.shape)}, not {copy.dtype} "
                    f"{tuple(copy.shape)}. Make it with torch.empty_like(parameter, dtype=torch.bfloat16)."
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step over the parameters that have a gradient; returns what ``closure`` does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_numbers(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        kept = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        p, g, m, v = (local_part(tensor) for tensor in kept)
        for what, tensor in (("parameter", p), ("gradient", g)):
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided or tensor.shape != p.shape:
                raise InvalidInput(
                    f"AdamW: a {what} is {tensor.dtype} {tuple(tensor.shape)}, where float32 {tuple(p.shape)} is "
                    "updated. Keep float32 parameters, and pass their rounded values as compute_copies."
                )
        if not p.is_contiguous():
            raise InvalidInput(f"AdamW: a parameter {tuple(p.shape)} is not contiguous. Make it so with contiguous().")
        step = AdamWStep(
            lr=float(group["lr"]), betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            step=int(state["step"]),
        )  # fmt: skip
        adamw(p, g.contiguous(), m, v, self.compute_copies.get(parameter), step)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_numbers(group: Mapping[str, Any]) -> None:
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if lr < 0 or eps < 0 or decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise InvalidInput(
            f"AdamW: lr={lr}, betas={betas}, eps={eps}, weight_decay={decay}: none may be negative, and betas are "
            "below 1."
        )
