"""A certified graph compiled ahead of time by AOTInductor: a shared library that takes what the graph takes.

The graph is the one that the JIT compiles, after the same passes and under the same settings; only the wrapper around
its kernels is C++ instead of Python. Our own operations are called through torch's proxy executor, by name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from detcompile.passes.programs.plain import run_plainly
from detcompile.torch_internals.aotinductor import ahead_of_time
from detcompile.torch_internals.graph_nodes import expression_of
from detcompile.torch_internals.inductor import compile_fx_inner

__all__ = ["Packaging"]

LIBRARY_SUFFIXES = (".so", ".json", ".cubin")  # of the files that a package needs when it runs


class Packaging:
    """What a Backend lowers with, in place of Inductor's JIT: called with a graph and its fake inputs.

    Attributes:
        files: what AOTInductor wrote, once it was called.
        kept: positions of the graph's inputs that the library takes, in its order; the others are read by nobody, or
            are sizes, which it reads off the tensors.
    """

    def __init__(self) -> None:
        self.files: tuple[Path, ...] = ()
        self.kept: tuple[int, ...] = ()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        assert not self.files, "a packaging holds one graph"
        traced = run_plainly(gm)  # Dynamo runs what it compiled once; that may be the plain graph
        self.kept = _without_sizes(gm)
        given = [inputs[position] for position in self.kept]
        with ahead_of_time():
            compiled = compile_fx_inner(gm, given, **{**settings, "cpp_wrapper": True})
        self.files = tuple(Path(file) for file in compiled.filename if str(file).endswith(LIBRARY_SUFFIXES))
        return traced


def _drop_checks(node: fx.Node) -> None:
    """Erase what compares a number and asserts the outcome: a size of an input that nothing else reads."""
    while node.users:
        user = next(iter(node.users))
        computes = user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor)
        assert not computes, f"{user} reads a size of no input of the graph"
        _drop_checks(user)
        user.graph.erase_node(user)


def _without_sizes(gm: fx.GraphModule) -> tuple[int, ...]:
    """f(size, x, unread)  ->  f(x), where size = sym_size(x, dim). Returns the positions of what is left."""
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
