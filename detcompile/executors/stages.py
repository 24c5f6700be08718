"""Joins the descriptions of pipeline stages into that of the whole model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription
from detcompile.passes.layers.compilation import require_whole
from detcompile.step import KVGroup

__all__ = ["joined_description"]


def joined_description(stages: Sequence[ModelDescription]) -> ModelDescription:
    """Join the descriptions of all stages, in order. A model without stages has one description, returned as is.

    Raises:
        UnsupportedModel: the stages' certificates do not add up to the whole model's.
        InvalidInput: the stages hold different models.
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
