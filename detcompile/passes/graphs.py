"""Nodes of a graph: their extents, what they call and where they come from. Rewrites and proofs share this."""

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.torch_internals.fake_tensors import detect_fake_mode
from detcompile.torch_internals.graph_nodes import (
    FUNCTIONALIZED,
    expression_of,
    frame_text,
    innermost_model_frame,
    module_stack,
    source_frames,
)
from detcompile.torch_internals.operators import schema_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def sympy_size(size: int | torch.SymInt) -> sympy.Expr:
    """Return an extent as a sympy expression."""
    return expression_of(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """Return the extents of a node's tensor."""
    return tuple(sympy_size(size) for size in node.meta["val"].shape)


def operation_of(node: fx.Node) -> Any:
    """Return the operation that a node calls, directly or through functionalization."""
    return node.args[0] if node.target is FUNCTIONALIZED else node.target


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return an operation's arguments by name, with defaults, without those that functionalization takes over."""
    schema = schema_of(operation_of(node)).arguments
    given = dict(node.kwargs)
    if node.target is not FUNCTIONALIZED:
        given |= zip((argument.name for argument in schema), node.args, strict=False)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | given


def insert(graph: fx.Graph, target: Callable[..., Any], args: tuple, origin: fx.Node, **kwargs: Any) -> fx.Node:
    """Add a node before ``origin``, with the source frames of ``origin`` and a fake value computed here."""
    with graph.inserting_before(origin):
        node = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, lambda arg: arg.meta["val"])
    mode = detect_fake_mode(values)
    assert mode is not None, f"no fake value among the arguments of {target}"
    with mode:
        node.meta = {**origin.meta, "val": target(*values, **kwargs)}
    return node


def replace(node: fx.Node, result: fx.Node) -> None:
    """Replace all uses of ``node`` with ``result`` and erase it."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def layer_of(node: fx.Node) -> str:
    """Return the path in the Hugging Face model of the innermost module that produced a node."""
    stack = [path for path, _ in module_stack(node)]
    return stack[-1].removeprefix("L['self'].").removeprefix("model.") if stack else ""


def place_of(node: fx.Node) -> str:
    """Return "file:line in function" of the innermost frame that produced a node."""
    frames = source_frames(node)
    return frame_text(frames[-1]) if frames else "no source recorded"


def source_of(node: fx.Node) -> str:
    """Return "file:line in function" in the model's source, or in torch's if no frame lies outside torch.

    A node that a torch pass added has no source; the nearest node downstream that has one stands in for it.
    """
    node = next((user for user in _downstream(node) if source_frames(user) or module_stack(user)), node)
    modules = module_stack(node)
    if not source_frames(node) and modules:  # a module of torch that is compiled by itself
        path, kind = modules[-1]
        return f"{path}, a {getattr(kind, '__name__', kind)}"
    return innermost_model_frame(source_frames(node)) or place_of(node)


def _downstream(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node and everything that depends on it, nearest first."""
    queue, seen = [node], {node}
    for current in queue:
        yield current
        new = [user for user in current.users if user not in seen]
        queue += new
        seen.update(new)
