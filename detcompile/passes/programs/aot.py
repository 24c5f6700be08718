"""Runs a certified graph, compiled by AOTInductor or not at all; and how code calls our operations."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detcompile.torch_internals.aotinductor import ahead_of_time
from detcompile.torch_internals.graph_nodes import FUNCTIONALIZED, expression_of
from detcompile.torch_internals.inductor import auto_functionalized_v2_dense, compile_fx_inner, make_boxed_func


def run_plainly(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """Run a graph as it is, without a compiler. Takes the arguments of Inductor's compile function.

    auto_functionalized_v2(op, ..., _all_bases=caches)  ->  the same without copies of the caches. Copies are written
    back at the end, and the last would undo the writes of other KV groups (programs.binding.require_cache_writes).
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.find_nodes(op="call_function", target=FUNCTIONALIZED):
        node.target, node.args = auto_functionalized_v2_dense, (node.args[0], ())
    run: Callable[..., Any] = make_boxed_func(fx.GraphModule(gm, graph).forward)
    return run


def call_directly(gm: fx.GraphModule, direct: Mapping[Any, Any]) -> fx.GraphModule:
    """detcompile.matmul(x, w, …)  ->  detcompile_direct.matmul(x, w, …)          if its result is on a CPU

    Calls kernels without Python in between. Runs after the certificate, which knows the registered operations only.

    Args:
        direct: cpp_dispatch.direct_ops.
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


LIBRARY_SUFFIXES = (".so", ".json", ".cubin")  # of files that a package needs at run time


class Packaging:
    """Compiles a Backend's graph with AOTInductor into a shared library, instead of Inductor's JIT.

    Passes and settings are those of the JIT; only the wrapper around the kernels is C++. torch's proxy executor calls
    our operations by name.

    Attributes:
        files: the files that AOTInductor wrote, once this was called.
        kept: positions of the graph's inputs that the library takes, in its order. It reads sizes off the tensors and
            drops unread inputs.
    """

    def __init__(self) -> None:
        self.files: tuple[Path, ...] = ()
        self.kept: tuple[int, ...] = ()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        assert not self.files, "a packaging holds one graph"
        traced = run_plainly(gm)  # Dynamo runs its result once; the plain graph will do
        self.kept = _without_sizes(gm)
        given = [inputs[position] for position in self.kept]
        with ahead_of_time():
            compiled = compile_fx_inner(gm, given, **{**settings, "cpp_wrapper": True})
        self.files = tuple(Path(file) for file in compiled.filename if str(file).endswith(LIBRARY_SUFFIXES))
        return traced


def _drop_checks(node: fx.Node) -> None:
    """Erase the comparisons and assertions that are the only users of a size."""
    while node.users:
        user = next(iter(node.users))
        computes = user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor)
        assert not computes, f"{user} reads a size of no input of the graph"
        _drop_checks(user)
        user.graph.erase_node(user)


def _without_sizes(gm: fx.GraphModule) -> tuple[int, ...]:
    """f(size, x, unread)  ->  f(x), where size = sym_size(x, dim). Return the positions of the remaining inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        if isinstance(node.meta["val"], torch.Tensor):
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    known.setdefault(expression_of(size), (node, dim))
    for node in inputs:
        size = node.meta["val"]
        if node.users and not isinstance(size, torch.Tensor):
            if expression_of(size) not in known:
                _drop_checks(node)
                continue
            with gm.graph.inserting_after(inputs[-1]):
                read = gm.graph.call_function(torch.ops.aten.sym_size.int, known[expression_of(size)])
            read.meta["val"] = size
            node.replace_all_uses_with(read)
    kept = tuple(position for position, node in enumerate(inputs) if node.users)
    for node in inputs:
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return kept
