"""Inductor and AOTAutograd, the compilers behind torch.compile."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense
from torch._inductor import ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import get_hash, get_path
from torch._inductor.codegen.common import CSEProxy
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.lowering import fallbacks, lowerings

from detcompile.torch_internals.symbolic_shapes import GuardOnDataDependentSymNode

NAMES = {
    "CSEProxy": "Receives each operation that Inductor writes code for. Without it: what Inductor makes of a certified "
    "graph is not checked.",
    "CustomGraphPass": "The base of passes that Inductor runs over a graph, with a key for its cache. Without it: "
    "Inductor's cache answers with code of other passes.",
    "InductorChoices": "Inductor's heuristics. Without it: threads of a trainer's kernels load 2 or 4 bytes.",
    "auto_functionalized_v2_dense": "Runs an operation that writes into its arguments, and copies only those "
    "that it must. Without it: a graph that is run without a compiler copies every KV cache.",
    "compile_fx": "AOTAutograd and Inductor on one Dynamo graph, with passes in between. Without it: no graph "
    "is compiled.",
    "compile_fx_inner": "Inductor on one ATen graph. Without it: no certified graph is compiled.",
    "fallbacks": "Operations that Inductor leaves to ATen kernels. Without it: one of them counts as a function of "
    "each element.",
    "functorch_config": "AOTAutograd's settings. Without it: its cache replaces the passes and proofs, "
    "and a backward is compiled at its first call, outside of them.",
    "get_hash": "The name of Inductor's Python code in its cache, a hash of it. Without it: see damaged_code.",
    "get_path": "The file of a name in Inductor's cache. Without it: see damaged_code.",
    "ir": "Inductor's nodes. Without it: a trainer of a model with one head of keys is not compiled.",
    "lowerings": "Functions that lower each operation. Without it: every head of every layer recomputes sines and "
    "cosines.",
    "make_boxed_func": "Mark a function as one that takes its inputs in a list, as a graph's code does. Without it: "
    "AOTAutograd warns, and keeps inputs alive for the whole call.",
    "select_decomp_table": "Inductor's decompositions. Without it: ATen holds operations that neither passes nor "
    "Inductor know.",
}


def damaged_code(error: BaseException) -> Path | None:
    """Return a file of Inductor's cache that an error names, and whose name is not the hash of its content.

    Inductor never writes such a file again. Without it: a file that a power failure left empty makes every model fail
    to compile.
    """
    for name in re.findall(r"\bc[a-z2-7]{51}\b", str(error)):
        path = Path(get_path(name, "py")[2])
        if path.exists() and get_hash(path.read_text(errors="replace").strip()) != name:
            return path
    return None


@contextlib.contextmanager
def observing_operations(observe: Callable[[str, Sequence[Any]], None]) -> Iterator[None]:
    """Call ``observe(name, operands)`` for each operation that Inductor writes code for inside the block.

    Operands are variables with a dtype, numbers and dtypes; a reduction's name begins with "reduction", and its operand
    is the value. Nothing is observed if Inductor's cache has the code. Without it: see CSEProxy.
    """
    write, reduce = CSEProxy._default, CSEProxy.reduction

    def written(proxy: CSEProxy, name: str, args: Any, kwargs: Any) -> Any:
        observe(name, args)
        return write(proxy, name, args, kwargs)

    def reduced(proxy: CSEProxy, dtype: Any, src_dtype: Any, kind: Any, value: Any) -> Any:
        observe(f"reduction {kind}", [value])
        return reduce(proxy, dtype, src_dtype, kind, value)

    with mock.patch.object(CSEProxy, "_default", written), mock.patch.object(CSEProxy, "reduction", reduced):
        yield


@contextlib.contextmanager
def without_patterns() -> Iterator[None]:
    """Skip Inductor's patterns of products, attention and random numbers inside the block.

    A certified graph holds none of them. Without it: the first compilation takes seconds more.
    """
    with mock.patch.object(joint_graph, "lazy_init", lambda *_: None):
        yield


@contextlib.contextmanager
def wide_loads() -> Iterator[None]:
    """Give each thread of Inductor's Triton kernels at least eight elements inside the block: 16 bytes of bfloat16.

    Without it: torch 2.11 gives a thread one or two elements of tensors whose size it does not know.
    """
    original = InductorChoices.triton_kernel_kwargs

    def eight(choices: InductorChoices, kind: Any, features: Any, groups: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"min_elem_per_thread": 8} | original(choices, kind, features, groups, given)

    with mock.patch.object(InductorChoices, "triton_kernel_kwargs", eight):
        yield


@contextlib.contextmanager
def without_channels_last() -> Iterator[None]:
    """Make Inductor treat no tensor as channels_last inside the block.

    Without it: torch 2.13 treats keys [1, 1, T, D] of a single head so, and cannot order strides with an unknown T.
    """
    with mock.patch.object(ir, "is_contiguous_for_memory_format_or_false", lambda *given, **named: False, create=True):
        yield


@contextlib.contextmanager
def folding_known_extents() -> Iterator[None]:
    """Limit Inductor's constant folding inside the block to folds that do not inspect an unknown extent.

    It inspects the strides of rows of a view of zeros: out = zeros(x.shape), out[..., :8] = ... Without it: a graph
    with such a view is not compiled.
    """
    fold = joint_graph.constant_fold_uniform_value
    with mock.patch.object(joint_graph, fold.__name__, functools.partial(_fold_known_extents, fold)):
        yield


def _fold_known_extents(fold: Callable[[fx.GraphModule], None], gm: fx.GraphModule) -> None:
    with contextlib.suppress(GuardOnDataDependentSymNode):
        fold(gm)
