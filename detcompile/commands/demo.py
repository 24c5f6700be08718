"""The main job on the embedded model: plain torch beside detcompile, over the same configurations."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from detcompile.api import TINY, load_model
from detcompile.commands.axes import AxisResult, Configuration, configurations, measure, padded_batch
from detcompile.commands.verification import RESTART, ModelSpec, available_axes, prompts_for
from detcompile.models.compiled import CompiledModel

__all__ = ["Comparison", "DEMO_AXES", "compare_with_torch", "score_plain"]

DEMO_AXES = tuple(axis for axis in available_axes("cpu") if axis != RESTART)


@dataclass(frozen=True)
class Comparison:
    """One axis measured on plain torch and on detcompile; torch is None where it has no such freedom."""

    axis: str
    torch: AxisResult | None
    ours: AxisResult


@torch.no_grad()
def score_plain(model: PreTrainedModel, configuration: Configuration) -> Tensor:
    """Logits [len(target), V] of the target row under Hugging Face's own forward.

    Rows of one step share a padded batch; a target split into steps runs alone over a DynamicCache.
    """
    target = configuration.rows[configuration.target]
    chunks = [n for step in configuration.steps for row, n in step if row == configuration.target]
    if len(chunks) < 2:
        input_ids, mask, columns = padded_batch(configuration)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids.to(model.device), mask.to(model.device), positions.to(model.device)).logits
        return logits[configuration.target, columns]
    cache, start, pieces = DynamicCache(config=model.config), 0, []
    for chunk in chunks:
        ids = torch.tensor([target[start : start + chunk]], device=model.device)
        pieces.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
        start += chunk
    return torch.cat(pieces)


def compare_with_torch(
    model: CompiledModel, *, count: int, seed: int = 0, tick: Callable[[str], None] = lambda axis: None
) -> list[Comparison]:
    """Measure DEMO_AXES on both, the same configurations in the same order; ``tick(axis)`` after each measurement."""
    plain = load_model(TINY, device=model.device)
    prompts = prompts_for(model, ModelSpec(TINY), seed)
    comparisons = []
    for axis in DEMO_AXES:
        plan = configurations(axis, prompts, count, random.Random(f"{axis} {seed}"))
        theirs = None
        if axis != "kv":  # Hugging Face's cache has no blocks to move
            theirs = AxisResult()
            for configuration in plan:
                theirs.add(configuration.rows[configuration.target], score_plain(plain, configuration))
                tick(axis)
        comparisons.append(Comparison(axis, theirs, measure(model, plan, functools.partial(tick, axis))))
    return comparisons
