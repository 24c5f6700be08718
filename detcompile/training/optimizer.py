"""AdamW: torch's optimizer, elementwise to the bit, so results do not depend on how parameters are sharded."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from detcompile.errors import InvalidInput
from detcompile.templates.training.pointwise import AdamWStep, adamw

OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019) over float32 parameters, plain or sharded by ``fully_shard``.

    torch's ``fused=True`` gives other bits in a tensor's last elements on a CPU, so they would depend on the shards.

    Args:
        params: parameters, or groups of them, as in torch.optim.AdamW.
        lr: learning rate.
        betas: decays of the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: decay of the parameters, multiplied by ``lr``.
        compute_copies: bfloat16 tensors by parameter, contiguous and with the shape of this process's part of it;
            each receives the new value, rounded, in the same pass.

    Raises:
        InvalidInput: a number is out of range or an option of torch's is not supported; or, in ``step``, a parameter,
            gradient, average or copy is not dense and contiguous, or has the wrong dtype or shape.
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
        for group in state["param_groups"]:  # also when a state dict is loaded
            _check_options(group)
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient; return the result of ``closure``, if there is one."""
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
                    f"AdamW: a {what} is {tensor.dtype} {tuple(tensor.shape)}, but must be float32 {tuple(p.shape)}. "
                    "Keep float32 parameters, and pass their rounded values as compute_copies."
                )
        if not p.is_contiguous():
            raise InvalidInput(f"AdamW: a parameter {tuple(p.shape)} is not contiguous. Call contiguous() on it.")
        if g.device != p.device:
            raise InvalidInput(f"AdamW: a gradient is on {g.device}, its parameter on {p.device}. Move one of them.")
        m, v = self._averages(parameter)
        state, copy = self.state[parameter], self.compute_copies.get(parameter)
        if copy is not None:
            _check_copy(p, copy)
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32) + 1  # bfloat16 could not count past 256
        step = AdamWStep(
            lr=float(group["lr"]), betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            step=int(state["step"]),
        )  # fmt: skip
        adamw(p, g.resolve_neg().contiguous(), m, v, copy, step)
        torch.autograd.graph.increment_version([parameter, *([] if copy is None else [copy])])

    def _averages(self, parameter: Tensor) -> list[Tensor]:
        """Return this process's part of a parameter's two averages, checked because a kernel will write them."""
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
                    f"AdamW: an average of gradients is {held.dtype} {tuple(held.shape)} on {held.device}, but must be "
                    f"contiguous float32 {tuple(p.shape)} on {p.device}. Load the state of an optimizer over the same "
                    "parameters in the same order."
                )
        return averages


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_copy(part: Tensor, copy: Tensor) -> None:
    fits = (copy.dtype, copy.shape, copy.device) == (torch.bfloat16, part.shape, part.device)
    if not fits or not copy.is_contiguous():
        raise InvalidInput(
            f"AdamW: a compute copy must be contiguous bfloat16 {tuple(part.shape)} on {part.device}, not {copy.dtype} "
            f"{tuple(copy.shape)} on {copy.device}. Use torch.empty_like(parameter, dtype=torch.bfloat16)."
        )


def _check_options(group: Mapping[str, Any]) -> None:
    """Reject numbers out of range, and torch options that are not supported."""
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    try:
        fits = all(0 <= number < math.inf for number in (lr, eps, decay)) and all(0 <= beta < 1 for beta in betas)
        fits = fits and len(betas) == 2
    except (TypeError, RuntimeError):  # not a number, or a tensor with several elements
        fits = False
    if not fits:
        raise InvalidInput(
            f"AdamW: lr={lr}, betas={betas}, eps={eps}, weight_decay={decay}: all must be finite and not negative, and "
            "betas must be two numbers below 1."
        )
    for name, served in OPTIONS.items():
        if bool(group.get(name, served)) != served:
            raise InvalidInput(f"AdamW: torch's option {name}={group[name]} is not supported. Leave it {served}.")
