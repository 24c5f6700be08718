"""The running backward, changes of tensors outside it, and whether a call is traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def backward_id() -> int:
    """Return the number of the backward that runs in this thread.

    Without it: gradients of backwards that run in several threads are mixed up.
    """
    return torch._C._current_graph_task_id()


def backward_keeps_graph() -> bool:
    """Return whether the backward that runs in this thread was called with retain_graph or create_graph.

    Without it: a trainer cannot reject a second backward of one forward.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def call_after_backward(function: Callable[[], Any]) -> None:
    """Call ``function`` when the backward that runs in this thread has ended.

    Without it: a backward's records are never dropped, and ranks cannot agree on an error after it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_traced() -> bool:
    """Return whether torch.func, torch.export, torch.jit.trace or make_fx traces the calls of this thread.

    Without it: a trace keeps the token ids of a call as constants, or fails with an error that does not say what to do.
    """
    transformed = torch._C._functorch.maybe_current_level() is not None or get_proxy_mode() is not None
    return transformed or torch.jit.is_tracing() or torch.compiler.is_exporting()


def tensor_hooks(parameter: Tensor) -> Any:
    """Return the hooks registered on a tensor, by number, or None.

    Without it: a hook that changes gradients one by one is not seen.
    """
    return parameter._backward_hooks


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, whose changes are not counted.

    Without it: an in-place change of a gradient or weight goes unnoticed.
    """
    return 0 if tensor.is_inference() else tensor._version
