"""PolicyTraining: optimizer, gradient norm and rejected options of TRL's trainers over a ``Trainer``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput
from detcompile.training.optimizer import AdamW
from detcompile.training.trainer import Trainer

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # replaced by detcompile.AdamW
FILTER = "completions would be sampled from another distribution than the trained one"
ONLY_VALUES: dict[str, tuple[Any, str]] = {  # field -> the only supported value, and the reason
    "fp16": (False, "a scaled loss exceeds the range in which sums are exact"),
    "neftune_noise_alpha": (None, "a trainer's forward has no noise, as serving's"),
    "repetition_penalty": (1.0, FILTER),
    "use_liger_kernel": (False, "layers must be those of serving"),
}


class PolicyTraining:
    """Base class of trainers that train the parameters of a ``Trainer``: put it before TRL's class.

    Attributes:
        policy: the ``Trainer``; ``model`` is the Hugging Face model over its parameters, for saving.
    """

    policy: Trainer
    model: Any
    args: Any
    optimizer: Any

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create ``detcompile.AdamW`` from the configuration, unless another optimizer was given."""
        if self.optimizer is None:
            names = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
            trained = [(n in names, p) for n, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for decays, p in trained if decays], "weight_decay": self.args.weight_decay},
                {"params": [p for decays, p in trained if not decays], "weight_decay": 0.0},
            ]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = AdamW(groups, lr=self.args.learning_rate, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.policy.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm; if clipping was off, compute it, which also checks that the sums were exact."""
        return self.policy.clip_grad_norm_(torch.inf) if grad_norm is None else grad_norm


def share_parameters(policy: Trainer, model: PreTrainedModel, *, recompute: bool) -> None:
    """Make the Hugging Face model use the trainer's parameters.

    Args:
        model: the Hugging Face model, or a PEFT model.
        recompute: whether the backward recomputes each layer's rows.
    """
    for block in policy.blocks:
        block.recompute = recompute
    inner: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        module, _, attribute = name.rpartition(".")
        setattr(inner.get_submodule(module), attribute, parameter)


def require_options(
    args: Any, only_values: Mapping[str, tuple[Any, str]], keywords: Mapping[str, Any], refused: Mapping[str, str]
) -> None:
    """Reject options that are not supported.

    Args:
        args: TRL's configuration.
        only_values: by field of ``args``, the only supported value and the reason.
        keywords: arguments of the trainer.
        refused: by argument, the reason to refuse it.

    Raises:
        InvalidInput: names the field or the argument.
    """
    for name, (supported, why) in only_values.items():
        if (value := getattr(args, name)) != supported:
            raise InvalidInput(f"{name}={value!r} is not supported: {why}. Leave it at {supported!r}.")
    if (optim := str(getattr(args.optim, "value", args.optim))) not in OPTIMIZERS:
        raise InvalidInput(f"optim={optim!r} is not supported: use adamw_torch, or pass optimizers=(yours, None).")
    for name, why in refused.items():
        if keywords.get(name) is not None:
            raise InvalidInput(f"{name} is not supported: {why}.")
