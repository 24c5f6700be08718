"""The nodes of a graph: what their values' extents are, what they call, where they came from; and new ones.

What rewrites and proofs share. Neither knows the other.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.torch_internals.fake_tensors import detect_fake_mode
from detcompile.torch_internals.graph_nodes import (
    FUNCTIONALIZED,
    expression_of,
    is_file_of_torch,
    module_stack,
    source_trace,
)
from detcompile.torch_internals.operators import schema_of

__all__ = [
    "VIEWS",
    "arguments_of",
    "insert",
    "layer_of",
    "operation_of",
    "place_of",
    "replace",
    "shape_of",
    "source_of",
    "sympy_size",
]

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
OWN_CODE = re.compile(r"in forward_[0-9a-f]+$")  # as tracing.with_own_code names a forward


def sympy_size(size: int | torch.SymInt) -> sympy.Expr:
    """The extent as a sympy expression."""
    return expression_of(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """The extents of a node's tensor value."""
    return tuple(sympy_size(size) for size in node.meta["val"].shape)


def operation_of(node: fx.Node) -> Any:
    """What a node calls, also where functionalization calls it."""
    return node.args[0] if node.target is FUNCTIONALIZED else node.target


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The operation's arguments by their names, defaults included, but for those that functionalization took."""
    schema = schema_of(operation_of(node)).arguments
    given = dict(node.kwargs)
    if node.target is not FUNCTIONALIZED:
        given |= zip((argument.name for argument in schema), node.args, strict=False)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | given


def insert(graph: fx.Graph, target: Callable[..., Any], args: tuple, origin: fx.Node, **kwargs: Any) -> fx.Node:
    """Add a node before ``origin`` that carries its place in the source and its own fake value."""
    with graph.inserting_before(origin):
        node = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, lambda arg: arg.meta["val"])
    mode = detect_fake_mode(values)
    assert mode is not None, f"no fake value among the arguments of {target}"
    with mode:
        node.meta = {**origin.meta, "val": target(*values, **kwargs)}
    return node


def replace(node: fx.Node, result: fx.Node) -> None:
    """Have whatever reads ``node`` read ``result``, and erase it."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def layer_of(node: fx.Node) -> str:
    """Path of the innermost module that produced the node, as the Hugging Face model names it."""
    stack = [path for path, _ in module_stack(node)]
    return stack[-1].removeprefix("L['self'].").removeprefix("model.") if stack else ""


def place_of(node: fx.Node) -> str:
    """File, line and function of the source that produced the node, innermost frame."""
    frames = _frames(node)
    return _shown(frames[-1]) if frames else "no source recorded"


def source_of(node: fx.Node) -> str:
    """File, line and function of the model's own source that produced the node, rather than of a module of torch's.

    Of a node that a pass of torch's added: of the first one behind it that has a source.
    """
    node = next((one for one in _behind(node) if _frames(one) or module_stack(one)), node)
    frames = _frames(node)
    own = [frame for frame in frames if not is_file_of_torch(frame.removeprefix('File "'))]
    if frames:
        return _shown((own or frames)[-1])
    modules = module_stack(node)  # one of torch's, which was compiled itself
    return f"{modules[-1][0]}, a {getattr(modules[-1][1], '__name__', modules[-1][1])}" if modules else place_of(node)


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and what reads it, directly or not: the nearest first."""
    found, seen = [node], {node}
    for one in found:
        yield one
        new = [user for user in one.users if user not in seen]
        found += new
        seen.update(new)


def _frames(node: fx.Node) -> list[str]:
    return [line.strip() for line in source_trace(node).splitlines() if line.strip().startswith("File ")]


def _shown(frame: str) -> str:
    file, line, where = frame.removeprefix("File ").split(", ")[:3]
    where = OWN_CODE.sub("in forward", where)
    return f"{file.strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')} {where}"
