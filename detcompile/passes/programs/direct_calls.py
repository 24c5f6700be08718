"""The operations of a CPU's graph, called without Python between them and their kernels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from detcompile.torch_internals.graph_nodes import FUNCTIONALIZED

__all__ = ["call_directly"]


def call_directly(gm: fx.GraphModule, direct: Mapping[Any, Any]) -> fx.GraphModule:
    """detcompile.matmul(x, w, …)  ->  detcompile_direct.matmul(x, w, …)          where its result lies on a CPU

    Behind the certificate, which knows the operations by their first names.

    Args:
        direct: the operation that is called directly for each of ours, from cpp_dispatch.direct_ops.
    """
    for node in gm.graph.find_nodes(op="call_function", target=FUNCTIONALIZED):
        if _is_on_cpu(node):
            node.args = (direct.get(node.args[0], node.args[0]), *node.args[1:])
    for op, same in direct.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.target = same if _is_on_cpu(node) else op
    return gm


def _is_on_cpu(node: fx.Node) -> bool:
    value = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, tuple) else value
    return first.device.type == "cpu"
