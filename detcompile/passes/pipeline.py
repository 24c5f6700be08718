"""The passes in the order they run, and the Inductor settings that they rely on."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from detcompile.digests import source_digest
from detcompile.passes.graphs import sympy_size
from detcompile.passes.programs.lanes import lane_by_lane
from detcompile.passes.rewrites.canonicalize import canonicalize, drop_batch_indices, join_fills
from detcompile.passes.rewrites.matmuls import fuse_gates, fuse_residuals, pin_batched_products, pin_matmuls
from detcompile.passes.rewrites.reductions import KEPT_WHOLE, pin_reductions, pin_rms_norms
from detcompile.passes.rewrites.rope import fuse_rope
from detcompile.passes.rewrites.sorts import pin_running_sums, pin_sorts, pin_topk
from detcompile.passes.rewrites.windows import POOLS, pin_convolutions, pin_pools
from detcompile.templates.cpu.shared_objects import compiler_if_any
from detcompile.torch_internals.inductor import (
    CustomGraphPass,
    folding_known_extents,
    select_decomp_table,
    without_patterns,
)
from detcompile.torch_internals.inductor_cpp import commented, keeping_casts, vectorized_tails

aten = torch.ops.aten
PASSES: tuple[Callable[[fx.GraphModule], fx.GraphModule], ...] = (
    join_fills,
    pin_convolutions,
    pin_pools,
    canonicalize,
    drop_batch_indices,
    pin_topk,
    pin_sorts,
    pin_batched_products,
    pin_rms_norms,
    pin_reductions,
    pin_running_sums,
    pin_matmuls,
    fuse_residuals,
    fuse_gates,
    fuse_rope,
)


# Rounding must not depend on what Inductor fuses, nor sums on what it splits.
ROUNDING: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "split_reductions": False,
    "comprehensive_padding": False,
    "max_autotune": False,
    # With an unknown token count, Inductor finds no data that two kernels share and fuses nothing over tokens.
    "aggressive_fusion": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_loop_tail_vec": True,
}


class GraphPass(CustomGraphPass):
    """A ``gm -> gm`` function as an Inductor graph pass. ``key`` enters Inductor's cache key."""

    def __init__(self, apply: Callable[[fx.GraphModule], Any], key: str) -> None:
        self.apply = apply
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        self.apply(graph.owning_module)

    def uuid(self) -> Any:
        # a change in our sources or of the compiler invalidates Inductor's cache
        return (source_digest(), self.key, compiler_if_any())


def rewrite(gm: fx.GraphModule) -> fx.GraphModule:
    """Run PASSES in order."""
    for apply in PASSES:
        gm = apply(gm)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


def read_extents(gm: fx.GraphModule) -> fx.GraphModule:
    """f(x)  ->  f(x), with sym_size(x, dim) or sym_stride(x, dim) for each symbol of x that is not an input number

    Run this last, right before Inductor's lowering: nothing uses these nodes. Since torch 2.14, Inductor's wrapper
    defines a symbol only if it is an input or if a node reads it from one, but kernels also use it for their loops.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in inputs]
    known = {sympy_size(value) for value in values if isinstance(value, torch.SymInt)}
    for node, value in zip(inputs, values, strict=True):
        if not isinstance(value, Tensor):
            continue
        for read, extents in ((aten.sym_size.int, value.shape), (aten.sym_stride.int, value.stride())):
            for dim, extent in enumerate(extents):
                symbol = sympy_size(extent)
                if isinstance(symbol, sympy.Symbol) and symbol not in known:
                    known.add(symbol)
                    with gm.graph.inserting_after(inputs[-1]):
                        gm.graph.call_function(read, (node, dim)).meta["val"] = extent
    return gm


@contextlib.contextmanager
def pinned_codegen() -> Iterator[None]:
    """Make generated C++ round an element the same way in every position and every fusion.

    See passes.programs.lanes for lanes of vectors. The compiler is part of the C++, so that Inductor's cache does not
    reuse another compiler's code.
    """
    compiler = functools.partial(commented, compiler_if_any)
    with contextlib.ExitStack() as stack:
        for enter in (without_patterns, folding_known_extents, lane_by_lane, compiler, keeping_casts, vectorized_tails):
            stack.enter_context(enter())
        yield


def decompositions() -> dict[Any, Any]:
    """Return Inductor's decompositions, except those of operations that a pass rewrites whole."""
    kept = (*KEPT_WHOLE, *POOLS)
    table = {op: decomposition for op, decomposition in select_decomp_table().items() if op not in kept}
    return table | {aten.fill.Tensor: _fill}


def _fill(into: Tensor, value: Tensor) -> Tensor:
    """``aten.fill``. torch's decomposition branches on whether there are at least two rows, to choose strides."""
    return torch.zeros_like(into).where(torch.zeros((), dtype=torch.bool, device=into.device), value.to(into))
