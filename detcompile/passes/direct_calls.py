"""The operations of a CPU's graph, called without Python between them and their kernels."""

import torch
from torch import fx

from detcompile.templates.direct_ops import direct_ops

__all__ = ["call_directly"]

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


def call_directly(gm: fx.GraphModule) -> fx.GraphModule:
    """detcompile.matmul(x, w, …)  ->  detcompile_direct.matmul(x, w, …)          in a graph that runs on a CPU

    Behind the certificate, which knows the operations by their first names.
    """
    direct = direct_ops()
    for node in gm.graph.find_nodes(op="call_function", target=FUNCTIONALIZED):
        node.args = (direct.get(node.args[0], node.args[0]), *node.args[1:])
    for op, same in direct.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.target = same
    return gm
