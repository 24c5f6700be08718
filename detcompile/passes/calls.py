"""One call of a compiled module: its batch is symbolic, and a single certified graph must answer all of it.

A backend only sees the graphs that Dynamo makes. No certificate covers what Dynamo leaves to Python: modules that it
does not trace, code between graphs, hooks of the compiled module, and everything after the recompile limit. So
torch.compile enters a Call around each call of a compiled module, and the graphs report to it.
"""

import contextlib
import itertools
import sys
import threading
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from detcompile.errors import UncertifiedOp, UnsupportedModel
from detcompile.torch_internals.compiled_calls import (
    calling_frame,
    compile_wrapper,
    is_module_call,
    runs_another_forward,
    runs_hooks,
    varying_rows,
)
from detcompile.torch_internals.dynamo import (
    FailOnRecompileLimitHit,
    Unsupported,
    dynamo_settings,
    error_on_graph_break,
    shape_settings,
)
from detcompile.torch_internals.fake_tensors import tree_leaves

GRAPH_BREAKS = ("raise", "warn")

# Only the first dimension is symbolic, from zero up. Every other extent is a constant of its graph.
ONE_GRAPH_A_SHAPE = dynamo_settings(
    assume_static_by_default=True,
    automatic_dynamic_shapes=False,
    force_parameter_static_shapes=False,  # a parameter may be an argument
    recompile_limit=64,
    skip_nnmodule_hook_guards=False,  # trace hooks that are added after the first call, too
)
FROM_ZERO_UP = shape_settings(backed_size_oblivious=True)
LOUD = dynamo_settings(suppress_errors=False, fail_on_recompile_limit_hit=True)
ADVICE = 'Compile a part that torch traces as a whole, or take options={"graph_breaks": "warn"}.'
TOO_OFTEN = (
    "torch made a graph for each extent and flag that this module was called with, and makes no more. Mark a "
    "dimension of rows that varies by torch._dynamo.mark_dynamic(tensor, dim), or call it with fewer lengths."
)

_threads = threading.local()


class Call:
    """Entered by torch.compile around each call.

    Args:
        graph_breaks: "raise" if not all of the call is one graph, or "warn".
        mark_batch: make the first dimension of every tensor argument symbolic.

    Attributes:
        given: the positional and keyword arguments.
        arguments: the tensors that the caller gave.
        owner: the object whose method was compiled; None if a function was compiled.
    """

    def __init__(self, graph_breaks: str, mark_batch: bool) -> None:
        self.graph_breaks = graph_breaks
        self.mark_batch = mark_batch
        self.num_graphs = 0
        wrapper = compile_wrapper()
        self._frame: types.FrameType | None = wrapper.frame
        self.given, self.owner = wrapper.given, wrapper.owner
        self.arguments = [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, torch.Tensor)]
        if mark_batch:
            _require_disjoint_rows(self.arguments)

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._raised_before: BaseException | None = sys.exc_info()[1]
        if self.graph_breaks == "raise":
            self._stack.enter_context(error_on_graph_break(True))
            self._stack.callback(LOUD())
        if self.mark_batch:
            self._stack.callback(ONE_GRAPH_A_SHAPE())
            self._stack.callback(FROM_ZERO_UP())
            self._stack.enter_context(varying_rows(self.arguments))
        self._stack.callback(setattr, _threads, "call", current_call())
        _threads.call = self

    def __exit__(self, *_: object) -> None:
        """Explain an exception. torch.compile does not pass it on, so look it up."""
        self._stack.close()
        raised = sys.exc_info()[1]
        new = raised is not self._raised_before
        self._frame = self._raised_before = None  # they refer to this call and its arguments
        self.given, self.arguments = [], []
        if new and self.mark_batch and isinstance(raised, FailOnRecompileLimitHit):
            raise UnsupportedModel(f"{TOO_OFTEN}\n{raised}") from raised
        if new and self.mark_batch and isinstance(raised, Unsupported):
            raise UnsupportedModel(f"torch does not make one graph of this call. {ADVICE}\n{raised}") from raised
        if not new and not self.num_graphs:
            self._complain("torch made no graph of this call")

    def count_graph(self, frame: types.FrameType | None) -> None:
        """Count a graph that is about to run, called from ``frame``."""
        self.num_graphs += 1
        if self.num_graphs > 1:
            self._complain("torch made several graphs of this call")
            return
        outside = calling_frame(frame, self._frame)
        if outside is None:
            raise UnsupportedModel("a compiled graph was called from outside the module that it was compiled for")
        if outside is not self._frame:
            place = f"{outside.f_code.co_name} in {outside.f_code.co_filename}:{outside.f_lineno}"
            hooks = " (hooks of the compiled module)" if is_module_call(outside) else ""
            self._complain(f"{place} calls the graph from outside it{hooks}")
        elif runs_hooks(self._frame):
            self._complain("hooks of the compiled module, or of all modules, run around the graph")
        elif runs_another_forward(self._frame):
            self._complain("the forward of the compiled module was replaced")

    def require_apart(self, held: Sequence[torch.Tensor]) -> None:
        """Reject tensors of the compiled callable that start inside the memory of an argument.

        Raises:
            UncertifiedOp: a tensor does.
        """
        strided = [given.untyped_storage() for given in self.arguments if given.layout is torch.strided]
        spans = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in strided]
        for tensor in held:
            address = tensor.data_ptr()
            if any(start <= address < end for start, end in spans):
                line = f"a tensor {list(tensor.shape)} that the module holds shares the memory of an argument"
                raise UncertifiedOp(f"an input of two origins:\n  {line}\nGive a copy of one of them.", (line,))

    def _complain(self, problem: str) -> None:
        text = f"{problem}: what Python computes there has no certificate, and may let rows meet."
        if self.graph_breaks == "warn":
            warnings.warn(text, RuntimeWarning, stacklevel=4)
            return
        raise UnsupportedModel(f"{text} {ADVICE}")


def current_call() -> Call | None:
    """Return the innermost running call of this thread, or None."""
    return getattr(_threads, "call", None)


def reporting(run: Callable[..., Any], held: Sequence[int]) -> Callable[..., Any]:
    """Return a graph that reports to the call that it answers.

    Args:
        held: positions of the inputs that the compiled callable holds.
    """

    def counted(*given: Any) -> Any:
        call = current_call()
        if call is not None:
            call.count_graph(sys._getframe(1))
            if call.mark_batch:
                call.require_apart([given[position] for position in held])
        return run(*given)

    return counted


def _require_disjoint_rows(arguments: Sequence[torch.Tensor]) -> None:
    """Reject arguments that share memory across rows, such as a batch and an expanded last row of it."""
    by_storage = defaultdict[int, list[torch.Tensor]](list)
    for given in arguments:
        if given.layout is torch.strided and given.numel():
            by_storage[given.untyped_storage().data_ptr()].append(given)
    for tensors in by_storage.values():
        for one, other in itertools.combinations(tensors, 2):
            if not _share_rows_alone(one, other):
                line = f"{list(one.shape)} with strides {one.stride()}, and {list(other.shape)} with {other.stride()}"
                raise UncertifiedOp(
                    f"two arguments share memory, and a row of one overlaps other rows of the other:\n  {line}\n"
                    "Pass copies, or let the compiled callable hold shared values in a closure.",
                    (line,),
                )


def _share_rows_alone(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage overlap only in rows of the same index."""
    first, second = sorted((one, other), key=torch.Tensor.data_ptr)
    distance = second.data_ptr() - first.data_ptr()
    same = distance == 0 and first.stride() == second.stride() and first.shape[1:] == second.shape[1:]
    if same or distance >= _reach(first, 0):
        return True
    if first.dim() == 0 or second.dim() == 0 or len(first) == len(second) == 1:
        return first.dim() > 0 and second.dim() > 0
    step = first.stride(0) * first.element_size()
    within = max(_reach(first, 1), distance + _reach(second, 1)) <= step
    return within and step == second.stride(0) * second.element_size()


def _reach(tensor: torch.Tensor, dim: int) -> int:
    """Return the bytes that a tensor spans over its dimensions from ``dim`` on."""
    extents = zip(tensor.shape[dim:], tensor.stride()[dim:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in extents)) * tensor.element_size()
