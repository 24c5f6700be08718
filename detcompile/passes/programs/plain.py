"""A certified graph without a compiler: operation by operation, its caches written in place."""

from collections.abc import Callable
from typing import Any

from torch import fx

from detcompile.torch_internals.aot_autograd import auto_functionalized_v2_dense, make_boxed_func
from detcompile.torch_internals.graph_nodes import FUNCTIONALIZED

__all__ = ["run_plainly"]


def run_plainly(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """What Inductor would be called with  ->  the graph as it is, as a function of its inputs in order.

    auto_functionalized_v2(op, ..., _all_bases=caches)  ->  the same with a copy of no cache. It would copy each of
    them, and write the copies back when all layers are done: layers of several KV groups share a cache, and the last
    would undo the writes of the others (cache_writes).
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.find_nodes(op="call_function", target=FUNCTIONALIZED):
        node.target, node.args = auto_functionalized_v2_dense, (node.args[0], ())
    run: Callable[..., Any] = make_boxed_func(fx.GraphModule(gm, graph).forward)
    return run
