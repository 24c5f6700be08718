"""Row-parallel linears take the declared tree over K, at every tensor-parallel size including one."""

from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from detcompile.errors import NumericsError
from detcompile.numerics import Numerics, matmul_order

__all__ = ["RowParallelLinear", "pin_row_parallel", "row_parallel_patterns"]

# Plans of architectures for which transformers has none, in its notation.
OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt2": {"h.*.attn.c_proj": "rowwise", "h.*.mlp.c_proj": "rowwise"},
}


class RowParallelLinear(nn.Module):
    """A linear whose K is split over ranks: leaves of K summed by the declared tree, one rounding after the bias.

    forward(x [..., K]) -> [..., N] in x.dtype. Shares the parameters of the linear it replaces.
    """

    def __init__(self, linear: nn.Linear | Conv1D, radices: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_is_KN = isinstance(linear, Conv1D)
        self.radices = list(radices)

    def forward(self, x: Tensor) -> Tensor:
        w_NK = self.weight.t() if self.weight_is_KN else self.weight
        out = torch.ops.detcompile.matmul(x.flatten(0, -2), w_NK, self.bias, None, self.radices)
        return out.view(*x.shape[:-1], w_NK.shape[0])


def row_parallel_patterns(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of row-parallel modules, with * for the layer; empty where the model has no tensor-parallel plan."""
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or OWN_PLANS.get(config.model_type, {})
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    return tuple(f"{prefix}{pattern}" for pattern, style in plan.items() if style.startswith("rowwise"))


def pin_row_parallel(model: PreTrainedModel, numerics: Numerics) -> int:
    """Replace the row-parallel linears of ``model`` in place and return how many there were.

    Raises:
        NumericsError: K of a linear has no equal leaves; the message names the module and the sets that fit.
    """
    patterns = row_parallel_patterns(model)
    found = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)) and any(fnmatch(name, pattern) for pattern in patterns):
            k = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
            try:
                matmul_order(k, module.weight.dtype, numerics.radices)
            except NumericsError as error:
                raise NumericsError(f"{name}: {error}") from error
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], RowParallelLinear(module, numerics.radices))
            found += 1
    return found
