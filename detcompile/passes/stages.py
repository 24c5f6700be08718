"""A stage's part of a model: which layers it runs, what of caches and weights these are, or why it cannot be cut."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.parallel import PipelineStage
from detcompile.passes.layers.structure import Repeats, layer_list
from detcompile.passes.programs.binding import CompiledGraph
from detcompile.passes.proof.certificate import Certificate
from detcompile.step import KVGroup
from detcompile.torch_internals.modules import buffer_table, parameter_table

__all__ = ["StagePart", "groups_of_stage", "layers_of_stage", "move_stage", "release_others", "tensors_of"]

INSTEAD = "compile it with pp=1"


class StagePart(NamedTuple):
    """What is known of a stage's program besides what is known of the model."""

    certificate: Certificate  # proof of what it runs
    rows: Tensor | None  # [1, 2, H]: an example of those that it takes; None if it takes token ids


def layers_of_stage(
    model: PreTrainedModel, stage: PipelineStage, repeats: Repeats | None, *, carries_states: bool
) -> range:
    """The layers that a stage runs.

    Args:
        repeats: structures of the layers; None where the model is traced as a whole.

    Raises:
        UnsupportedModel: the model is not cut where layers meet.
        InvalidInput: there are more stages than layers.
    """
    name, layers = type(model).__name__, layer_list(model)
    if carries_states:
        raise UnsupportedModel(f"{name}: pp={stage.size}, but its layers carry states from token to token: {INSTEAD}")
    if layers is None:
        raise UnsupportedModel(f"{name}: pp={stage.size}, but it keeps its layers in no single list: {INSTEAD}")
    here = stage.layers(len(layers))
    if repeats is None:
        raise UnsupportedModel(
            f"{name}: pp={stage.size}, but it is traced as a whole, as its layers are too few or too different, or read"
            f" more of each other than their rows: {INSTEAD}"
        )
    return here


def move_stage(model: PreTrainedModel, stage: PipelineStage, repeats: Repeats) -> None:
    """Bring a model to the device of its stage, without the layers that are neither run nor traced there."""
    layers = list(layer_list(model) or ())
    here = stage.layers(len(layers))
    kept = [layer for index, layer in enumerate(layers) if index in here or index < repeats.prefix]
    used = [tensor for layer in kept for tensor in (*layer.parameters(), *layer.buffers())]
    for layer in layers:
        release_others(layer, used)
    if stage.device is not None:
        model.to(stage.device)


def groups_of_stage(groups: Sequence[KVGroup], here: range) -> tuple[KVGroup, ...]:
    """The groups as a stage numbers its layers; a group may have none there, and keeps its block table."""
    return tuple(
        KVGroup(tuple(layer - here.start for layer in group.layers if layer in here), group.window) for group in groups
    )


def tensors_of(graph: CompiledGraph) -> list[Tensor]:
    """The tensors that a program over layers takes, the parts of those that were joined among them."""
    parts: Iterable[tuple[Tensor, ...]] = graph.code.parts.values()
    return [*(given for given in graph.inputs if isinstance(given, Tensor)), *(part for own in parts for part in own)]


def release_others(model: nn.Module, used: Iterable[Tensor]) -> None:
    """Drop the parameters and buffers of a model that its program does not take."""
    kept = {id(tensor) for tensor in used}
    for module in model.modules():
        for held in (parameter_table(module), buffer_table(module)):
            for name, tensor in held.items():
                if id(tensor) not in kept:
                    held[name] = None
