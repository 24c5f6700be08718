"""A compiled graph, and the same as a function of a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.passes.graphs import sympy_size
from detcompile.passes.programs.example_step import ExampleStep
from detcompile.passes.proof.inputs import Role
from detcompile.step import StepInputs, step_leaves

__all__ = ["Binding", "CompiledGraph", "bind", "binding_of"]


class CompiledGraph(NamedTuple):
    """A compiled graph, with the fake value and the traced argument of each of its inputs."""

    run: Callable[..., Any]  # the graph's inputs in order, with `joined` in place of those there -> its outputs
    values: list[Any]  # fake tensors and SymInts
    inputs: list[Any]  # the very tensors of the traced call; parameters and buffers are the model's own
    roles: list[Role]
    joined: Mapping[int, Tensor]  # by position: the concatenations that stand in for single weights
    checked: frozenset[int] = frozenset()  # positions of extents that are compared with numbers, and read by nobody
    code: Any = None  # LayeredCode of a program that runs one region for many layers


class Binding(NamedTuple):
    """Where the inputs of a graph come from."""

    fixed: list[Any]  # weights by position, and None where a step brings something
    of_step: list[tuple[int, int, int | None]]  # position, leaf of the step, and the dimension whose extent it is


def binding_of(graph: CompiledGraph, example: ExampleStep) -> Binding:
    """Where the graph's inputs come from; ``example`` is the step that it was traced with."""
    place = {id(leaf): i for i, leaf in enumerate(step_leaves(*example))}
    sizes = _sizes(graph, place)
    fixed: list[Any] = []
    of_step: list[tuple[int, int, int | None]] = []
    for position, (value, given, role) in enumerate(zip(graph.values, graph.inputs, graph.roles, strict=True)):
        fixed.append(graph.joined.get(position, given) if role.kind == "weight" else None)
        if isinstance(value, torch.SymInt):
            extent = sizes.get(sympy_size(value))
            if extent is None:  # the tensor that has it is not read: the graph only checks that there is something
                assert position in graph.checked, f"an extent of no input of the step is read: {value}"
                extent = (0, 1)
            of_step.append((position, *extent))
        else:
            assert (role.kind == "weight") == (id(given) not in place), f"an input of the step was not found: {value}"
            if id(given) in place:
                of_step.append((position, place[id(given)], None))
    return Binding(fixed, of_step)


def bind(run: Callable[..., Any], binding: Binding) -> Callable[..., Any]:
    """A graph's code as a function of a step.

    Dynamo is left out at run time: its guards could only cost time, or trace the model again for one token count.
    """
    fixed, of_step = binding

    @torch.no_grad()
    def forward(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        given = step_leaves(input_ids, position_ids, step, logits_to_keep)
        arguments = fixed.copy()
        for position, leaf, dim in of_step:
            arguments[position] = given[leaf] if dim is None else given[leaf].shape[dim]
        outputs = run(*arguments)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return forward


def _sizes(graph: CompiledGraph, place: Mapping[int, int]) -> dict[Any, tuple[int, int]]:
    """Leaf and dimension that has the extent of a symbol; ``place`` numbers the leaves by their identity."""
    sizes: dict[Any, tuple[int, int]] = {}
    for value, given in zip(graph.values, graph.inputs, strict=True):
        if id(given) in place:
            sizes |= {sympy_size(size): (place[id(given)], dim) for dim, size in enumerate(value.shape)}
    return sizes
