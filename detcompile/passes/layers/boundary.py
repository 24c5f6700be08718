"""Where layers meet in a traced graph: an operation that gives back what it is given."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["mark_layers", "take_marks"]


@torch.library.custom_op("detcompile_graph::layer_boundary", mutates_args=())
def layer_boundary(rows: Tensor, layer: int) -> Tensor:
    """A copy of the rows that ``layer`` reads; it stands in graphs until they are cut, and never runs in a program.

    It has a namespace of its own: those of ours are templates, which have orders.
    """
    return rows.clone()


@layer_boundary.register_fake
def _(rows: Tensor, layer: int) -> Tensor:
    return torch.empty_like(rows)


def mark_layers(layers: Sequence[nn.Module]) -> None:
    """Have the rows that enter the first layer, and those that each layer gives, pass through the operation.

    The layers keep the hooks: they are those of a view, which is traced and dropped.
    """
    layers[0].register_forward_pre_hook(_before, with_kwargs=True)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(functools.partial(_after, index + 1))


def _before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (torch.ops.detcompile_graph.layer_boundary(args[0], 0), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": torch.ops.detcompile_graph.layer_boundary(kwargs["hidden_states"], 0)}


def _after(index: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.ops.detcompile_graph.layer_boundary(output[0], index), *output[1:])
    return torch.ops.detcompile_graph.layer_boundary(output, index)


def take_marks(gm: fx.GraphModule) -> list[fx.Node]:
    """Erase the operations; returns the nodes of the rows that enter each layer, and of those that the last one gives.

    None of them where some rows were not seen, or seen twice.
    """
    marks = gm.graph.find_nodes(op="call_function", target=torch.ops.detcompile_graph.layer_boundary.default)
    rows: list[fx.Node] = []
    for mark in sorted(marks, key=lambda mark: mark.args[1]):
        if mark.args[1] == len(rows):
            rows.append(mark.args[0])
        mark.replace_all_uses_with(mark.args[0])
        gm.graph.erase_node(mark)
    return rows if len(set(rows)) == len(marks) else []
