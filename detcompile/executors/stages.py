"""Stages of a pipeline as one model: what their processes say of their parts, joined and compared with the whole."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription
from detcompile.passes.layers.stages import require_whole
from detcompile.step import KVGroup

__all__ = ["joined_description"]


def joined_description(stages: Sequence[ModelDescription]) -> ModelDescription:
    """What is known of a model, from what its stages know, in their order; of one stage, the same.

    Raises:
        UnsupportedModel: the stages do not prove what the whole model's certificate does.
        InvalidInput: they are of two models.
    """
    first = stages[0]
    if first.stage is None:
        return first
    differing = [index for index, stage in enumerate(stages) if stage.program != first.program]
    if differing:
        raise InvalidInput(f"stages 0 and {differing[0]} do not hold the same model: give all of them one checkpoint")
    require_whole([stage.stage.certificate for stage in stages if stage.stage is not None], first.certificate)
    starts = [0, *accumulate(len(stage.facts.kv_shapes) for stage in stages)]
    groups = tuple(
        KVGroup(
            tuple(
                start + layer for stage, start in zip(stages, starts) for layer in stage.facts.kv_groups[index].layers
            ),
            group.window,
        )
        for index, group in enumerate(first.facts.kv_groups)
    )
    shapes = tuple(shape for stage in stages for shape in stage.facts.kv_shapes)
    return replace(first, facts=replace(first.facts, kv_shapes=shapes, kv_groups=groups), stage=None)
