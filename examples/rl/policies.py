"""Policies trained by plain torch and by detcompile. Both have float32 weights, rounded for each forward."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import detcompile

__all__ = ["DetcompilePolicy", "PlainPolicy", "Policy", "digest"]

MAX_NORM = 1.0  # of a step's gradient


class PlainPolicy:
    """The Hugging Face model in bfloat16 under torch's autograd, and float32 copies of its weights that are trained."""

    def __init__(self, name: str, lr: float, device: str = "cpu") -> None:
        self.model = detcompile.load_model(name, device=device)
        self.start = {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}
        self.lr = lr
        self.reset()

    def reset(self) -> None:
        """Restore the initial weights, with a new optimizer."""
        self.trained = {name: weight.clone().requires_grad_() for name, weight in self.start.items()}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=self.lr, weight_decay=0.0)
        self._round()

    def logprobs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return log-probabilities [B, C - 1] of all tokens but the first, float32 with a gradient."""
        logits = self.model(input_ids, attention_mask=attention_mask).logits.float()[:, :-1]
        return logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)

    def loss(self, logprobs: Tensor, weighted: Tensor, denominator: int) -> Tensor:
        """Return minus the sum of log-probabilities, each times its weight and divided by ``denominator``."""
        return -(weighted * logprobs).sum() / denominator

    def step(self) -> None:
        """Take an optimizer step with the gradients since the last one."""
        for name, parameter in self.model.named_parameters():
            self.trained[name].grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.trained.values(), MAX_NORM)
        self.optimizer.step()
        self._round()

    def weights(self) -> dict[str, Tensor]:
        """Return every weight by name, as the forward reads it."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.trained[name])


class DetcompilePolicy:
    """A trainer with the logits of serving, to the byte, and exact gradients; sharded over ranks if there are any."""

    def __init__(self, name: str, lr: float, device: str = "cpu") -> None:
        self.trainer = detcompile.trainer(name, device=device)
        if dist.is_initialized():
            self.trainer.shard()
        self.trained = dict(self.trainer.named_parameters())
        self.start = {name: weight.detach().clone() for name, weight in self.trained.items()}
        self.lr = lr
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, with a new optimizer."""
        for name, weight in self.start.items():
            self.trained[name].copy_(weight)
        self.optimizer = detcompile.AdamW(self.trained.values(), lr=self.lr, weight_decay=0.0)

    def logprobs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return log-probabilities [B, C - 1] of all tokens but the first, float32 with a gradient."""
        return self.trainer.logprobs(input_ids, attention_mask)

    def loss(self, logprobs: Tensor, weighted: Tensor, denominator: int) -> Tensor:
        """Return minus the sum of log-probabilities, each times its weight and divided by ``denominator``."""
        return detcompile.policy_loss(logprobs, None, weighted, denominator)

    def step(self) -> None:
        """Take an optimizer step with the gradients since the last one."""
        self.trainer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Return every weight by name, as the forward reads it."""
        return self.trainer.serving_weights()


Policy = PlainPolicy | DetcompilePolicy


def digest(policy: Policy) -> str:
    """Return 16 hexadecimal digits of sha256 over the float32 bytes of all trained weights, from all ranks."""
    hasher = hashlib.sha256()
    for weight in policy.trained.values():
        whole = weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()
        hasher.update(whole.cpu().numpy())
    return hasher.hexdigest()[:16]
