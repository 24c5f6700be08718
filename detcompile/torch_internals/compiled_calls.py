"""Calls of objects that torch.compile returned: the contexts entered around them, and the frames around a graph."""

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch.fx import graph_module
from torch.nn.modules import module as module_calls
from torch.utils import _contextlib

from detcompile.errors import UnsupportedModel

# Frames between a compiled frame and torch.compile's that compute nothing for the caller.
TRANSPARENT = {
    (module_calls.__file__, "_wrapped_call_impl"),
    (module_calls.__file__, "_call_impl"),  # with hooks it continues in `inner`
    (_contextlib.__file__, "decorate_context"),  # @torch.no_grad()
    (graph_module.__file__, "__call__"),  # of an fx.GraphModule
    (graph_module.__file__, "call_wrapped"),
}
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # the second is not known to torch 2.11


class CompileWrapper(NamedTuple):
    """The frame of torch.compile that calls compiled code, and the call's arguments.

    Without it: see ``compile_wrapper``.
    """

    frame: types.FrameType
    given: list[Any]  # positional and keyword arguments
    owner: object  # the object whose method was compiled; None if a function was compiled


def enter_around_calls() -> None:
    """Make torch.compile enter a backend's ``around_calls(options)`` around each call.

    torch looks for ``backend_ctx_ctor`` on the object that torch.compile puts around a backend, not on the backend. It
    may import a backend's module while it makes that object, before it sets the backend and the options. Without it:
    code that Dynamo leaves to Python, and that no certificate covers, goes unnoticed.
    """

    def get(self: Any) -> Any:
        return self.__dict__["compiler_fn"]

    def enter(self: Any, compiler_fn: Any) -> None:
        self.__dict__["compiler_fn"] = compiler_fn
        around_calls = getattr(compiler_fn, "around_calls", None)
        if around_calls is not None:
            self.backend_ctx_ctor = lambda: around_calls(self.kwargs.get("options") or {})()

    setattr(torch._TorchCompileWrapper, "compiler_fn", property(get, enter))  # noqa: B010


def compile_wrapper() -> CompileWrapper:
    """Return the innermost frame of torch.compile that calls compiled code.

    Without it: tensor arguments cannot be marked before the call, nor distinguished from the module's tensors.

    Raises:
        UnsupportedModel: this thread's stack has none.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _place(frame)[0] == eval_frame.__file__ and {"fn", "args", "kwargs"} <= frame.f_locals.keys():
            variables = frame.f_locals
            given = [*variables["args"], *variables["kwargs"].values()]
            return CompileWrapper(frame, given, getattr(variables["fn"], "__self__", None))
        frame = frame.f_back
    raise UnsupportedModel(f"torch {torch.__version__} calls compiled modules in a way that detcompile does not know")


def calling_frame(frame: types.FrameType | None, wrapper: types.FrameType | None) -> types.FrameType | None:
    """Return the frame that called the compiled frame of a graph, skipping frames that compute nothing.

    It is ``wrapper`` if the graph is the whole call, and None if ``wrapper`` did not call it. Without it: code between
    the graphs of a call, which no certificate covers, goes unnoticed.
    """
    while frame is not None and _place(frame)[0] == eval_frame.__file__ and frame is not wrapper:
        frame = frame.f_back
    outside = frame and frame.f_back  # the caller of the compiled frame
    while outside is not None and outside is not wrapper and _place(outside) in TRANSPARENT:
        outside = outside.f_back
    return outside


def is_module_call(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to torch.nn.Module.__call__.

    Without it: a message about hooks of a compiled module names torch's code only.
    """
    return _place(frame)[0] == module_calls.__file__


def runs_hooks(frame: types.FrameType | None) -> bool:
    """Return whether torch runs hooks around a compiled call, given the frame of ``compile_wrapper``.

    Without it: hooks of the object that torch.compile returned go unnoticed.
    """
    while frame is not None and (place := _place(frame))[0] in (eval_frame.__file__, module_calls.__file__):
        if place == (module_calls.__file__, "inner"):
            return True
        frame = frame.f_back
    return False


def runs_another_forward(frame: types.FrameType) -> bool:
    """Return whether code other than torch's calls the graph of a compiled module.

    Without it: a replaced ``forward`` of the compiled module goes unnoticed.

    Args:
        frame: the frame of ``compile_wrapper``.
    """
    compiled = frame.f_locals["fn"]
    module = getattr(compiled, "__self__", None) or getattr(compiled, "__wrapped__", None)  # the latter by wrap_inline
    callee: types.FrameType | None = None
    caller: types.FrameType | None = frame
    while caller is not None:
        if callee is not None and _place(caller) == (module_calls.__file__, "_call_impl"):
            called = caller.f_locals.get("self")
            if isinstance(called, eval_frame.OptimizedModule) and called._orig_mod is module:
                return _place(callee)[0] != eval_frame.__file__
        callee, caller = caller, caller.f_back
    return False


@contextlib.contextmanager
def varying_rows(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Make the first dimension of tensors symbolic for torch.compile inside the block, and remove the marks after it.

    Without it: Dynamo makes a graph for each number of rows, up to its limit.
    """
    before = []
    for tensor in tensors:
        attributes = tensor.__dict__
        if tensor.dim() and 0 not in attributes.get(MARKS[0], ()):
            before.append((attributes, {name: attributes[name] for name in MARKS if name in attributes}))
            attributes[MARKS[0]] = {*attributes.get(MARKS[0], ()), 0}
            attributes[MARKS[1]] = True
    try:
        yield
    finally:
        for attributes, marks in reversed(before):  # one tensor may be given twice
            for name in MARKS:
                attributes.pop(name, None)
            attributes.update(marks)


def _place(frame: types.FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name
