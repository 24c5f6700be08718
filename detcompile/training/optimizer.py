"""AdamW: torch's optimizer with bits that follow each element alone, however parameters are sharded."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detcompile.errors import InvalidInput
from detcompile.templates.training.pointwise import AdamWStep, adamw

__all__ = ["AdamW", "local_part"]

OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}


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
        InvalidInput: a number out of its range, an option of torch's that is not served, or, in ``step``, a parameter,
            gradient, average or copy that is not dense and contiguous, or has another dtype or shape.
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
            _check_options(group)
        for parameter, copy in self.compute_copies.items():
            _check_copy(local_part(parameter), copy)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"compute_copies": self.compute_copies}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # of a state dict that is loaded, too
            _check_options(group)
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step over the parameters that have a gradient; returns what ``closure`` does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_options(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        p, g = local_part(parameter), local_part(gradient)
        for what, tensor in (("parameter", p), ("gradient", g)):
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided or tensor.shape != p.shape:
                raise InvalidInput(
                    f"AdamW: a {what} is {tensor.dtype} {tuple(tensor.shape)}, where float32 {tuple(p.shape)} is "
                    "updated. Keep float32 parameters, and pass their rounded values as compute_copies."
                )
        if not p.is_contiguous():
            raise InvalidInput(f"AdamW: a parameter {tuple(p.shape)} is not contiguous. Make it so with contiguous().")
        if g.device != p.device:
            raise InvalidInput(f"AdamW: a gradient is on {g.device}, its parameter on {p.device}. Move one of them.")
        m, v = self._averages(parameter)
        state, copy = self.state[parameter], self.compute_copies.get(parameter)
        if copy is not None:
            _check_copy(p, copy)
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32) + 1  # bfloat16 would stay at 256
        step = AdamWStep(
            lr=float(group["lr"]), betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            step=int(state["step"]),
        )  # fmt: skip
        adamw(p, g.contiguous(), m, v, copy, step)
        torch.autograd.graph.increment_version([parameter, *([] if copy is None else [copy])])

    def _averages(self, parameter: Tensor) -> list[Tensor]:
        """What this process holds of a parameter's two averages, whose memory a kernel is about to write."""
        state, p = self.state[parameter], local_part(parameter)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if missing := [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in state]:
            raise InvalidInput(f"AdamW: the state of a parameter has no {', '.join(missing)}. Load a state of AdamW.")
        averages = [local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        for held in averages:
            if (held.dtype, held.shape, held.device) != (torch.float32, p.shape, p.device) or not held.is_contiguous():
                raise InvalidInput(
                    f"AdamW: an average of gradients is {held.dtype} {tuple(held.shape)} on {held.device}, where "
                    f"contiguous float32 {tuple(p.shape)} on {p.device} is updated. Load the state of an optimizer "
                    "over the same parameters in the same order."
                )
        return averages


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_copy(own: Tensor, copy: Tensor) -> None:
    fits = (copy.dtype, copy.shape, copy.device) == (torch.bfloat16, own.shape, own.device)
    if not fits or not copy.is_contiguous():
        raise InvalidInput(
            f"AdamW: a compute copy must be contiguous bfloat16 {tuple(own.shape)} on {own.device}, not {copy.dtype} "
            f"{tuple(copy.shape)} on {copy.device}. Make it with torch.empty_like(parameter, dtype=torch.bfloat16)."
        )


def _check_options(group: Mapping[str, Any]) -> None:
    """Refuse numbers out of their range, and options of torch's optimizers that this one does not have."""
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    try:
        fits = all(0 <= number < math.inf for number in (lr, eps, decay)) and all(0 <= beta < 1 for beta in betas)
        fits = fits and len(betas) == 2
    except (TypeError, RuntimeError):  # of what is no number, or of a tensor of several
        fits = False
    if not fits:
        raise InvalidInput(
            f"AdamW: lr={lr}, betas={betas}, eps={eps}, weight_decay={decay}: all must be finite numbers, "
            "none may be negative, and betas are below 1, two of them."
        )
    for name, served in OPTIONS.items():
        if bool(group.get(name, served)) != served:
            raise InvalidInput(f"AdamW: {name}={group[name]} of torch's optimizers is not served. Leave it {served}.")
