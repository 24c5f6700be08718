"""One call of a compiled module: its batch is made symbolic before it, and one certified graph has to answer all of it.

Dynamo asks a backend about the graphs that it makes. What it leaves to Python - modules that it does not trace, code
between the graphs of a broken one, hooks of the compiled module, everything once it has compiled too often - no
certificate sees. So torch.compile enters a Call around each call of what it compiled, and the graphs report to it.
"""

import contextlib
import itertools
import sys
import threading
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.fx import graph_module
from torch.fx.experimental import _config as shape_config
from torch.nn.modules import module as module_calls
from torch.utils import _contextlib
from torch.utils._pytree import tree_leaves

from detcompile.errors import UncertifiedOp, UnsupportedModel

__all__ = ["Call", "GRAPH_BREAKS", "current_call", "enter_calls", "reporting"]

GRAPH_BREAKS = ("raise", "warn")

# Frames between a compiled one and torch.compile's own that compute nothing of the caller's.
TRANSPARENT = {
    (module_calls.__file__, "_wrapped_call_impl"),
    (module_calls.__file__, "_call_impl"),  # with hooks it goes on in `inner`
    (_contextlib.__file__, "decorate_context"),  # @torch.no_grad()
    (graph_module.__file__, "__call__"),  # of an fx.GraphModule
    (graph_module.__file__, "call_wrapped"),
}
# Counts are symbols from zero up, of the first dimension alone: every other extent is what it is, and has its graph.
ONE_GRAPH_A_SHAPE = dynamo_config._make_closure_patcher(
    assume_static_by_default=True,
    automatic_dynamic_shapes=False,
    force_parameter_static_shapes=False,  # of a parameter that is given as an argument
    recompile_limit=64,
    skip_nnmodule_hook_guards=False,  # hooks that come after the first call are traced, too
)
FROM_ZERO_UP = shape_config._make_closure_patcher(backed_size_oblivious=True)
LOUD = dynamo_config._make_closure_patcher(suppress_errors=False, fail_on_recompile_limit_hit=True)
ADVICE = 'Compile a part that torch traces as a whole, or take options={"graph_breaks": "warn"}.'
TOO_OFTEN = (
    "torch made a graph for each extent and flag that this module was called with, and makes no more. Mark a "
    "dimension of rows that varies by torch._dynamo.mark_dynamic(tensor, dim), or call it with fewer lengths."
)
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")

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
        self._frame: types.FrameType | None = _compile_wrapper()
        variables = self._frame.f_locals
        self.given = [*variables["args"], *variables["kwargs"].values()]
        self.arguments = [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, torch.Tensor)]
        self.owner = getattr(variables["fn"], "__self__", None)
        if mark_batch:
            _require_own_rows(self.arguments)

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._raised_before: BaseException | None = sys.exc_info()[1]
        if self.graph_breaks == "raise":
            self._stack.enter_context(torch._dynamo.error_on_graph_break(True))
            self._stack.callback(LOUD())
        if self.mark_batch:
            self._stack.callback(ONE_GRAPH_A_SHAPE())
            self._stack.callback(FROM_ZERO_UP())
            self._stack.enter_context(_marked(self.arguments))
        self._stack.callback(setattr, _threads, "call", current_call())
        _threads.call = self

    def __exit__(self, *_: object) -> None:
        """torch.compile tells nothing of an exception: whether one is under way is looked up."""
        self._stack.close()
        raised = sys.exc_info()[1]
        new = raised is not self._raised_before
        self._frame = self._raised_before = None  # which hold this call, and what it was given
        self.given, self.arguments = [], []
        if new and self.mark_batch and isinstance(raised, FailOnRecompileLimitHit):
            raise UnsupportedModel(f"{TOO_OFTEN}\n{raised}") from raised
        if new and self.mark_batch and isinstance(raised, Unsupported):
            raise UnsupportedModel(f"torch does not make one graph of this call. {ADVICE}\n{raised}") from raised
        if not new and not self.num_graphs:
            self._complain("torch made no graph of this call")

    def count_graph(self, frame: types.FrameType | None) -> None:
        """A graph is about to run, called from ``frame``."""
        self.num_graphs += 1
        if self.num_graphs > 1:
            self._complain("torch made several graphs of this call")
            return
        while frame is not None and _place(frame)[0] == eval_frame.__file__ and frame is not self._frame:
            frame = frame.f_back
        outside = frame and frame.f_back  # around the frame that was compiled
        while outside is not None and outside is not self._frame and _place(outside) in TRANSPARENT:
            outside = outside.f_back
        if outside is None:
            raise UnsupportedModel("a compiled graph was called by somebody else than the module it was made for")
        if outside is not self._frame:
            file, name = _place(outside)
            hooks = " (hooks of the compiled module)" if file == module_calls.__file__ else ""
            self._complain(f"{name} in {file}:{outside.f_lineno} calls the graph, and is no part of it{hooks}")
        elif _runs_hooks(self._frame):
            self._complain("hooks run around the graph, of what torch.compile returned or of all modules")

    def require_apart(self, held: Sequence[torch.Tensor]) -> None:
        """Reject tensors of the compiled callable that begin in the memory of an argument.

        Raises:
            UncertifiedOp: there is one.
        """
        strided = [given.untyped_storage() for given in self.arguments if given.layout is torch.strided]
        spans = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in strided]
        for tensor in held:
            address = tensor.data_ptr()
            if any(start <= address < end for start, end in spans):
                line = f"a tensor {list(tensor.shape)} that the module holds shares the memory of an argument"
                raise UncertifiedOp(f"an input of two origins:\n  {line}\nGive a copy of one of them.", (line,))

    def _complain(self, found: str) -> None:
        text = f"{found}: what Python computes there has no certificate, and may let rows meet."
        if self.graph_breaks == "warn":
            warnings.warn(text, RuntimeWarning, stacklevel=4)
            return
        raise UnsupportedModel(f"{text} {ADVICE}")


def current_call() -> Call | None:
    """The innermost call of this thread that is under way."""
    return getattr(_threads, "call", None)


def reporting(run: Callable[..., Any], held: Sequence[int]) -> Callable[..., Any]:
    """A graph that counts itself in the call that it answers.

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


def enter_calls() -> None:
    """Have torch.compile enter what a backend's ``around_calls`` makes of its options.

    torch looks for ``backend_ctx_ctor`` at the object that torch.compile puts around a backend, not at the backend, and
    may import this module while it makes that object: before the backend is put into it, and the options after that.
    """

    def get(self: Any) -> Any:
        return self.__dict__["compiler_fn"]

    def enter(self: Any, compiler_fn: Any) -> None:
        self.__dict__["compiler_fn"] = compiler_fn
        around_calls = getattr(compiler_fn, "around_calls", None)
        if around_calls is not None:
            self.backend_ctx_ctor = lambda: around_calls(self.kwargs.get("options") or {})()

    setattr(torch._TorchCompileWrapper, "compiler_fn", property(get, enter))  # noqa: B010


def _runs_hooks(frame: types.FrameType | None) -> bool:
    """Whether torch runs hooks around a call of what it compiled."""
    while frame is not None and (place := _place(frame))[0] in (eval_frame.__file__, module_calls.__file__):
        if place == (module_calls.__file__, "inner"):
            return True
        frame = frame.f_back
    return False


def _require_own_rows(arguments: Sequence[torch.Tensor]) -> None:
    """Reject arguments that share memory other than row by row, as a batch and its last row expanded do.

    Raises:
        UncertifiedOp: there are two.
    """
    by_storage = defaultdict[int, list[torch.Tensor]](list)
    for given in arguments:
        if given.layout is torch.strided and given.numel():
            by_storage[given.untyped_storage().data_ptr()].append(given)
    for tensors in by_storage.values():
        for one, other in itertools.combinations(tensors, 2):
            if not _share_rows_alone(one, other):
                line = f"{list(one.shape)} with strides {one.stride()}, and {list(other.shape)} with {other.stride()}"
                raise UncertifiedOp(
                    f"two arguments share memory, and a row of one lies in other rows of the other:\n  {line}\n"
                    "Give copies, or have the compiled callable hold what all rows share, in a closure.",
                    (line,),
                )


def _share_rows_alone(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage overlap at most in rows of the same number."""
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
    """Bytes from a tensor's first element to the end of its last one, over the dimensions from ``dim`` on."""
    extents = zip(tensor.shape[dim:], tensor.stride()[dim:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in extents)) * tensor.element_size()


def _place(frame: types.FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name


def _compile_wrapper() -> types.FrameType:
    """The frame of torch.compile that calls what it compiled."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if _place(frame)[0] == eval_frame.__file__ and {"fn", "args", "kwargs"} <= frame.f_locals.keys():
            return frame
        frame = frame.f_back
    raise UnsupportedModel(f"torch {torch.__version__} calls compiled modules in a way that detcompile does not know")


@contextlib.contextmanager
def _marked(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Their first dimensions are symbolic for torch.compile meanwhile."""
    before = []
    for tensor in tensors:
        own = tensor.__dict__
        if tensor.dim() and 0 not in own.get(MARKS[0], ()):
            before.append((own, {name: own[name] for name in MARKS if name in own}))
            own[MARKS[0]] = {*own.get(MARKS[0], ()), 0}
            own[MARKS[1]] = True
    try:
        yield
    finally:
        for own, had in reversed(before):  # one tensor may be given twice
            for name in MARKS:
                own.pop(name, None)
            own.update(had)
