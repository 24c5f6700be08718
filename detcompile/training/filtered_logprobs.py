"""filtered_logprobs: log-probabilities in the distribution that an engine draws from with top_k, top_p or min_p.

Which tokens the filters exclude is a function of the logits. It is computed again by the engine's own code, so it has
the engine's bits, and no gradient.

Legend: R rows, V vocabulary size.
"""

import math
from typing import Any

import torch
from torch import Tensor

import detcompile.templates.training.logprobs  # noqa: F401  registers torch.ops.detcompile.token_logprobs
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.filters import filtered
from detcompile.runtime.sampling.sampling_tensors import filter_limits
from detcompile.templates.cpu.fp_mode import float_mode


def filtered_logprobs(logits: Tensor, targets: Tensor, params: SamplingParams) -> Tensor:
    """Return the log-probability of each target, float32 [R] with a gradient; -inf if it is excluded.

    Args:
        logits: [R, V].
        targets: [R] integers.
        params: temperature, top_k, top_p and min_p.
    """
    result: Tensor = _FilteredLogprobs.apply(logits, targets, params)
    return result


class _FilteredLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, params: SamplingParams) -> Tensor:
        with _float_mode(logits):
            # A tensor, as in the sampler: CUDA turns a division by a number into a product with its reciprocal.
            ctx.temperature = logits.new_full((), params.temperature, dtype=torch.float32)
            scaled = logits.float() / ctx.temperature
            limits = (limit.to(logits.device).repeat(len(logits), 1) for limit in filter_limits([params]))
            top_k, mass_limit, min_p = limits
            kept = filtered(scaled, top_k, mass_limit, min_p, False) > -math.inf
            scaled = scaled.masked_fill(~kept, -math.inf)
            logprobs, _ = torch.ops.detcompile.token_logprobs(scaled, targets)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(scaled, targets)
        result: Tensor = logprobs
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        scaled, targets = ctx.saved_tensors
        with _float_mode(g):
            gradient = torch.ops.detcompile.token_logprobs_backward(g, None, scaled, targets)
            return (gradient / ctx.temperature).to(ctx.dtype), None, None


def _float_mode(tensor: Tensor) -> Any:
    return float_mode(tensor.device, torch.get_num_threads())
