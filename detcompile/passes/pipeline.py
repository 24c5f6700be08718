"""The passes in the order they run, and Inductor's settings under which they hold."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.codegen import cpp as inductor_cpp
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph

from detcompile.passes.graphs import sympy_size
from detcompile.passes.programs.lanes import lane_by_lane
from detcompile.passes.rewrites.allocations import join_fills
from detcompile.passes.rewrites.batch_indices import drop_batch_indices
from detcompile.passes.rewrites.batched_matmuls import pin_batched_products
from detcompile.passes.rewrites.canonicalize import canonicalize
from detcompile.passes.rewrites.gates import fuse_gates
from detcompile.passes.rewrites.matmuls import fuse_residuals, pin_matmuls
from detcompile.passes.rewrites.reductions import KEPT_WHOLE, pin_reductions
from detcompile.passes.rewrites.rms_norms import pin_rms_norms
from detcompile.passes.rewrites.rope import fuse_rope
from detcompile.passes.rewrites.running_sums import pin_running_sums
from detcompile.passes.rewrites.sorts import pin_sorts, pin_topk
from detcompile.passes.rewrites.windows import POOLS, pin_convolutions, pin_pools
from detcompile.sources import source_digest
from detcompile.templates.cpu.shared_objects import compiler_if_any
from detcompile.torch_internals.operators import OpOverload
from detcompile.torch_internals.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["GraphPass", "PASSES", "ROUNDING", "decompositions", "pinned_codegen", "read_extents", "rewrite"]

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


def _setting(*names: str) -> str:
    """The one of an Inductor setting's names that this torch has."""
    return next(name for name in names if name in inductor_config._config)


# Rounding must not depend on what Inductor happens to fuse, nor sums on what it happens to split.
ROUNDING: dict[str, Any] = {
    "emulate_precision_casts": True,
    _setting("eager_numerics.division_rounding", "emulate_divison_rounding"): True,
    "split_reductions": False,
    "comprehensive_padding": False,
    "max_autotune": False,
    # With an unknown token count Inductor sees no data that two kernels share, and would fuse nothing over tokens.
    "aggressive_fusion": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_loop_tail_vec": True,
}

CODEGEN_GROUP = inductor_cpp.KernelGroup.codegen_group


class GraphPass(CustomGraphPass):
    """A ``gm -> gm`` function where Inductor wants a pass over a graph; ``key`` enters the cache key."""

    def __init__(self, apply: Callable[[fx.GraphModule], Any], key: str) -> None:
        self.apply = apply
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        self.apply(graph.owning_module)

    def uuid(self) -> Any:
        # Inductor's cache must not outlive a change in our sources, nor a compiler
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
    """f(x)  ->  f(x), with sym_size(x, dim) or sym_stride(x, dim) for each symbol of x that no input number is

    Run this last, right before Inductor's lowering: nothing uses these nodes. Since torch 2.14 Inductor's wrapper
    defines a symbol only where it is an input or where a node reads it from one, though kernels use it for their loops.
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
    """Generated C++ rounds an element the same way wherever it stands and whatever is fused with it.

    Inductor leaves a loop's tail to scalar code when masking it looks expensive *for the token count it was traced
    with*. And before torch 2.13 its C++ remembers the unrounded value behind a cast, though the casts are to be kept.
    What a vector computes of each lane, see passes.programs.lanes. Constants are folded as far as that asks nothing of
    an unknown number of rows. And what another compiler has made of the same C++ is taken for this one's, by Inductor's
    cache, unless the code names it. Inductor's patterns of products, attention and random numbers are not made: a
    certified graph holds none of these.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda *_: None))
        fold = joint_graph.constant_fold_uniform_value
        stack.enter_context(mock.patch.object(joint_graph, fold.__name__, functools.partial(_fold_what_is_known, fold)))
        stack.enter_context(lane_by_lane())
        stack.enter_context(mock.patch.object(inductor_cpp.KernelGroup, "codegen_group", _naming_the_compiler))
        stack.enter_context(mock.patch.object(inductor_cpp.CppKernel, "cache_dtype_convert", lambda *_: None))
        # A torch without it has no such heuristic; were there another, tests/passes/test_rounding.py would see it.
        if hasattr(inductor_cpp, "KernelOpStats"):
            ratio = mock.patch.object(inductor_cpp.KernelOpStats, "OVERHEAD_RATIO_THRESHOLD", float("inf"))
            stack.enter_context(ratio)
        yield


def _fold_what_is_known(fold: Callable[[fx.GraphModule], None], gm: fx.GraphModule) -> None:
    """Inductor's folding, which asks of a view of zeros how its rows lie: out = zeros(x.shape), out[..., :8] = ..."""
    with contextlib.suppress(GuardOnDataDependentSymNode):
        fold(gm)


def _naming_the_compiler(group: inductor_cpp.KernelGroup, name: str | None = None) -> str:
    code = CODEGEN_GROUP(group, name)
    return code and f"// {compiler_if_any()}\n{code}"


def decompositions(kept: tuple[OpOverload, ...] = (*KEPT_WHOLE, *POOLS)) -> dict[Any, Any]:
    """Inductor's decompositions without those of the operations that a pass takes as a whole."""
    table = {op: decomposition for op, decomposition in select_decomp_table().items() if op not in kept}
    return table | {aten.fill.Tensor: _fill}


def _fill(into: Tensor, value: Tensor) -> Tensor:
    """``aten.fill``, for which torch's decomposition asks whether there are two rows or more, to choose strides."""
    return torch.zeros_like(into).where(torch.zeros((), dtype=torch.bool, device=into.device), value.to(into))
